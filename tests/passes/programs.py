"""Random small programs: modules that run a list of steps over a pool of values.

The same steps run eagerly, under Dynamo and under ``torch.fx.symbolic_trace``.
"""

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.graphs import Capture, capture

ROWS, WIDTH = 4, 8  # every value of the pool is [ROWS, WIDTH]


@dataclass(frozen=True)
class Line:
    """One step: what it does, to which values of the pool, with which numbered parameter."""

    kind: str
    reads: tuple[int, ...]
    state: int = 0


def _split_swap(x: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat([b, a], -1)


def _write_view(x: Any) -> Any:
    y = x * 1.5
    y[:, :4].add_(0.25)
    return y


def _write_after_read(x: Any, w: Any) -> Any:
    y = x @ w
    before = y.relu()
    y.view(-1)[8:].mul_(0.5)
    return y @ w + before


def _write_mixed(x: Any, other: Any) -> Any:
    y = x + 0.5
    y[1:].add_(other[1:])
    return y


def _without_grad(x: Any, w: Any) -> Any:
    with torch.no_grad():
        mask = torch.sigmoid(x @ w)
    return x * mask


ONE = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "exp": lambda x: torch.exp(-x.abs()),
    "view": lambda x: x.view(2, -1).view(ROWS, WIDTH),
    "transpose": lambda x: x.reshape(WIDTH, ROWS).transpose(0, 1),
    "split_swap": _split_swap,
    "sum": lambda x: x - x.sum(-1, keepdim=True) / 8,
    "write_view": _write_view,
    "float": lambda x: x.float(),
    "low": lambda x: x.bfloat16().float(),
    "there_and_back": lambda x: x.bfloat16().float().bfloat16().float(),
    "wide_reader": lambda x: (lambda y: y + y.float().bfloat16().float())(x.bfloat16().float()),
}
TWO = {"add": torch.add, "mul": lambda x, y: x * torch.tanh(y), "write_mixed": _write_mixed}
SQUARE = {"matmul": torch.matmul, "write_after_read": _write_after_read, "scaled": lambda x, w: x @ (w * 0.5)}
WITH_GRAD_MODE = {"no_grad": _without_grad}


class Program(nn.Module):
    """A random program of ``seed``: 5 to 25 steps over shared parameters and multi-reader values."""

    def __init__(self, seed: int, *, grad_modes: bool = True) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.squares = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(2))
        kinds = [*ONE, *TWO, *SQUARE, *["linear"] * 6, *["norm"] * 2, *(WITH_GRAD_MODE if grad_modes else ())]
        self.lines = []
        for i in range(draw.randint(5, 14)):
            pick = [i + 1 if draw.random() < 0.6 else draw.randint(0, i + 1) for _ in range(2)]
            self.lines.append(Line(draw.choice(kinds), tuple(pick), draw.randint(0, 5)))

    def forward(self, x, y):
        pool = [x, y]
        for line in self.lines:
            pool.append(self._do(line, [pool[i] for i in line.reads]))
        return pool[-1], pool[-2].sum()

    def _do(self, line: Line, values: list[Any]) -> Any:
        square = self.squares[line.state % 2]
        if line.kind in ONE:
            return ONE[line.kind](values[0])
        if line.kind in TWO:
            return TWO[line.kind](*values)
        if line.kind in SQUARE:
            return SQUARE[line.kind](values[0], square)
        if line.kind in WITH_GRAD_MODE:
            return WITH_GRAD_MODE[line.kind](values[0], square)
        layers = self.linears if line.kind == "linear" else self.norms
        return layers[line.state % len(layers)](values[0])


def program(seed: int, *, grad_modes: bool = True) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return the program of ``seed`` with its weights, and inputs for it (one of them trains)."""
    torch.manual_seed(seed)
    model = Program(seed, grad_modes=grad_modes)
    return model, (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True))


@cache
def captured(seed: int) -> Capture:
    """Return the graph of ``program(seed)``, captured once for all tests of a process."""
    model, inputs = program(seed)
    return capture(model, *inputs)
