"""The published scripts that ``third_party`` runs: where each is, its arguments, and small inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LOSS = r"(?i)\b(?:avg\.? )?(?:loss|err)\w*[\s:=|]*(-?\d+\.\d+(?:e[+-]\d+)?)"


@dataclass(frozen=True)
class Script:
    """One script: where it is, its arguments, and what makes its inputs in the folder it runs in."""

    name: str
    source: str
    path: str
    args: tuple[str, ...] = ()
    make: Callable[[Path], None] | None = None
    seed: str | None = "--seed"  # its option of a seed; "" where it needs one from outside; None: it has a fixed one
    losses: str = LOSS


# -- inputs -------------------------------------------------------------------------------------------


def mnist(count: int, folder: str = "data") -> Callable[[Path], None]:
    """Make the files of MNIST out of scikit-learn's digits, 8 x 8 pixels each, enlarged."""

    def make(here: Path) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        images = np.pad(found.images.repeat(3, 1).repeat(3, 2) * (255 / 16), ((0, 0), (2, 2), (2, 2))).astype("uint8")
        raw = here / folder / "MNIST" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        for part, a in (("train", 0), ("t10k", count)):
            x, y = images[a : a + count], found.target[a : a + count].astype("uint8")
            head = np.array([2051, len(x), 28, 28], ">i4").tobytes()
            (raw / f"{part}-images-idx3-ubyte").write_bytes(head + x.tobytes())
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(np.array([2049, len(y)], ">i4").tobytes() + y.tobytes())

    return make


def vae_inputs(here: Path) -> None:
    """Make digits, and the folder that the script writes pictures to."""
    mnist(896, "../data")(here)
    (here / "results").mkdir()


def images(folder: str, count: int, size: int) -> Callable[[Path], None]:
    """Make a folder of images in two classes: stripes across and down, with noise."""

    def make(here: Path) -> None:
        from PIL import Image

        random = np.random.default_rng(0)
        for part in ("train", "val"):
            for label in range(2):
                target = here / folder / part / f"class{label}"
                target.mkdir(parents=True, exist_ok=True)
                for i in range(count):
                    x = random.integers(0, 128, (size, size, 3), "uint8")
                    (x if label else x.transpose(1, 0, 2))[:: i % 5 + 2] += 100
                    Image.fromarray(x).save(target / f"{i}.png")

    return make


def text(here: Path) -> None:
    """Make a corpus out of Python's own help."""
    from pydoc_data.topics import topics

    words = " \n ".join(topics[name] for name in sorted(topics)).split(" ")
    for i, part in enumerate(("train", "valid", "test")):
        (here / f"{part}.txt").write_text(" ".join(words[15000 * i : 15000 * i + (15000 if not i else 3000)]))


# -- scripts ------------------------------------------------------------------------------------------

