"""The two training scripts: they learn, resume exactly, and train alike with one process and with two."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.example_styles import PAGE, RESULTS, with_table
from tests.test_examples import FOLDER, load

TINY_BERT = "--hidden_size 64 --num_hidden_layers 1 --max_seq_length 32 --vocab_size 1000".split()
REPORT = """
import json, os, sys, {0}
found = [training.losses for training in {0}.main(sys.argv[1:])]
open(f"{1}/losses{{os.environ.get('RANK', '0')}}.json", "w").write(json.dumps(found))
"""


@pytest.fixture
def script(monkeypatch):
    """Return what loads a script, which imports its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return load


def python(*words, **variables):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    found = subprocess.run([sys.executable, *map(str, words)], cwd=FOLDER, env=env, capture_output=True, text=True)
    return found.returncode, found.stdout, found.stderr


def losses(tmp_path, processes, name, *words, before=""):
    """Run a script in so many processes, behind the code ``before``; return its losses, a list for each level."""
    main = tmp_path / "main.py"
    main.write_text(before + REPORT.format(name, tmp_path))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes) if processes > 1 else ()
    status, _, errors = python(*launch, main, *words, PYTHONPATH=str(FOLDER))
    assert status == 0, errors
    first, *others = [json.loads((tmp_path / f"losses{rank}.json").read_text()) for rank in range(processes)]
    assert all(other == first for other in others)
    return first


def test_imagenet_smoke(script, tmp_path, capsys):
    words = "--steps 2 --epochs 1 -b 4 --size 32 --static-loss-scale 128.0".split()
    (trained,) = script("imagenet").main([str(as_files(tmp_path)), *words])
    assert len(trained.losses) == 2
    told = capsys.readouterr().out
    assert "images/s" in told
    assert told.splitlines()[-1].startswith("O1 ")
    assert "128, 0 skipped" in told


def test_bert_smoke(script, tmp_path, capsys):
    lines = [f"a {word} sentence number {i}\t{word == 'good'}\n" for i in range(20) for word in ("good", "bad")]
    for part in ("train", "dev"):
        (tmp_path / f"{part}.tsv").write_text("".join(["sentence\tlabel\n", *lines]))
    words = "--fp16 --loss_scale 0 --train_batch_size 8 --max_steps 2 --num_train_epochs 1 --data_dir".split()
    (trained,) = script("bert_classifier").main([*TINY_BERT, *words, str(tmp_path)])
    assert {p.dtype for p in trained.model.parameters()} == {torch.float16, torch.float32}  # the norms
    told = capsys.readouterr().out
    assert told.splitlines()[-1].startswith("O2 ")
    assert "65536, 0 skipped" in told


@pytest.mark.skipif("nvidia.dali" in sys.modules, reason="DALI is installed")
def test_dali_is_optional_and_missed_clearly(script):
    with pytest.raises(SystemExit, match=r"DALI is not installed.*\n  legal: --loader torch.*\n  fix:   pip install"):
        script("imagenet").main(["--loader", "dali"])


BAD = {
    ("imagenet", "no_such_folder"): "no folder of images",
    ("imagenet", "--arch", "vgg99"): "needs torchvision",
    ("imagenet", "--compare-levels", "--resume", "x.pt"): "leave --resume out",
    ("imagenet", "--opt-level", "O2", "--keep-batchnorm-fp32", "False"): "below O3 the parameters of norms are always",
    ("bert_classifier", "--data_dir", "no_such_folder"): "there is no such file",
}


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_what_is_wrong_is_said(script, words):
    with pytest.raises(SystemExit, match=BAD[words]):
        script(words[0]).main(list(words[1:]))


