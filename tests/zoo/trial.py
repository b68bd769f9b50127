"""What is done with one model in one precision, stage by stage; the stages that fail name the row's cause.

A stage that fails is run once more with the plain model: where fp32 fails as well, the row says so and goes on.
"""

import copy
import io
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_graph
from tests.corpus.losses import float_leaves
from tests.zoo.errors import AutocastFails, errors, unmeasured
from tests.zoo.model import Batch, ZooModel

STEPS = 3
FIRST, OTHER = 2, 3  # sizes of batches
INIT_SCALE = 1024.0
Prepare = Callable[[nn.Module], nn.Module]


def plain(model: nn.Module) -> nn.Module:
    """Leave a model as it is."""
    return model


def compiled(model: nn.Module) -> nn.Module:
    """Return what decides whether a model counts: ``torch.compile`` with the backend that changes nothing."""
    return torch.compile(model, backend="eager")


def call(model: nn.Module, batch: Batch, seed: int = 1) -> Any:
    """Call a model, from the same random state each time."""
    torch.manual_seed(seed)
    positional, keyword = copy.deepcopy(batch)  # some models write into what they are given
    return model(*positional, **keyword)


def train(entry: ZooModel, model: nn.Module, size: int, steps: int, low: torch.dtype | None, context=nullcontext):
    """Train some steps as users do; return the losses."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-3)
    scaler = torch.amp.GradScaler("cpu", INIT_SCALE, enabled=low == torch.float16)
    losses = []
    for step in range(steps):
        with context():
            loss = entry.loss(call(model, entry.inputs(step, size)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def outputs(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """Return the float tensors of a call without gradients."""
    with torch.no_grad():
        return [leaf.clone() for leaf in float_leaves(call(model, batch))]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Say whether all bits are equal; NaN equals NaN."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True)
    )


class CountOperations(TorchDispatchMode):
    """Counts the operations that run inside of captured graphs, and those outside."""

    inside = outside = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let captured code run under this mode."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_filename[:10] not in ("<eval_with", "<amp_graph"):
            frame = frame.f_back
        if frame is None:
            self.outside += 1
        else:
            self.inside += 1
        return func(*args, **(kwargs or {}))


def share_captured(entry: ZooModel, model: nn.Module) -> float:
    """Return the share of the operations of a forward that run inside of captured graphs."""
    positional, keyword = entry.inputs(0, FIRST)
    call(model, (positional, keyword))
    with CountOperations() as count:
        model(*positional, **keyword)
    return count.inside / max(1, count.inside + count.outside)


def first_line(error: BaseException) -> str:
    """Return a cause, on one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300].replace(os.path.expanduser("~"), "~")


class Refused(AssertionError):
    """A stage ended with a wrong result."""


