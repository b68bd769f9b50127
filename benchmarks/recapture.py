"""What calls cost that differ from each other: total time of loops, first captures included, beside torch.autocast's.

Before: a graph for each value of a counter. After: ``python benchmarks/recapture.py`` prints the seconds of each loop
under amp_graph and torch.autocast in CPU time of the process, how many graphs were kept, and whether the total is
within 1.5 times autocast's plus 10 seconds. ``--calls 400``: longer loops; ``--only counter,trips``: some.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of

WIDTH, LAYERS, ROWS = 128, 6, 32
FACTOR, SECONDS = 1.5, 10.0  # what a loop may take: so many times autocast's, and so much beside


class Net(nn.Module):
    """A stack of layers, of which subclasses make something that changes from call to call."""

    calls, tau = 0, 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        """Take x [rows, WIDTH] to [rows, 8]."""
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Counter(Net):
    """A warm-up by a counter."""

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        """Count, and weight the result."""
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 100)


class Annealed(Net):
    """A temperature that falls."""

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        """Lower the temperature, and divide by it."""
        self.tau *= 0.99
        return super().forward(x) / self.tau


class Trips(Net):
    """As many turns as an argument says."""

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        """Take the turns."""
        for _ in range(int(given[0])):
            x = x + self.layers[0](x)
        return super().forward(x)


class Depth(Net):
    """A part of each result that grows from call to call, for each layer apart: all is specialised."""

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        """Take one column more than in the last call."""
        self.calls += 1
        for layer in self.layers:
            x = x + layer(x) * (1.0 if self.calls % 7 else 0.5)
        return self.head(x) + x[:, : self.calls % WIDTH + 1].mean()


class Converging(Net):
    """Turns until a value is small."""

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        """Take turns."""
        while x.norm() > 20:
            x = 0.7 * self.layers[0](x) + 0.1 * x
        return super().forward(x)


class Early(Net):
    """Leaves a loop by a value."""

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        """Leave where the value is small."""
        for layer in self.layers:
            x = x + layer(x)
            if x.abs().mean() > 3 + len(given):
                break
        return self.head(x)


class Named(Net):
    """Another word at each call."""

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        """Read the word."""
        return super().forward(x) if given[0] != "none" else self.head(x)


def rows(n: int) -> tuple[Any, ...]:
    """Return the arguments of call ``n``: another number of rows."""
    return (torch.randn(n % 30 + 2, WIDTH),)


def same(n: int) -> tuple[Any, ...]:
    """Return those of a call whose sizes stay."""
    return (torch.randn(ROWS, WIDTH) * (1 + n % 5),)


def numbered(n: int) -> tuple[Any, ...]:
    """Return those of a call with a number."""
    return (*same(n), n % 40)


def named(n: int) -> tuple[Any, ...]:
    """Return those of a call with a word."""
    return (*same(n), f"call {n}")


CALLS: dict[str, tuple[type[Net], Callable[[int], tuple[Any, ...]]]] = {
    "counter": (Counter, same),
    "annealed": (Annealed, same),
    "trips": (Trips, numbered),
    "columns": (Depth, same),
    "lengths": (Net, rows),
    "converging": (Converging, same),
    "early": (Early, same),
    "words": (Named, named),
}


def loops(calls: int) -> Iterator[tuple[str, Callable[[], float], Callable[[], tuple[float, int]]]]:
    """Yield name, seconds under autocast, and (seconds, graphs) under amp_graph, of each loop: calls, then steps."""
    for name, (kind, given) in CALLS.items():
        model = kind()
        batches = [given(n) for n in range(calls)]
        yield f"{name}, calls", lambda m=model, b=batches: by_autocast(m, b), lambda m=model, b=batches: by_us(m, b)
        yield f"{name}, steps", lambda m=model, b=batches: steps(m, b), lambda m=model, b=batches: our_steps(m, b)


def by_autocast(model: Net, batches: list[tuple[Any, ...]]) -> float:
    """Return the seconds of calls without gradients."""
    model, began = copy.deepcopy(model), time.process_time()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for given in batches:
            model(*given)
    return time.process_time() - began


def by_us(model: Net, batches: list[tuple[Any, ...]]) -> tuple[float, int]:
    """Return the same of a converted model, and how many graphs it has."""
    model, began = amp_graph.convert(copy.deepcopy(model), "bf16"), time.process_time()
    with torch.no_grad():
        for given in batches:
            model(*given)
    found = conversion_of(model)
    assert found is not None, "converted above"
    return time.process_time() - began, len(found.graphs)


def _loss(out: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out, torch.ones_like(out))


def steps(model: Net, batches: list[tuple[Any, ...]]) -> float:
    """Return the seconds of training steps."""
    model = copy.deepcopy(model)
    optimizer, began = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), time.process_time()
    for given in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(model(*given))
        loss.backward()
        optimizer.step()
    return time.process_time() - began


def our_steps(model: Net, batches: list[tuple[Any, ...]]) -> tuple[float, int]:
    """Return the same of a ``TrainStep``."""
    model = copy.deepcopy(model)
    optimizer, began = torch.optim.AdamW(model.parameters(), lr=1e-4), time.process_time()
    step = amp_graph.TrainStep(model, _loss, optimizer, "bf16")
    for given in batches:
        step(given)
    return time.process_time() - began, len(step.captured)


def main() -> None:
    """Print a line a loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--only", default="", help="names, with commas")
    asked = parser.parse_args()
    wanted = set(filter(None, asked.only.split(",")))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, theirs, ours in loops(asked.calls):
        if wanted and name.partition(",")[0] not in wanted:
            continue
        base = theirs()
        seconds, graphs = ours()
        within = "within" if seconds <= FACTOR * base + SECONDS else "BEYOND"
        print(
            f"{name:20} autocast {base:6.2f} s, amp_graph {seconds:6.2f} s, {graphs:2} graphs, {within} the bound",
            flush=True,
        )


if __name__ == "__main__":
    main()
