"""Images for the ResNet: a folder in ImageFolder's layout, or scikit-learn's handwritten digits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parts.processes import Processes, epoch_order

Batch = tuple[Tensor, Tensor]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


@dataclass(frozen=True)
class Images:
    """A train and a held-out part; ``classes`` in the order of their numbers."""

    train: Any  # a Dataset: item (index, epoch) is (image, label)
    held: Any
    classes: list[str]

    def batches(self, batch: int, seed: int, epoch: int, processes: Processes, workers: int) -> Iterator[Batch]:
        """Return this process's share of the batches of an epoch."""
        order = [processes.share(indices).tolist() for indices in epoch_order(len(self.train), batch, seed, epoch)]
        return self._load(self.train, [[(i, epoch) for i in indices] for indices in order], workers)

    def held_out(self, batch: int, processes: Processes, workers: int) -> Iterator[Batch]:
        """Return this process's share of the held-out images; a last, smaller batch is kept."""
        indices = torch.arange(len(self.held))[processes.rank :: processes.count]
        return self._load(self.held, [[(i, -1) for i in part.tolist()] for part in indices.split(batch)], workers)

    def _load(self, data: Any, order: list[list[tuple[int, int]]], workers: int) -> Iterator[Batch]:
        return iter(torch.utils.data.DataLoader(data, batch_sampler=order, num_workers=workers))


def load_images(folder: str | None, size: int, seed: int) -> Images:
    """Load ``folder``, with ``train/CLASS/*.png`` and ``val/CLASS/*.png``; without one, the digits."""
    if folder is None:
        return _digits(size)
    root = Path(folder)
    if not (root / "train").is_dir() or not (root / "val").is_dir():
        raise SystemExit(f"{root}: no folder of images\n  legal: {root}/train/CLASS/*.png and {root}/val/CLASS/*.png")
    classes = sorted(path.name for path in (root / "train").iterdir() if path.is_dir())
    parts = [Folder(root / part, classes, size, seed, part == "train") for part in ("train", "val")]
    return Images(*parts, classes)


class Folder(torch.utils.data.Dataset):
    """The images of one part; those for training are cropped and flipped at random, by seed, epoch and image."""

    def __init__(self, root: Path, classes: list[str], size: int, seed: int, training: bool) -> None:
        files = [(p, i) for i, name in enumerate(classes) for p in sorted((root / name).glob("*"))]
        self.files = [(path, i) for path, i in files if path.suffix.lower() in ENDINGS]
        self.size, self.seed, self.training = size, seed, training

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int]:
        """Return the image ``item[0]`` as of epoch ``item[1]``, normalized, with its label."""
        import numpy as np
        from PIL import Image

        path, label = self.files[item[0]]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        draw = random.Random(f"{self.seed} {item}")
        box = self._box(draw, *image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = torch.tensor(np.asarray(image), dtype=torch.float32).permute(2, 0, 1) / 255
        if self.training and draw.random() < 0.5:
            pixels = pixels.flip(2)
        return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1), label

    def _box(self, draw: random.Random, width: int, height: int) -> tuple[float, float, float, float]:
        """Return what is cut out: a random part for training, else 7/8 of the middle, as 224 out of 256 pixels."""
        area, ratio = (draw.uniform(0.25, 1), draw.uniform(3 / 4, 4 / 3)) if self.training else (49 / 64, 1.0)
        side = (area * min(width, height) ** 2) ** 0.5
        w, h = min(width, side * ratio**0.5), min(height, side / ratio**0.5)
        at = (draw.random(), draw.random()) if self.training else (0.5, 0.5)
        x, y = at[0] * (width - w), at[1] * (height - h)
        return x, y, x + w, y + h


class Held(torch.utils.data.Dataset):
    """Images in memory."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int]:
        """Return an image and its label, the same in every epoch."""
        return self.images[item[0]], int(self.labels[item[0]])


def _digits(size: int) -> Images:
    """Return the 1,797 digits of scikit-learn, 8 x 8 pixels each, enlarged; one fifth is held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = torch.nn.functional.interpolate(images, size=(size, size), mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(labels) // 5
    parts = [Held(images[part], labels[part]) for part in (order[cut:], order[:cut])]
    return Images(*parts, [str(name) for name in found.target_names])
