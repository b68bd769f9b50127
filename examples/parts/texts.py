"""Text to classify: a folder in GLUE's form, or passages of Python's standard library by their package."""

from __future__ import annotations

import csv
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parts.processes import Processes, epoch_order

PACKAGES = ("asyncio", "ctypes", "email", "http", "importlib", "multiprocessing", "unittest", "xml")
LINES = 8  # of a passage
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORD = re.compile(r"[a-z]+|[0-9]+|[^\w\s]")
Example = tuple[str, int]
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Texts:
    """Tokenized examples: rows of token numbers, padded with 0, and labels."""

    train: tuple[Tensor, Tensor]
    held: tuple[Tensor, Tensor]
    classes: list[str]
    tokens: int  # of the vocabulary

    def batches(self, batch: int, seed: int, epoch: int, processes: Processes) -> Iterator[Batch]:
        """Return this process's share of the batches of an epoch."""
        for indices in epoch_order(len(self.train[1]), batch, seed, epoch):
            yield _batch(self.train, processes.share(indices), processes)

    def held_out(self, batch: int, processes: Processes) -> Iterator[Batch]:
        """Return this process's share of the held-out examples; a last, smaller batch is kept."""
        for indices in torch.arange(len(self.held[1]))[processes.rank :: processes.count].split(batch):
            yield _batch(self.held, indices, processes)

    def chance(self) -> float:
        """Return the accuracy of always naming the most frequent class."""
        return (self.held[1].bincount().max() / len(self.held[1])).item()


def load_texts(folder: str | None, length: int, vocabulary: int) -> Texts:
    """Load ``folder``, with ``train.tsv`` and ``dev.tsv``: a header, then a sentence, a tab and a label a line."""
    if folder is None:
        train, held, classes = _standard_library()
    else:
        parts = [_read(Path(folder, name)) for name in ("train.tsv", "dev.tsv")]
        classes = sorted({label for part in parts for _, label in part})
        train, held = ([(text, classes.index(label)) for text, label in part] for part in parts)
    return _tokenized(train, held, classes, length, vocabulary)


def _standard_library() -> tuple[list[Example], list[Example], list[str]]:
    """Return passages of eight lines each, without imports, as they name packages; every fifth is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Example] = []
    for label, package in enumerate(PACKAGES):
        for path in sorted((root / package).rglob("*.py")):
            lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
            kept = [line for line in lines if line and not line.startswith(("import ", "from "))]
            found += [("\n".join(kept[i : i + LINES]), label) for i in range(0, len(kept) - LINES + 1, LINES)]
    if len(found) < 1000:
        raise SystemExit(
            f"{root} holds no Python source text\n  fix:   --data_dir, a folder with train.tsv and dev.tsv"
        )
    return [e for i, e in enumerate(found) if i % 5], found[::5], list(PACKAGES)


def _read(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise SystemExit(f"{path}: there is no such file\n  legal: a folder with train.tsv and dev.tsv, as SST-2's")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    if bad := [i for i, row in enumerate(rows) if len(row) != 2]:
        raise SystemExit(f"{path}: line {bad[0] + 2} has not two columns\n  legal: a sentence, a tab and a label")
    return [(text, label) for text, label in rows]


def _tokenized(train: list[Example], held: list[Example], classes: list[str], length: int, vocabulary: int) -> Texts:
    """Number the words of both parts by how frequent they are in the text for training; the rest is unknown."""
    counts = Counter(word for text, _ in train for word in WORD.findall(text.lower()))
    kept = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - len(SPECIAL)]
    number = {word: i for i, word in enumerate([*SPECIAL, *kept])}

    def numbered(examples: list[Example]) -> tuple[Tensor, Tensor]:
        rows = torch.zeros(len(examples), length, dtype=torch.long)
        for row, (text, _) in zip(rows, examples, strict=True):
            words = ["[CLS]", *WORD.findall(text.lower())[: length - 2], "[SEP]"]
            row[: len(words)] = torch.tensor([number.get(word, 1) for word in words])
        return rows, torch.tensor([label for _, label in examples])

    return Texts(numbered(train), numbered(held), classes, len(number))


def _batch(part: tuple[Tensor, Tensor], indices: Tensor, processes: Processes) -> Batch:
    ids, labels = (t[indices].to(processes.device) for t in part)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}