class Trial:
    """One model in one precision: ``run`` fills ``row``."""

    def __init__(self, entry: ZooModel, word: str, prepare: Callable[[nn.Module, str], nn.Module] = amp_graph.convert):
        self.entry, self.word = entry, word
        self.low = {"bf16": torch.bfloat16, "fp16": torch.float16}[word]
        self.prepare = lambda model: prepare(model, word)
        self.row: dict[str, Any] = {"ok": False, "cause": "", "notes": []}

    def run(self) -> dict[str, Any]:
        """Run all stages, then measure the errors; one that fails is a cause, and the others run all the same.

        Another size comes last: from then on sizes are symbolic,
        and a graph of symbolic sizes may round otherwise than
        that of a copy, which has captured fixed ones.
        """
        stages = (self.train, self.evaluate, self.deepcopied, self.loaded, self.other_size)
        causes = list(filter(None, map(self._cause, stages)))
        try:
            self.row["captured"] = round(share_captured(self.entry, self.model.train()), 4)
            self.row |= errors(self.entry, self.low, self.prepare, FIRST)
            if over := self.row["overflows"]:
                causes.append(f"errors: not finite in {over} of {self.row['seeds']} seeds, autocast's are")
            if not self.row["seeds"]:
                self.row["notes"].append("errors: autocast's are not finite with any seed, nor is there a ratio")
        except AutocastFails as error:
            self.row |= unmeasured()
            self.row["notes"].append(f"errors: torch.autocast itself fails: {first_line(error.__cause__)}")
        except Exception as error:
            causes.append(f"errors: {first_line(error)}")
        return self.row | {"ok": not causes, "cause": "; ".join(causes)}

    def _cause(self, stage: Callable[[Prepare], None]) -> str:
        try:
            stage(self.prepare)
            return ""
        except Exception as error:
            cause = f"{stage.__name__}: {first_line(error)}"
        try:
            stage(plain)
        except Exception as error:
            self.row["notes"].append(f"{stage.__name__}: fp32 fails as well: {first_line(error)}")
            return ""
        return cause

    def train(self, prepare: Prepare) -> None:
        """Train, from the first conversion on; what is not finite must not be finite under autocast either."""
        model = prepare(self.entry.made(0).train())
        if prepare is not plain:
            self.model = model
        self._finite(train(self.entry, model, FIRST, STEPS, self.low), (FIRST, STEPS))

    def other_size(self, prepare: Prepare) -> None:
        """Train a step with another size of the batch."""
        model = self.entry.made(0).train() if prepare is plain else self.model.train()
        before = () if prepare is plain else ((FIRST, STEPS),)  # as the model has been trained
        self._finite(train(self.entry, model, OTHER, 1, self.low), *before, (OTHER, 1))

    def _finite(self, losses: list[float], *trained: tuple[int, int]) -> None:
        """Refuse losses that are not finite, if autocast's are; ``trained``: sizes and steps, theirs last."""
        if all(map(math.isfinite, losses)):
            return
        with_autocast = lambda: torch.autocast("cpu", self.low)  # noqa: E731
        model = self.entry.made(0).train()
        for size, steps in trained:
            theirs = train(self.entry, model, size, steps, self.low, with_autocast)
        if all(map(math.isfinite, theirs)):
            raise Refused(f"losses {losses}, under autocast {theirs}")
        self.row["notes"].append(f"losses {losses}, under autocast {theirs}")

    def _evaluated(self, prepare: Prepare) -> nn.Module:
        return (self.entry.made(0) if prepare is plain else self.model).eval()

    def evaluate(self, prepare: Prepare) -> None:
        """Call it in evaluation mode, twice: the bits must be the same."""
        model = self._evaluated(prepare)
        batch = self.entry.inputs(0, FIRST)
        if not same(outputs(model, batch), outputs(model, batch)):
            raise Refused("two calls in evaluation mode differ")

    def deepcopied(self, prepare: Prepare) -> None:
        """A deep copy computes the same bits."""
        model = self._evaluated(prepare)
        batch = self.entry.inputs(0, FIRST)
        if not same(outputs(copy.deepcopy(model), batch), outputs(model, batch)):
            raise Refused("the deep copy computes other bits")

    def loaded(self, prepare: Prepare) -> None:
        """Another model with the saved weights, converted afresh, computes the same bits."""
        model = self._evaluated(prepare)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        fresh = prepare(self.entry.made(1).eval())
        fresh.load_state_dict(torch.load(buffer, weights_only=True))
        batch = self.entry.inputs(0, FIRST)
        if not same(outputs(fresh, batch), outputs(model, batch)):
            raise Refused("a new model with the saved weights computes other bits")


def trains_compiled(entry: ZooModel) -> str:
    """Return why ``torch.compile(backend="eager")`` does not train a model; "" if it does, and the model counts."""
    try:
        losses = train(entry, compiled(entry.made(0).train()), FIRST, STEPS, None)
    except Exception as error:
        return first_line(error)
    return "" if all(map(math.isfinite, losses)) else f"losses {losses}"


def trials(entry: ZooModel, words: list[str], tell: Callable[[dict[str, Any]], None]) -> None:
    """Run all trials of one model, and tell each row as soon as it is there."""
    try:
        entry.made(0)
    except Exception as error:
        tell({"unavailable": first_line(error)})
        return
    uncounted = trains_compiled(entry)
    tell({"uncounted": uncounted})
    for word in words:
        torch._dynamo.reset()
        start = time.process_time()
        row = Trial(entry, word).run()
        tell({"word": word, **row, "seconds": round(time.process_time() - start, 1)})
