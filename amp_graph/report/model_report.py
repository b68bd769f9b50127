"""What ran in which precision, and why, for a converted model.

``amp_graph.report(model).text()``, ``.html("report.html")``, ``.to_dict()``, ``.to_networkx()``, ``.graphs``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from amp_graph.capture.captured_graphs import Captured
from amp_graph.capture.conversion import Conversion, conversion_of
from amp_graph.capture.dynamo_backend import Compile
from amp_graph.compiler_options import Options, options_text
from amp_graph.errors import CaptureError
from amp_graph.numerics.scale_history import scale_history
from amp_graph.numerics.statistics import Statistics
from amp_graph.optim.optimizers import OnePassOptimizer
from amp_graph.optim.torch_fused_update import why_no_kernel
from amp_graph.passes.graph.graph_text import SHORT
from amp_graph.passes.native.atomic_files import write_atomically
from amp_graph.passes.native.jit_compiler import why_refused
from amp_graph.passes.native.triton_loader import why_failed
from amp_graph.passes.profitability.thresholds import one_pass_is_profitable
from amp_graph.passes.weights.copy_lifetimes import CopyPlan
from amp_graph.policy import Policy
from amp_graph.report.collect_records import read_graph
from amp_graph.report.graph_flow import Flow, flow_of
from amp_graph.report.memory_report import memory_of
from amp_graph.report.networkx_graph import digraph
from amp_graph.report.precision_report import precision_lines
from amp_graph.report.records import GraphReport
from amp_graph.report.report_html import html_page
from amp_graph.report.report_text import WIDTH, report_text, size_text
from amp_graph.step.traced_step import CapturedStep, PlainCaptured
from amp_graph.step.train_step import TrainStep

if TYPE_CHECKING:
    import networkx

NOT_CAPTURED = "not captured yet: call the model once"
AS_WRITTEN = "level O0: the model runs unchanged, and nothing is captured"
LEFT = "kept in the process for the next"
WORD = "(keep_memory=)"
FAILED = "nothing was captured: every call ran uncaptured"


@dataclass(frozen=True)
class Report:
    """The report of a converted model: its graphs, and what was not captured.

    ``status`` is empty if there are graphs; otherwise it says why there are none. ``dtype`` is the policy's low
    precision on the model's device. ``memory``: bytes by kind, see ``memory_of``. ``escaped``: how code between partial
    graphs runs, if there are any; ``breaks``: the graph breaks and their causes. ``flows``: the data flow of each of
    ``graphs``.
    """

    model: str
    policy: Policy
    dtype: str
    compile: str
    status: str
    graphs: tuple[GraphReport, ...]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    memory: dict[str, int]
    escaped: str = ""
    breaks: tuple[tuple[str, str], ...] = ()
    flows: tuple[Flow, ...] = ()
    step: Any = field(default=None, repr=False, compare=False)  # the TrainStep that it is of

    def statistics(self, every: int = 100, writer: Any = None, prefix: str = "amp_graph") -> Statistics:
        """Sample the values of a ``TrainStep`` every ``every`` steps: largest magnitudes, underflow and overflow.

        writer: with TensorBoard's ``add_scalar``; None: ``.rows``, ``.to_dict()``. See ``Statistics``. CaptureError for
        the report of a model, and for a compiled step.
        """
        if self.step is None:
            raise CaptureError(
                f"statistics: this is the report of {self.model}, which does not see backward and scale\n"
                "  legal: the report of a TrainStep\n  fix:   amp_graph.report(step).statistics(every=100)"
            )
        return Statistics(self.step, every, writer, prefix)

    def text(self, width: int | None = WIDTH) -> str:
        """Return the report as text, one screen per graph; reasons are cut at ``width`` (None: never)."""
        return report_text(self, width)

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the report to ``path`` as one self-contained HTML page that fetches nothing."""
        write_atomically(path, html_page(self))

    def to_networkx(self) -> networkx.DiGraph:
        """Return the rewritten graphs as one ``networkx.DiGraph`` of the data flow, with casts marked on edges.

        A node is named as ``amp-graph explain`` takes it (``0:linear``: graph 0). Its attributes: ``graph``,
        ``number`` ("%7"), ``kind`` ("input", "weight", "constant", "subgraph", "operation", "cast", "part", "output"),
        ``operation``, ``call``, ``dtype``, ``shape`` ("8,32"), ``precision`` ("low", "full", "captured"), ``class``,
        ``reason``, ``bytes`` written, ``flops`` of matrix products in forward, ``module``, ``line``. An edge at which a
        value is cast has ``cast`` ("bf16"), ``of`` ("weight", "activation"), ``reason``, ``kept``. All are strings,
        numbers and booleans.
        """
        return digraph(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values; deterministic for the same model, policy and inputs."""
        return {
            "format": 1,
            "model": self.model,
            "policy": str(self.policy),
            "accuracy": self.policy.accuracy,
            "dtype": self.dtype,
            "compile": self.compile,
            "status": self.status,
            "graphs": [graph.to_dict() for graph in self.graphs],
            "skipped": [{"where": where, "reason": reason} for where, reason in self.skipped],
            "notes": list(self.notes),
            "memory": dict(self.memory),
            "escaped": self.escaped,
            "breaks": [{"where": where, "reason": reason} for where, reason in self.breaks],
        }

    def __str__(self) -> str:
        """Return the report as text."""
        return self.text()


def report(model: torch.nn.Module | TrainStep, optimizer: torch.optim.Optimizer | None = None) -> Report:
    """Return the report of a model that ``amp_graph.convert`` converted, or of a ``TrainStep``.

    optimizer: the model's, to count its state under ``memory`` and describe its update. Raises CaptureError if
    ``model`` is neither.
    """
    if isinstance(model, TrainStep):
        return _of_step(model)
    found = conversion_of(model)
    if found is None:
        raise CaptureError(_not_converted(model))
    return Report(
        type(model).__name__,
        found.policy,
        _dtype(found.policy, found.model),
        _backend(found.compile, found.options),
        _status(found),
        tuple(read_graph(i, record, _weights(found.model)) for i, record in enumerate(found.graphs)),
        tuple(dict.fromkeys((skip.where, skip.reason) for skip in found.log.skips)),
        (
            *found.said.notes,
            *_of_memory(found),
            *_of_replay(found),
            *precision_lines(found),
            *_of_update(found, optimizer),
            *_of_kernels(found.model),
        ),
        memory_of(found.model, optimizer, found.copies.tensors if found.copies else ()),
        found.escaped_runs,
        tuple(dict.fromkeys((one.where, one.reason) for one in found.log.breaks if one.where)),
        tuple(flow_of(record, _weights(found.model)) for record in found.graphs),
    )


def _of_step(step: TrainStep) -> Report:
    """Return the report of a step: its forward graphs, with the loss in them."""
    graphs = [Captured(captured.rewritten, step.model.training, grad=True) for captured in step.captured]
    return Report(
        f"TrainStep of {type(step.model).__name__}",
        step.policy,
        _dtype(step.policy, step.model),
        _backend(step.compile, step.compiler_options),
        "" if graphs else NOT_CAPTURED.replace("model", "step"),
        tuple(read_graph(i, record, _weights(step.model)) for i, record in enumerate(graphs)),
        (),
        (
            *step.notes,
            *_of_scale(step),
            *dict.fromkeys(note for captured in step.captured for note in _of_passes(captured)),
            *_of_kernels(step.model),
        ),
        memory_of(step.model, step.optimizer, step.weight_copies()),
        flows=tuple(flow_of(record, _weights(step.model)) for record in graphs),
        step=step,
    )


def _of_scale(step: TrainStep) -> Iterator[str]:
    """Yield lines on the history of the loss scale, if a step was skipped."""
    if step.loss_scale is None or not step.loss_scale.records.count:
        return
    found = scale_history(step)
    if found.skipped:
        last = found.skipped[-1]
        yield (
            f"loss scale: {found.rows[-1]['scale']:g} in step {found.steps}; {len(found.skipped)} of the last "
            f"{len(found)} steps were skipped, step {last['step']} at scale {last['scale']:g}: {last['cause']}"
        )


def _of_passes(captured: CapturedStep) -> Iterator[str]:
    """Yield lines on a step's update, its memory, and the passes over the whole step."""
    yield from (f"update: {traced.update}" for traced in captured.steps.values() if traced.update)
    if isinstance(captured, PlainCaptured):
        yield "captured with symbolic sizes or numbers: autograd and the update run after the graph"
        return
    for traced in captured.steps.values():
        kept = f"; up to {size_text(traced.kept_bytes)} are {LEFT} step {WORD}" if traced.kept_bytes else ""
        yield f"memory: at most {size_text(traced.most_bytes)} of results at a time{kept}"
    for timed in (timed for traced in captured.steps.values() for timed in traced.passes):
        counts = Counter(change.action for change in timed.result.changes)
        told = ", ".join(f"{count} {action}" for action, count in counts.items())
        failed = f"left out: {timed.failure.partition(chr(10))[0]}" if timed.failure else ""
        yield f"{timed.name}: {failed or told or 'nothing to do'}"


def _of_memory(found: Conversion) -> Iterator[str]:
    """Yield lines on weight copies in training, and a line for each graph whose memory is kept."""
    for i, graph in enumerate(found.graphs):
        if (plan := graph.copies) is not None and plan.copies:
            yield f"weight copies of graph {i}: {_of_copies(plan)}"
    if found.copies is not None and found.copies.when is None and any(graph.grad for graph in found.graphs):
        yield (
            f"weight copies: all stay until the next update, {size_text(found.copies.bytes)} now; "
            "weight_copies=auto frees those that raise the peak of memory in training"
        )
    for i, graph in enumerate(found.graphs):
        if graph.kept_bytes:
            freed, then = ("and its backward free", "step") if graph.grad else ("frees", "call")
            yield f"memory: up to {size_text(graph.kept_bytes)} of what graph {i} {freed} are {LEFT} {then} {WORD}"


def _of_copies(plan: CopyPlan) -> str:
    """Say which copies a training step frees, why, and what keeping them would cost."""
    freed = plan.copies - plan.staying
    why = f"backward frees {size_text(plan.saved)} of activations, allocates {size_text(plan.gradients)} of gradients"
    if not freed:
        return f"all {size_text(plan.copies)} stay until the next update and do not raise the peak of memory ({why})"
    return (
        f"{size_text(freed)} of {size_text(plan.copies)} are freed when backward needs them no more, as they would "
        f"raise the peak of memory ({why}); weight_copies=true keeps them: fewer casts, more memory"
    )


def _of_replay(found: Conversion) -> Iterator[str]:
    """Yield lines on what is recorded, and why not."""
    if found.captured.replays is not None:
        yield from found.captured.replays.lines(size_text)


def _of_update(found: Conversion, optimizer: torch.optim.Optimizer | None) -> Iterator[str]:
    """Yield a line on how ``optimizer`` updates, or on the casts that ``amp_graph.optim`` would save."""
    if isinstance(optimizer, OnePassOptimizer):
        yield f"update: {optimizer.how}"
    elif found.copies is not None and optimizer is not None and not why_no_kernel(optimizer):
        elements = found.copies.elements_of(p for group in optimizer.param_groups for p in group["params"])
        if one_pass_is_profitable("cpu", elements):
            ours = f"amp_graph.optim.{type(optimizer).__name__}"
            yield f"update: {elements:,} weights are cast again after each; {ours} would write their copies"


def _of_kernels(model: torch.nn.Module) -> Iterator[str]:
    """Yield the kernels that are unavailable on this machine, and why: C on the CPU, Triton's on CUDA."""
    if any(p.device.type == "cuda" for p in model.parameters()):
        for name, why in why_failed().items():
            yield f"torch's kernels in place of {name.rpartition('.')[2].removesuffix('_source')}: {why}"
    if all(p.device.type == "cpu" for p in model.parameters()):
        for why, names in why_refused().items():
            yield f"torch's kernels in place of {', '.join(names)}: {why}"


def _weights(model: torch.nn.Module) -> set[str]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name for name, _ in named}