EXAMPLES, IGNITE, OPTIMIZER = "pytorch/examples", "pytorch-ignite", "torch-optimizer"
IMAGENET = ("images", "-b", "4", "--epochs", "1", "-j", "0", "-p", "1", "--lr", "0.001", "--no-accel")
SCRIPTS = (
    Script("mnist (ignite)", IGNITE, "examples/mnist/mnist.py", ("--epochs", "3"), mnist(640, "."), ""),
    Script(
        "mnist_save_resume (ignite)",
        IGNITE,
        "examples/mnist/mnist_save_resume_engine.py",
        ("--epochs", "3", "--log_interval", "2", "--log_dir", "logs"),
        mnist(640, "."),
        "",
    ),
    Script(
        "dcgan (ignite)",
        IGNITE,
        "examples/gan/dcgan.py",
        (
            *("--dataset", "fake", "--dataroot", ".", "--workers", "0", "--batch-size", "16", "--epochs", "7"),
            *("--g-filters", "8", "--d-filters", "8", "--output-dir", "out"),
        ),
        losses=r"errD: (\d+\.\d+)",
    ),
    Script("reinforce (ignite)", IGNITE, "examples/reinforcement_learning/reinforce.py", ("--max-episodes", "5")),
    Script("mnist, DiffGrad (torch-optimizer)", OPTIMIZER, "examples/mnist.py", (), mnist(128, "../data"), None),
    Script("mnist", EXAMPLES, "mnist/main.py", ("--epochs", "2", "--no-accel"), mnist(640, "../data")),
    Script("mnist_rnn", EXAMPLES, "mnist_rnn/main.py", ("--epochs", "2"), mnist(640, "../data")),
    Script("mnist_hogwild", EXAMPLES, "mnist_hogwild/main.py", ("--epochs", "1"), mnist(640, "../data")),
    Script(
        "mnist_forward_forward",
        EXAMPLES,
        "mnist_forward_forward/main.py",
        ("--epochs", "20", "--train_size", "256", "--test_size", "64", "--no_accel", "--log-interval", "1"),
        mnist(256),
        "",
    ),
    Script(  # it draws its pairs by Python's own random numbers, which it does not seed
        "siamese_network",
        EXAMPLES,
        "siamese_network/main.py",
        ("--epochs", "1", "--no-accel"),
        mnist(640, "../data"),
        "",
    ),
    Script("vae", EXAMPLES, "vae/main.py", ("--epochs", "3", "--no-accel", "--log-interval", "1"), vae_inputs),
    Script("regression", EXAMPLES, "regression/main.py", (), None, ""),
    Script(
        "dcgan",
        EXAMPLES,
        "dcgan/main.py",
        (
            *("--dataset", "fake", "--workers", "0", "--batchSize", "25", "--niter", "1", "--ngf", "8", "--ndf", "8"),
            "--dry-run",
        ),
        seed="--manualSeed",
    ),
    *(
        Script(
            f"word_language_model ({model})",
            EXAMPLES,
            "word_language_model/main.py",
            (
                *("--data", ".", "--epochs", "1", "--model", model, "--emsize", "64", "--nhid", "64", "--bptt", "20"),
                *("--log-interval", "4", "--batch_size", "20", "--nhead", "2", "--dropout", "0.1", *lr),
            ),
            text,
        )
        for model, lr in (("LSTM", ()), ("Transformer", ("--lr", "2")))  # at its 20 the latter diverges in fp32
    ),
    Script(
        "imagenet (resnet18)",
        EXAMPLES,
        "imagenet/main.py",
        IMAGENET,
        images("images", 16, 64),
    ),
    # For fp16, which converts after an optimizer's first step, and whose convolutions are slow on a CPU.
    Script("mnist (ignite), 64 images", IGNITE, "examples/mnist/mnist.py", ("--epochs", "4"), mnist(64, "."), ""),
    Script(
        "mnist_save_resume (ignite), 64 images",
        IGNITE,
        "examples/mnist/mnist_save_resume_engine.py",
        ("--epochs", "4", "--batch_size", "16", "--log_interval", "2", "--log_dir", "logs"),
        mnist(64, "."),
        "",
    ),
    Script(
        "dcgan (ignite), batches of 2",
        IGNITE,
        "examples/gan/dcgan.py",
        (
            *("--dataset", "fake", "--dataroot", ".", "--workers", "0", "--batch-size", "2", "--epochs", "1"),
            *("--g-filters", "8", "--d-filters", "8", "--output-dir", "out"),
        ),
        losses=r"err[DG]: (\d+\.\d+)",
    ),
    Script(
        "mnist, DiffGrad (torch-optimizer), 16 images",
        OPTIMIZER,
        "examples/mnist.py",
        (),
        mnist(16, "../data"),
        None,
    ),
    Script(
        "siamese_network, 64 images",
        EXAMPLES,
        "siamese_network/main.py",
        ("--epochs", "2", "--no-accel", "--log-interval", "1"),
        mnist(64, "../data"),
        "",
    ),
    Script(
        "dcgan, 4 iterations",
        EXAMPLES,
        "dcgan/main.py",
        (
            *("--dataset", "fake", "--workers", "0", "--batchSize", "250", "--niter", "1"),
            *("--ngf", "4", "--ndf", "4", "--nz", "16"),
        ),
        seed="--manualSeed",
    ),
    Script(
        "mnist, 128 images",
        EXAMPLES,
        "mnist/main.py",
        ("--epochs", "2", "--no-accel", "--log-interval", "1"),
        mnist(128, "../data"),
    ),
    Script(
        "imagenet (resnet18), 8 images",
        EXAMPLES,
        "imagenet/main.py",
        IMAGENET,
        images("images", 4, 64),
    ),
)
