"""Models whose calls are made to fail inside of amp_graph: each call is as a plain one, and says once what failed.

    python -m tests.failing_calls --count 200 --seed 0

A draw is a model of the corpus, a place (capture, a pass, a kernel that cannot be built, or only from backward on, a
rewritten graph in its first or second call, before or behind its writes), a half dtype, and whether gradients are
recorded. Two calls are compared with those of a copy in fp32: results and gradients within 1.5 of autocast's error,
buffers, random state and warnings.
"""

import argparse
import contextlib
import copy
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

import amp_graph
from amp_graph.capture import captured_graphs
from amp_graph.errors import AmpGraphWarning
from amp_graph.passes.native import jit_compiler, kernel_table
from amp_graph.passes.pipeline_table import TABLE
from tests.corpus import CASES, Case, make
from tests.corpus.losses import float_leaves

SAID = "made to fail"
FACTOR, FLOOR = 1.5, 2.0**-9  # of autocast's error, and of the value
PASSES = sorted({row.cls.name: row.cls for row in TABLE}.items())
PLACES = ("capture", "kernel", "before call 1", "behind call 1", "before call 2", "behind call 2", "kernel in backward")


@dataclass(frozen=True)
class Draw:
    """A model and the place where it fails."""

    case: str
    place: str
    dtype: str
    trains: bool

    def __str__(self) -> str:
        return f"{self.case}, {self.place}, {self.dtype}, {'trains' if self.trains else 'no_grad'}"


def drawn(seed: int) -> Draw:
    """Return the draw of a seed: half of them fail in a pass."""
    rng = random.Random(seed)
    places = [*PLACES, *(f"pass {name}" for name, _ in rng.sample(PASSES, len(PLACES)))]
    return Draw(rng.choice(sorted(CASES)), rng.choice(places), rng.choice(("bf16", "fp16")), rng.random() < 0.6)


@dataclass
class Calls:
    """What two calls left: results and gradients, buffers, random state, warnings of ours, and whether it failed."""

    values: list[torch.Tensor]
    buffers: list[torch.Tensor]
    drawn: torch.Tensor
    said: list[str]


def calls_of(case: Case, draw: Draw, convert: Callable[[nn.Module], nn.Module] | None = None, low: Any = None) -> Calls:
    """Make two calls of a model, with backward if it trains; ``low``: under autocast."""
    model, positional, keyword = make(case, 0)
    called = convert(model) if convert else model
    region = torch.autocast("cpu", low) if low else contextlib.nullcontext()
    torch.manual_seed(7)
    values: list[torch.Tensor] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            given = copy.deepcopy((positional, keyword))
            model.zero_grad()
            with torch.set_grad_enabled(draw.trains):
                with region:
                    out = called(*given[0], **given[1])
                    loss = case.loss(out)
                values += [t.detach().double() for t in float_leaves(out) if not t.is_complex()]
                if loss.requires_grad:
                    loss.backward()
                    values += [p.grad.double() for p in model.parameters() if p.grad is not None]
    ours = [f"{w.filename}:{w.lineno}: {w.message}" for w in said if issubclass(w.category, AmpGraphWarning)]
    return Calls(values, [b.detach().clone() for b in model.buffers()], torch.rand(3), ours)