@pytest.mark.parametrize(("keep", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_norms_stay_fp32_at_o3_if_asked(script, keep, dtype):
    script("imagenet")
    levels = sys.modules["parts.levels"]
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    levels.at_level("O3", "bf16", 1.0, model, lambda found: torch.optim.SGD(found, lr=0.1), keep_norms=keep)
    assert (model[0].weight.dtype, model[1].weight.dtype) == (torch.bfloat16, dtype)


def test_the_page_has_the_table_of_the_recorded_styles():
    page = PAGE.read_text()
    assert with_table(page, json.loads(RESULTS.read_text())) == page


def as_files(folder):
    """Write 80 of the digits as a folder of images in ImageFolder's layout."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    found = load_digits()
    for i in range(80):
        target = folder / ("val" if i % 4 == 0 else "train") / f"digit{found.target[i]}"
        for part in ("train", "val"):
            (folder / part / target.name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.kron(found.images[i] * 15, np.ones((4, 4))).astype("uint8")).save(target / f"{i}.png")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--opt-level O2 --static-loss-scale 128.0 --dtype fp16",
        "--opt-level O2 --dynamic-loss-scale --dtype fp16 --channels-last",
        "--opt-level O1 --dynamic-loss-scale --cudnn-benchmark -j 1",
        "--opt-level O3",
        "--compare-levels --print-freq 1",
    ],
)
def test_the_styles_of_imagenet_over_a_folder(script, words, tmp_path, capsys):
    given = [str(as_files(tmp_path)), *"--size 32 -b 8 --epochs 1 --steps 3".split()]
    trained = script("imagenet").main([*given, *words.split()])
    assert all(torch.tensor(t.losses).isfinite().all() and len(t.losses) == 3 for t in trained)
    told = capsys.readouterr().out
    assert [line[:2] for line in told.splitlines()[-len(trained) :]] == [t.level for t in trained]


@pytest.mark.slow
def test_both_learn(script):
    """Far above chance: a tenth of the digits, and the most frequent class of the texts (29 %)."""
    (images,) = script("imagenet").main("--epochs 2 --dynamic-loss-scale".split())
    assert images.accuracy > 0.6
    (texts,) = script("bert_classifier").main([*TINY_BERT, *"--opt_level O2 --num_train_epochs 2".split()])
    assert texts.accuracy > 0.6


SMALL = {
    "imagenet": "--epochs 2 --steps 3 -b 8 --size 32 --norm group --lr 0.004 --dynamic-loss-scale --opt-level",
    "bert_classifier": f"--num_train_epochs 2 --max_steps 4 --train_batch_size 16 {' '.join(TINY_BERT)} --opt_level",
}
# Before a script: all of it in fp64, inputs as well.
EXACT = """
import torch
torch.set_default_dtype(torch.float64)
def widened(module, given):
    return tuple(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in given)
torch.nn.modules.module.register_module_forward_pre_hook(widened)
"""
SAVES = {"imagenet": "--output-dir", "bert_classifier": "--output_dir"}


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", SMALL)
def test_a_resumed_run_equals_the_uninterrupted_one(script, name, level, tmp_path):
    """Bit for bit, in parameters and buffers, with batch norms and dropout."""
    words = [*SMALL[name].replace("--norm group ", "").split(), level]
    (whole,) = script(name).main([*words, SAVES[name], str(tmp_path)])
    (first,) = tmp_path.glob("*-1.pt")
    (resumed,) = script(name).main([*words, "--resume", str(first)])
    assert resumed.losses == whole.losses
    assert resumed.accuracy == whole.accuracy
    state = whole.model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in resumed.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(("level", "near"), [("O0", 1e-9), ("O1", 2**-6), ("O2", 2**-6)])
@pytest.mark.parametrize("name", SMALL)
def test_two_processes_train_as_one_with_twice_the_batch(name, level, near, tmp_path):
    """Within rounding: of bf16, in which one process at O1 is as far from O0; and at O0 of fp64.

    In fp32 a rounding may decide where a ReLU or a pool is at a kink: by the sixth loss of the images either one
    process or two are 2.5e-4 from fp64, with oneDNN one, without it two.
    The batch statistics of batch norms are each process's own, so there are none.
    """
    words = [*SMALL[name].split(), level]
    if name == "bert_classifier":  # its batch is that of all processes
        one, two = [*words, "--dropout", "0"], [*words, "--dropout", "0"]
    else:
        one, two = [*words, "-b", "8"], [*words, "-b", "4"]
    before = EXACT if level == "O0" else ""
    (alone,), (both,) = (losses(tmp_path, n, name, *w, before=before) for n, w in ((1, one), (2, two)))
    assert len(alone) >= 6
    assert both == pytest.approx(alone, abs=near, rel=near)


@pytest.mark.slow
def test_batch_norms_of_two_processes_are_those_of_fp32_in_two(tmp_path):
    """Their statistics are each process's own, so that one process is no yardstick.

    The first loss alone: over a few images a batch norm makes rounding large. Over 4, the gradients under autocast are
    66 % of their norm from fp64, those at O2 63 %.
    """
    small = "--epochs 1 --steps 2 --size 32 --lr 0.004 --keep-batchnorm-fp32 True --opt-level".split()
    (low,), (full,), (alone,) = (
        losses(tmp_path, count, "imagenet", *small, level, "-b", batch)
        for count, level, batch in ((2, "O2", "8"), (2, "O0", "8"), (1, "O0", "16"))
    )
    assert low[0] == pytest.approx(full[0], rel=2**-7)
    assert abs(low[0] - full[0]) < abs(alone[0] - full[0]) / 4
