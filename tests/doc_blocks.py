"""The code blocks of the documentation, and what they take as given."""

import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

import amp_graph

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?:^<!-- (?P<mark>continues|not run: [^\n]+) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.S | re.M)
BATCHES = 3


@dataclass(frozen=True)
class Block:
    """A block of code; ``why`` says why it is not run, if so."""

    page: str
    line: int
    language: str
    code: str
    continues: bool
    why: str

    @property
    def name(self):
        return f"{self.page}:{self.line}"


def blocks_of(page):
    """Yield the blocks of a page in order."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    for found in FENCE.finditer(text):
        mark = found["mark"] or ""
        line = text.count("\n", 0, found.start("code")) + 1
        why = mark.removeprefix("not run: ") if mark.startswith("not run: ") else ""
        yield Block(name, line, found["language"], found["code"], mark == "continues", why)


def chains(blocks):
    """Return ``blocks`` as runs, each a block and those after it that continue it."""
    runs = []
    for block in blocks:
        if block.continues:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def given():
    """Return the names that a block takes as given; docs/README.md lists them."""
    torch.manual_seed(0)
    layers = {"up": torch.nn.Linear(16, 64), "act": torch.nn.GELU(), "norm": torch.nn.LayerNorm(64)}
    model = torch.nn.Sequential(OrderedDict(**layers, lm_head=torch.nn.Linear(64, 4)))
    batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(BATCHES)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    names = {"torch": torch, "amp_graph": amp_graph, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    return {**names, "loss_fn": F.cross_entropy, "batches": batches, "x": batches[0][0], "y": batches[0][1]}
