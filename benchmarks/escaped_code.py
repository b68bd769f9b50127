"""What code that escapes capture costs: in fp32, under the policy's autocast, and a model that is all autocast's.

Before: a loop over experts multiplies in fp32. After: as under autocast. ``python benchmarks/escaped_code.py`` prints
times as ratios to torch.autocast, forward and backward, interleaved in one process; medians and quartiles.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings

import torch
from torch import nn

import amp_graph

EXPERTS, WIDTH, HIDDEN, LAYERS = 4, 256, 1024, 2


class Expert(nn.Module):
    """What one expert computes: a piece that is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take x [rows, WIDTH] to the same shape."""
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Experts(nn.Module):
    """Every row goes to one expert, which the row decides: a loop that cannot be captured, with a product in it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.gate = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, HIDDEN)
        self.experts, self.back = nn.ModuleList(Expert() for _ in range(EXPERTS)), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take x [rows, WIDTH] to the same shape."""
        chosen = self.router(x).argmax(-1)
        total = torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows = (chosen == expert).nonzero()[:, 0]
            torch._dynamo.graph_break()
            made = self.experts[expert](x[rows]) + self.back(torch.relu(self.gate(x[rows])))
            total = total.index_add(0, rows, made.to(total.dtype))
        return total


class Block(nn.Module):
    """A captured piece before the loop, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take x [rows, WIDTH] to the same shape."""
        x = x + self.mix(self.norm(x))
        return x + self.experts(x)


def step(model: nn.Module, x: torch.Tensor, autocast: bool) -> float:
    """Return the seconds of one forward and backward, of the processor."""
    model.zero_grad()
    start = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    out.float().square().mean().backward()
    return time.process_time() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(LAYERS))), torch.randn(given.rows, WIDTH)
    variants = {
        "torch.autocast": (copy.deepcopy(model), True),
        "fp32": (copy.deepcopy(model), False),
        "amp_graph": (amp_graph.convert(copy.deepcopy(model), "bf16"), False),
        "amp_graph, escaped=fp32": (amp_graph.convert(copy.deepcopy(model), "bf16,escaped=fp32"), False),
    }
    for one, autocast in variants.values():
        for _ in range(6):
            step(one, x, autocast)
    rounds = [{name: step(one, x, a) for name, (one, a) in variants.items()} for _ in range(given.rounds)]
    base = statistics.median(r["torch.autocast"] for r in rounds)
    print(f"torch {torch.__version__}, {given.rows} rows, autocast {base * 1e3:.1f} ms; time / autocast's")
    for name in variants:
        ratios = sorted(r[name] / r["torch.autocast"] for r in rounds)
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(f"{name:26s} {statistics.median(ratios):.2f} [{low:.2f}-{high:.2f}]")


if __name__ == "__main__":
    main()