def _backend(compile: Compile, options: Options) -> str:
    name = compile if isinstance(compile, str) else getattr(compile, "__name__", "a callable")
    return f"{name}{options_text(options)}"


def _dtype(policy: Policy, model: torch.nn.Module) -> str:
    devices = sorted({p.device.type for p in model.parameters()} - {"cpu"})
    return SHORT[policy.torch_dtype(devices[0] if devices else "cpu")]


def _status(found: Conversion) -> str:
    if found.policy.level == "O0":
        return AS_WRITTEN
    if found.graphs:
        return ""
    return FAILED if found.said.notes or found.log.skips else NOT_CAPTURED


def _not_converted(model: object) -> str:
    if not isinstance(model, torch.nn.Module):
        return (
            f"report: a {type(model).__name__} is not a converted model\n"
            "  legal: what amp_graph.convert returned\n"
            "  fix:   model = amp_graph.convert(model); model(x); amp_graph.report(model)"
        )
    inside = [name for name, part in model.named_modules() if conversion_of(part) is not None]
    if inside:
        return (
            f"report: {type(model).__name__} is not converted; its submodule {inside[0]!r} is\n"
            f"  fix:   amp_graph.report(model.get_submodule({inside[0]!r}))"
        )
    return (
        f"report: {type(model).__name__} is not converted\n"
        "  fix:   model = amp_graph.convert(model); model(x); amp_graph.report(model)"
    )
