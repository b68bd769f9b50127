"""The demo's data: scikit-learn's digits and Python's own source text. Nothing is downloaded.

``Digits().batch(step=3, size=32)`` is the same batch in every run and for every variant.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from amp_graph.errors import AmpGraphError

Batch = tuple[Tensor, Tensor]
SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))
TEXT_CHARACTERS = 1_500_000


class MissingData(AmpGraphError):
    """Something that the demo needs is not installed."""


@dataclass(frozen=True)
class Digits:
    """1,797 handwritten digits of 8x8 pixels, enlarged to 16x16; one fifth is held out."""

    images: Tensor
    labels: Tensor
    held: Batch

    @staticmethod
    def load() -> Digits:
        """Return the images that scikit-learn brings along."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise _missing("scikit-learn") from error
        found = load_digits()
        images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        images = torch.nn.functional.interpolate(images, scale_factor=2.0, mode="bilinear")
        labels = torch.tensor(found.target, dtype=torch.long)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        images, labels, cut = images[order], labels[order], len(labels) // 5
        return Digits(images[cut:], labels[cut:], (images[:cut], labels[:cut]))

    def batch(self, step: int, size: int) -> Batch:
        """Return the batch of one step."""
        chosen = torch.randint(len(self.labels), (size,), generator=torch.Generator().manual_seed(step))
        return self.images[chosen], self.labels[chosen]

    def held_out(self, size: int) -> Iterator[Batch]:
        """Return the held-out images in whole batches."""
        images, labels = self.held
        for start in range(0, len(labels) - size + 1, size):
            yield images[start : start + size], labels[start : start + size]


@dataclass(frozen=True)
class SourceText:
    """The text of the standard library's modules, as symbol numbers; the last tenth is held out."""

    ids: Tensor
    held: Tensor
    length: int

    @staticmethod
    def load(length: int, characters: int = TEXT_CHARACTERS) -> SourceText:
        """Read the modules in alphabetical order until there is enough text."""
        folder = Path(sysconfig.get_path("stdlib"))
        text, size = [], 0
        for path in sorted(folder.glob("*.py")):
            text.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(text[-1])
            if size >= characters:
                break
        if size < 100_000:
            raise MissingData(
                f"demo: {folder} holds no Python source text\n  fix:   a Python installed with its library"
            )
        number = {symbol: i for i, symbol in enumerate(SYMBOLS)}
        ids = torch.tensor([number.get(c, number["?"]) for c in "".join(text)[:characters]])
        cut = len(ids) * 9 // 10
        return SourceText(ids[:cut], ids[cut:], length)

    def batch(self, step: int, size: int) -> Batch:
        """Return the batch of one step: pieces of text, and the same one character on."""
        return _pieces(self.ids, self.length, size, step)

    def held_out(self, size: int) -> Iterator[Batch]:
        """Return twelve batches of text that was not trained on."""
        return (_pieces(self.held, self.length, size, step) for step in range(12))


def _pieces(ids: Tensor, length: int, size: int, seed: int) -> Batch:
    starts = torch.randint(len(ids) - length - 1, (size,), generator=torch.Generator().manual_seed(seed))
    rows = starts.unsqueeze(1) + torch.arange(length)
    return ids[rows], ids[rows + 1]


def _missing(package: str) -> MissingData:
    return MissingData(f"demo: {package} is not installed\n  fix:   pip install 'amp-graph[demo]'")
