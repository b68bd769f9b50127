"""Statistics of a training: largest magnitude, and the shares that underflow and overflow, of values and gradients.

Before: fp16 that does not learn, and nothing to look at. After: ``amp_graph.report(step).statistics(every=100)``.

A sampled step is the step itself, whose graph has a call behind each value; other steps count one number down.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_graph.capture.dynamo_backend import with_sums_in_fp32
from amp_graph.devices import device_of
from amp_graph.errors import CaptureError, warn
from amp_graph.numerics.value_names import ValueName, values_of
from amp_graph.passes.graph.direct_dispatch import direct_calls
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.graph_text import SHORT
from amp_graph.rewrite import copy_graph
from amp_graph.step.step_graph import StepGraph
from amp_graph.step.traced_step import CapturedStep
from amp_graph.step.train_step import TrainStep

SAMPLED = 2048  # elements of a value that are looked at for shares; the largest magnitude is of all
KEPT = 100  # samples
COLUMNS = ("amax", "underflow", "overflow")


@dataclass(eq=False)
class Observed:
    """The graph of a step with a call behind each named value; ``names``: of the values, in order."""

    names: list[ValueName]
    dtypes: list[str]
    run: Callable[..., Any]
    into: _Sums


class _Sums:
    """Receives the values of one run: largest magnitudes, and some elements of each."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was seen."""
        self.largest: list[Tensor] = []
        self.samples: list[Tensor] = []
        self.counts: list[int] = []

    def see(self, found: Tensor) -> None:
        """Take one value."""
        found = found.detach()
        count = found.numel()
        self.counts.append(min(count, SAMPLED))
        if not count:
            self.largest.append(found.new_zeros((), dtype=torch.float32))
            self.samples.append(found.new_zeros(0, dtype=torch.float32))
            return
        self.largest.append(torch.linalg.vector_norm(found, math.inf).float())
        step = max(count // SAMPLED, 1)
        dense = found.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(found)
        flat = found.as_strided((count,), (1,)) if dense else found.reshape(-1)
        self.samples.append(flat[::step][:SAMPLED].float())  # elements in the order of memory: every step-th

    def read(self, low: torch.dtype) -> Tensor:
        """Return [values, 3] in fp32 on the device: amax, and the shares that underflow and overflow in ``low``."""
        limits = torch.finfo(low)
        sizes = torch.tensor(self.counts, device=self.largest[0].device)
        which = torch.repeat_interleave(torch.arange(len(self.counts), device=sizes.device), sizes)
        every = torch.cat(self.samples).abs()
        under = ((every < limits.tiny) & (every > 0)).float()
        over = (~(every <= limits.max)).float()  # NaN, too
        shares = torch.zeros(2, len(self.counts), device=sizes.device).index_add_(1, which, torch.stack([under, over]))
        return torch.stack([torch.stack(self.largest), *(shares / sizes.clamp(min=1))], 1)


class Statistics:
    """Samples a ``TrainStep`` every ``every`` steps, from the next one on, until ``detach()``.

    ``rows``: of the last 100 samples; ``to_dict()``: the last of each value; ``text()``. A row has ``step``, ``value``
    ("module/node"), ``kind`` ("forward", "gradient": of the scaled loss), ``dtype`` it is held in, ``amax`` (largest
    magnitude of all elements), ``underflow`` and ``overflow``: the shares, of up to 2048 elements spread over the
    value, that are below the smallest normal number of the policy's low precision and not 0, and that are above its
    largest, infinite or NaN. ``line``: the user's.

    writer: with ``add_scalar(tag, number, step)``, as TensorBoard's; tags are ``prefix/kind/value/amax`` and so on. On
    CUDA a sample is copied to the host at the next sample, or when it is read. The first sample traces the step once
    more. Steps that are not traced whole (of further sizes, see ``max_graphs``) are not sampled: ``missed`` counts
    them.

    Raises CaptureError for a compiled step, and for an ``every`` that is no positive number.
    """

    def __init__(self, step: TrainStep, every: int = 100, writer: Any = None, prefix: str = "amp_graph") -> None:
        """Start to sample."""
        if type(every) is not int or every < 1:
            raise CaptureError(f"statistics: every={every!r}\n  legal: a whole number, 1 or more\n  fix:   every=100")
        if step.compile != "eager":
            raise CaptureError(
                f"statistics: the step is compiled by {step.compile!r}, whose kernels do not hold every value\n"
                "  legal: compile='eager'\n  fix:   TrainStep(..., compile='eager')"
            )
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise CaptureError(
                f"statistics: a {type(writer).__name__} has no add_scalar\n  legal: a writer as TensorBoard's, None\n"
                "  fix:   writer=torch.utils.tensorboard.SummaryWriter()"
            )
        self.every, self.writer, self.prefix, self.missed, self.steps = every, writer, prefix, 0, 0
        self._left, self._step, self._sampled = 1, step, False
        self._known: dict[int, tuple[StepGraph, Observed]] = {}
        self._arrived: deque[tuple[int, Observed, Tensor]] = deque()
        self._rows: deque[list[dict[str, Any]]] = deque(maxlen=KEPT)
        self._end = step.watch(self)

    # -- around each step ---------------------------------------------------------------------------------

    def before(self, batch: Sequence[Any]) -> None:
        """A step begins."""
        self.steps += 1
        self._left -= 1
        if not self._left:
            self._left, self._sampled = self.every, False
            self._step.observe(self._observed)

    def after(self) -> None:
        """A step is over."""
        if self._left == self.every:
            self._step.observe(None)
            self.missed += not self._sampled

    def _observed(self, captured: CapturedStep, graph: StepGraph, args: Sequence[Any]) -> Any:
        """Run a step with its values observed; of micro-batches, the first."""
        self._step.observe(None)
        made = self._observing(captured, graph, args)
        if made is None:
            return graph(*args)
        made.into.begin()
        plain, graph.run = graph.run, made.run
        try:
            result = graph(*args)
        finally:
            graph.run = plain
        self._sampled = True
        if made.into.largest:
            self._flush()
            found = made.into.read(captured.rewritten.dtype)
            self._arrived.append((self.steps, made, found))
            if found.device.type == "cpu":
                self._flush()
        made.into.begin()
        return result

    def _observing(self, captured: CapturedStep, graph: StepGraph, args: Sequence[Any]) -> Observed | None:
        """Return the graph that observes ``graph``; None, with a warning, where it cannot be made."""
        kept = self._known.get(id(graph))
        if kept is not None and kept[0] is graph:
            return kept[1]
        try:
            return self._make(captured, graph, args)
        except Exception as error:  # the training goes on
            warn(f"amp_graph: statistics: a step is not sampled: {type(error).__name__}: {error}")
            return None

    def _make(self, captured: CapturedStep, graph: StepGraph, args: Sequence[Any]) -> Observed:
        names = values_of(captured, graph, args)
        copied, into = copy_graph(graph.gm), _Sums()
        told: list[ValueName] = []
        dtypes: list[str] = []
        for node in list(copied.graph.nodes):
            if node.name in names:
                with copied.graph.inserting_after(node):
                    copied.graph.call_function(into.see, (node,))
                told.append(names[node.name])
                dtypes.append(SHORT.get(value(node).dtype, ""))
        copied.recompile()
        run = with_sums_in_fp32(direct_calls(copied), self._step.policy, device_of(copied))
        made = Observed(told, dtypes, run, into)
        # Steps that were dropped are not asked for any more.
        alive = {id(s) for c in self._step.captured for b in c.bounds for s in b.steps.values()}
        self._known = {key: kept for key, kept in self._known.items() if key in alive} | {id(graph): (graph, made)}
        return made

    # -- reading ------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Copy what was sampled to the host."""
        while self._arrived:
            number, made, found = self._arrived.popleft()
            rows = [
                {"step": number, "value": name.name, "kind": "gradient" if name.gradient else "forward", "dtype": dtype,
                 **dict(zip(COLUMNS, numbers, strict=True)), "line": name.line}
                for name, dtype, numbers in zip(made.names, made.dtypes, found.tolist(), strict=True)
            ]  # fmt: skip
            self._rows.append(rows)
            for row in rows if self.writer is not None else ():
                for column in COLUMNS:
                    tag = f"{self.prefix}/{row['kind']}/{row['value']}/{column}"
                    self.writer.add_scalar(tag, row[column], number)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows of the samples that are kept, oldest first."""
        self._flush()
        return [row for rows in self._rows for row in rows]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the last row of each value, by ``kind/value``."""
        return {f"{row['kind']}/{row['value']}": row for row in self.rows}

    def text(self, most: int = 20) -> str:
        """Return a table of the last rows: most overflow, then most underflow first."""
        order = sorted(self.to_dict().values(), key=lambda r: (r["overflow"], r["underflow"], r["amax"]), reverse=True)
        head = f"{'value':<44} {'kind':<9} {'dtype':<5} {'amax':>9} {'underflow':>9} {'overflow':>9}"
        lines = [
            f"{r['value'][-44:]:<44} {r['kind']:<9} {r['dtype']:<5} {r['amax']:>9.3g} {r['underflow']:>9.2%} "
            f"{r['overflow']:>9.2%}"
            for r in order[:most]
        ]
        more = [f"and {len(order) - most} more values"] if len(order) > most else []
        return "\n".join([head, *lines, *more]) + "\n"

    def __str__(self) -> str:
        """Return the table."""
        return self.text()

    def detach(self) -> None:
        """Sample no more; what was sampled stays."""
        self._flush()
        self._end()
        self._known.clear()