@contextlib.contextmanager
def failing(place: str, seen: list[str]) -> Iterator[None]:
    """Make ``place`` raise, and note that it did."""

    def fail(*_: Any, **__: Any) -> Any:
        seen.append(place)
        raise (jit_compiler.CompilerError if place.startswith("kernel") else KeyError)(SAID)

    with contextlib.ExitStack() as stack:
        if place == "capture":
            stack.enter_context(mock.patch.object(captured_graphs, "name_nodes", fail))
        elif place.startswith("kernel"):
            loaded = jit_compiler._loaded

            def built(*given: Any) -> Any:
                in_backward = torch._C._current_graph_task_id() != -1
                return fail() if in_backward or place == "kernel" else loaded(*given)

            stack.callback(jit_compiler.load.cache_clear)
            stack.callback(jit_compiler._failed.clear)
            jit_compiler.load.cache_clear()
            for loader in kernel_table._loaders.values():
                loader.cache_clear()
                stack.callback(loader.cache_clear)
            stack.enter_context(mock.patch.object(jit_compiler, "_loaded", built))
        elif place.startswith("pass "):
            kind = dict(PASSES)[place.removeprefix("pass ")]
            own = kind.run

            def half(self: Any, gm: Any) -> Any:
                own(self, gm)
                return fail()

            stack.enter_context(mock.patch.object(kind, "run", half))
        else:
            when, _, number = place.partition(" call ")
            lower = captured_graphs.lower

            def lowered(*given: Any, **options: Any) -> Any:
                run, count = lower(*given, **options), 0

                def call(*args: Any) -> Any:
                    nonlocal count
                    count += 1
                    if count == int(number) and when == "before":
                        fail()
                    out = run(*args)
                    if count == int(number):
                        fail()
                    return out

                return call

            stack.enter_context(mock.patch.object(captured_graphs, "lower", lowered))
        yield


def faults_of(draw: Draw) -> tuple[list[str], bool]:
    """Return what is wrong with the calls of a draw, and whether its place was reached."""
    case, low = CASES[draw.case], {"bf16": torch.bfloat16, "fp16": torch.float16}[draw.dtype]
    torch._dynamo.reset()
    exact, seen = calls_of(case, draw), []
    try:
        autocast = calls_of(case, draw, low=low)
    except Exception:  # an operation without a low kernel: then our calls are fp32's
        autocast = None
    with failing(draw.place, seen):
        try:
            ours = calls_of(case, draw, lambda model: amp_graph.convert(model, draw.dtype))
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            return [f"raised {type(error).__name__}: {error} ({line.filename}:{line.lineno})"[:300]], bool(seen)
    wrong = []
    if [t.shape for t in ours.values] != [t.shape for t in exact.values]:
        wrong.append("other results or gradients")
    else:
        wrong += _errors(ours.values, exact.values, autocast.values if autocast else exact.values)
    for name, a, b in zip(range(len(exact.buffers)), ours.buffers, exact.buffers, strict=True):
        if not a.is_floating_point() and not torch.equal(a, b):
            wrong.append(f"buffer {name} is {a.tolist()}, not {b.tolist()}"[:200])
    if not torch.equal(ours.drawn, exact.drawn):
        wrong.append("another random state")
    told = [one for one in ours.said if SAID in one]
    if seen and len(set(told)) != len(told):
        wrong.append(f"said twice: {told[0]}"[:300])
    if seen and not told and not draw.place.startswith("kernel"):
        wrong.append(f"not said: {ours.said}"[:300])
    return wrong, bool(seen)


def _errors(ours: list[torch.Tensor], exact: list[torch.Tensor], autocast: list[torch.Tensor]) -> list[str]:
    """Compare all values together, as single ones are draws of a random number."""
    size = sum(float(t.square().sum()) for t in exact if t.isfinite().all()) ** 0.5
    if any(not t.isfinite().all() for t in (*exact, *autocast)):
        return []
    off = [
        sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True)) ** 0.5
        for found in (ours, autocast)
    ]
    allowed = FACTOR * off[1] + FLOOR * size
    return [] if off[0] <= allowed else [f"error {off[0] / size:.2e}, autocast's {off[1] / size:.2e}"]


def main() -> int:
    """Run draws; print those that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ["AMP_GRAPH_STRICT"] = "0"
    wrong = reached = 0
    for seed in range(given.seed, given.seed + given.count):
        faults, seen = faults_of(draw := drawn(seed))
        reached += seen
        wrong += bool(faults)
        for fault in faults:
            print(f"{seed}: {draw}: {fault}", flush=True)
    print(f"{given.count} models, {reached} of which were made to fail, {wrong} wrong")
    return int(bool(wrong) or not reached)


if __name__ == "__main__":
    sys.exit(main())
