"""The code blocks of the documentation, and what they take as given."""

import importlib.util
import re
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

import amp_graph

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = r"^<!-- (?P<mark>continues|not run: [^\n]+|needs: [^\n]+) -->\n+"
FENCE = re.compile(rf"(?:{MARK})?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = re.compile(
    r"^(?:\$ )?(?:\w+=\S+ )*(?P<program>amp-graph|python3?|torchrun|accelerate|pip|make) ", re.MULTILINE
)
LAYERS = ("up", "act", "norm", "lm_head")
MODEL = """\
import torch


def build():
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    return model, torch.randn(8, 16)
"""


@dataclass(frozen=True)
class Block:
    """A block of code: its mark, and the line of its page at which it begins."""

    page: str
    line: int
    language: str
    code: str
    mark: str

    @property
    def name(self):
        return f"{self.page}:{self.line}"

    @property
    def why_not_run(self):
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run: ") else ""

    @property
    def needs(self):
        return self.mark.removeprefix("needs: ").split(", ") if self.mark.startswith("needs: ") else []

    @property
    def commands(self):
        """The command lines of a block of a shell, without the pipes behind them."""
        lines = self.code.splitlines() if self.language in ("", "sh", "console") else []
        if self.language == "console":  # the other lines are what the commands print
            lines = [line for line in lines if line.startswith("$ ")]
        return [re.split(r" [|>] ", line.removeprefix("$ "))[0] for line in lines if PROGRAMS.match(line)]


def module_at(path, name):
    """Return the file at ``path`` as the module ``name``."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dynamo looks a function's globals up by its module's name
    spec.loader.exec_module(module)
    return module


def blocks_of(page):
    """Return the blocks of a page in order."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    return [
        Block(name, text.count("\n", 0, found.start("code")) + 1, found["language"], found["code"], found["mark"] or "")
        for found in FENCE.finditer(text)
    ]


def chains(blocks):
    """Return ``blocks`` in runs, each a block and those after it that continue it."""
    runs = []
    for block in blocks:
        if block.mark == "continues":
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def given():
    """Return the names that a block takes as given; docs/README.md lists them."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 4))
    model = torch.nn.Sequential(OrderedDict(zip(LAYERS, layers, strict=True)))
    batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(3)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    names = {"torch": torch, "amp_graph": amp_graph, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    return {**names, "loss_fn": F.cross_entropy, "batches": batches, "x": batches[0][0], "y": batches[0][1]}


def run_blocks(blocks, names):
    """Run ``blocks`` in order over ``names``."""
    for block in blocks:
        code = "\n" * (block.line - 1) + block.code  # errors show the line of the page
        exec(compile(code, block.page, "exec"), names)
