"""Notes of a report: memory that stays, recorded graphs, the update, kernels that are unavailable.

Before: a ``Conversion``, or the step of a ``TrainStep``. After: ``update: one pass over all weights``, a line each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import torch

from amp_graph.capture.conversion import Conversion
from amp_graph.lists.errors import first_line
from amp_graph.numerics.overflow.scale_history import scale_history
from amp_graph.passes.native.jit_compiler import why_refused
from amp_graph.passes.weights.cast_weights import casts_weight
from amp_graph.policy import Policy
from amp_graph.policy_words import word_of
from amp_graph.report.graph_facts import size_text
from amp_graph.report.metrics import metrics
from amp_graph.rewrite import Rewritten
from amp_graph.scaling.mixed_precision_optimizer import MixedPrecisionOptimizer
from amp_graph.step.step_graph import CapturedStep
from amp_graph.step.train_step import TrainStep


def notes_of_passes(captured: CapturedStep) -> Iterator[str]:
    """Yield lines on a step's update, its memory, and the passes over the whole step."""
    traced = captured.step
    if traced is None:
        return
    if traced.update:
        yield f"update: {traced.update}"
    for timed in traced.passes:
        counts = Counter(change.action for change in timed.result.changes).items()
        told = ", ".join(f"{count} {action}" for action, count in counts)
        failed = f"left out: {first_line(timed.failure)}" if timed.failure else ""
        yield f"{timed.name}: {failed or told or 'nothing to do'}"


def notes_of_emulation(policy: Policy, rewritten: Collection[Rewritten]) -> Iterator[str]:
    """Yield a line on what a policy with ``emulate=`` emulates, and what it does not."""
    if not policy.emulate or policy.level == "O0":
        return
    changes = [change for one in rewritten for timed in one.passes for change in timed.result.changes]
    count = sum(change.action == "emulated" for change in changes)
    low = next((word_of(one.dtype) for one in rewritten), "fp16")
    yield (
        f"an emulation of {policy.emulate} on the CPU: its lists and plan; sums in fp32, rounded to {low} where its "
        f"kernels round, in {count} operation{'s' * (count != 1)}; not the order of its sums, nor passes for one device"
    )


def notes_of_memory(found: Conversion) -> Iterator[str]:
    """Yield lines on what is recorded, and why not; on the weights of calls without gradients."""
    if found.captured.replays is not None:
        yield from found.captured.replays.lines(size_text)
    weights = found.captured.frozen
    if weights is not None:
        yield f"frozen: weights are cast, packed and folded once, {size_text(weights.bytes)} now"
        return
    nodes = (node for graph in found.graphs if not graph.grad for node in graph.rewritten.gm.graph.nodes)
    if found.compile == "eager" and any(map(casts_weight, nodes)):
        yield "calls without gradients cast each weight; amp_graph.freeze(model) casts, packs and folds them once"


def notes_of_kernels(model: torch.nn.Module) -> Iterator[str]:
    """Yield the kernels that are unavailable on this CPU, and why."""
    if all(p.device.type == "cpu" for p in model.parameters()):
        for why, names in why_refused().items():
            yield f"torch's kernels in place of {', '.join(names)}: {why}"


def notes_of_scale(source: object) -> Iterator[str]:
    """Yield a line on the present loss scale of a step or an optimizer that has one, and on its last skipped step."""
    found = metrics(source) if isinstance(source, (TrainStep, MixedPrecisionOptimizer)) else {}
    if "loss_scale" in found:
        skipped = found.get("skipped_steps", 0)
        yield f"loss scale: {found['loss_scale']:g} now, {skipped:g} step{'s' * (skipped != 1)} skipped"
        if bad := scale_history(source).skipped:
            last = bad[-1]
            yield f"loss scale: the last step skipped is step {last['step']} at {last['scale']:g}"
