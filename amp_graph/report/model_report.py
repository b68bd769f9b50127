"""What ran in which precision, and why, for a converted model.

``amp_graph.report(model).text()``, ``.html("report.html")``, ``.to_dict()``, ``.to_networkx()``, ``.graphs``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from amp_graph.capture.conversion import Conversion, conversion_of
from amp_graph.capture.diagnostics import UNKEPT_KEY
from amp_graph.capture.dynamo_backend import Captured, Compile, graphs_of
from amp_graph.compiler_options import Options, options_text
from amp_graph.errors import CaptureError
from amp_graph.passes.graph.graph_text import SHORT
from amp_graph.passes.native.output_file import write_or_refuse
from amp_graph.passes.torch_compat.modules import behind_compile
from amp_graph.policy import Policy
from amp_graph.report.collect_records import read_graph
from amp_graph.report.collectives import collectives_of, collectives_of_step
from amp_graph.report.metrics import memory_of
from amp_graph.report.networkx_graph import digraph
from amp_graph.report.page_summary import checked_times, summary_of
from amp_graph.report.records import Collective, GraphReport
from amp_graph.report.report_html import html_page, notebook_frame
from amp_graph.report.report_notes import (
    notes_of_emulation,
    notes_of_kernels,
    notes_of_memory,
    notes_of_passes,
    notes_of_scale,
)
from amp_graph.report.report_text import WIDTH, report_text
from amp_graph.rewrite import unkept
from amp_graph.step.train_step import TrainStep

if TYPE_CHECKING:
    import networkx

NOT_CAPTURED = "not captured yet: call the model once"
AS_WRITTEN = "level O0: the model runs unchanged, and nothing is captured"
FAILED = "nothing was captured: every call ran uncaptured"


@dataclass(frozen=True, repr=False)
class Report:
    """The report of a converted model: its graphs, and what was not captured. All other forms are views of it.

    model: its class. policy: the one in force. dtype: the policy's low precision on the model's device ("bf16").
    compile: the compiler, and its options. graphs: a record of each captured graph, with its ``nodes`` and ``casts``.
    status: empty if there are graphs; otherwise why there are none. skipped: places that ran uncaptured, and why.
    notes: remarks on the whole, a line each. memory: bytes by kind ("parameters", "weight copies", others; 0 is left
    out). escaped: how code between partial graphs runs, if there are any. breaks: the graph breaks and their causes.
    times: measured seconds, by what ran ("fp32", "amp_graph"). collectives: of each unit of ``fully_shard``.
    """

    model: str
    policy: Policy
    dtype: str
    compile: str
    graphs: tuple[GraphReport, ...]
    notes: tuple[str, ...]
    memory: dict[str, int]
    status: str = ""
    skipped: tuple[tuple[str, str], ...] = ()
    escaped: str = ""
    breaks: tuple[tuple[str, str], ...] = ()
    times: dict[str, float] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()

    def text(self, width: int | None = WIDTH, *, skipped: bool = False) -> str:
        """Return the report as text; reasons are wrapped at ``width`` columns (None: never).

        skipped: also list the nodes that passes left as they were, and why.
        """
        return report_text(self, width, skipped=skipped)

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the report to ``path`` as one self-contained HTML page that fetches nothing.

        Raises AmpGraphError, also an OSError, if it cannot be written; AmpGraphError if jinja2 is not installed.
        """
        write_or_refuse(path, html_page(self), "report", "report.html('report.html')")

    def _repr_html_(self) -> str:
        """Return the page in a frame, for a notebook."""
        return notebook_frame(self)

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

    def summary(self) -> dict[str, Any]:
        """Return the figures of all graphs together: shares in low precision, casts, speeds, memory."""
        return summary_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values; deterministic for the same model, policy and inputs."""
        return {
            "format": 2,
            "model": self.model,
            "policy": str(self.policy),
            "accuracy": self.policy.accuracy,
            "dtype": self.dtype,
            "compile": self.compile,
            "status": self.status,
            "summary": self.summary(),
            "graphs": [graph.to_dict() for graph in self.graphs],
            "skipped": [{"where": where, "reason": reason} for where, reason in self.skipped],
            "notes": list(self.notes),
            "memory": dict(self.memory),
            "escaped": self.escaped,
            "breaks": [{"where": where, "reason": reason} for where, reason in self.breaks],
            "times": dict(self.times),
            "collectives": [asdict(one) for one in self.collectives],
        }

    def __str__(self) -> str:
        """Return the report as text."""
        return self.text()

    def __repr__(self) -> str:
        """Return what it is of, in a line."""
        operations = self.summary()["operations"]
        low = f"{operations['low']} of {operations['all']} operations low" if self.graphs else self.status
        many = f"{len(self.graphs)} graph{'s' * (len(self.graphs) != 1)}"
        return f"<amp_graph report of {self.model}, policy {self.policy}: {many}, {low}; print it for its text>"


def report(
    model: torch.nn.Module | TrainStep,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    times: Mapping[str, float] | None = None,
) -> Report:
    """Return the report of a model that ``amp_graph.convert`` converted, or of a ``TrainStep``.

    The model may be wrapped by DDP or ``torch.compile``, or not converted and compiled with ``backend="amp_graph"``.

    optimizer: the model's, to count its state under ``memory`` and describe its update. times: measured seconds of a
    step or call, shown beside the predicted speed: ``{"fp32": 0.21, "torch.autocast": 0.14, "amp_graph": 0.11}``.
    Raises CaptureError if ``model`` is neither, AmpGraphError for times that cannot be read.
    """
    found = _of_step(model) if isinstance(model, TrainStep) else _of_model(model, optimizer)
    return replace(found, times=checked_times(times or {}))


def _of_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Report:
    found = conversion_of(behind_compile(model))
    if found is None:
        return _of_compiled(model, optimizer)
    frozen, listeners = found.captured.frozen, [one.diagnostics for one in (found, *found.parts)]
    return _made(
        found.model,
        found.policy,
        found.graphs,
        _backend(found.compile, found.options),
        (*found.diagnostics.notes, *notes_of_memory(found)),
        memory_of(found.model, optimizer, frozen.tensors if frozen else ()),
        optimizer,
        status=_status(found),
        skipped=tuple(dict.fromkeys((skip.where, skip.reason) for one in listeners for skip in one.skips)),
        escaped=found.escaped_runs,
        breaks=tuple(dict.fromkeys((at.where, at.reason) for one in listeners for at in one.breaks if at.where)),
        collectives=tuple(collectives_of(found.model)),
    )


def _of_compiled(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Report:
    """Return the report of what ``torch.compile(model, backend="amp_graph")`` captured."""
    written = behind_compile(model)
    found = graphs_of(written) if isinstance(written, torch.nn.Module) else []
    if not found:
        parts = model.named_modules() if isinstance(model, torch.nn.Module) else ()
        inside = next((f"; its submodule {name!r} is" for name, part in parts if conversion_of(part) is not None), "")
        raise CaptureError(
            f"report: a {type(written).__name__} is not converted{inside}, and the backend 'amp_graph' has no graph of "
            "it\n  legal: a converted model, or one compiled with backend='amp_graph' that has run itself\n"
            "  fix:   model = amp_graph.convert(model); model(x); amp_graph.report(model)"
        )
    backend, memory = f"backend amp_graph, {_backend(*found[-1].compiled_by)}", memory_of(written, optimizer, ())
    return _made(written, found[-1].rewritten.policy, found, backend, (), memory, optimizer)


def _of_step(step: TrainStep) -> Report:
    """Return the report of a step: its forward graphs, with the loss in them."""
    graphs = step.graphs
    found = _made(
        step.model,
        step.policy,
        graphs,
        _backend(step.compile, step.compiler_options),
        (*step.notes, *(note for captured in step.captured for note in notes_of_passes(captured))),
        memory_of(step.model, step.optimizer, step.weight_copies()),
        step,
        status="" if graphs else NOT_CAPTURED.replace("model", "step"),
        collectives=tuple(collectives_of_step(step)),
    )
    return replace(found, model=f"TrainStep of {found.model}")


def _made(
    model: torch.nn.Module,
    policy: Policy,
    records: Sequence[Captured],
    compile: str,
    notes: Iterable[str],
    memory: dict[str, int],
    scaled: object,
    **more: Any,
) -> Report:
    """Return the report of a model; ``scaled``: the step or the optimizer that may have a loss scale."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    weights = {name for name, _ in named}
    graphs = tuple(read_graph(i, record, weights) for i, record in enumerate(records))

    rewritten = [record.rewritten for record in records]
    all_notes = (*notes, *map(UNKEPT_KEY.format, unkept(rewritten)), *notes_of_emulation(policy, rewritten),
                 *notes_of_scale(scaled), *notes_of_kernels(model))  # fmt: skip
    devices = sorted({p.device.type for p in model.parameters()} - {"cpu"})
    dtype = SHORT[policy.torch_dtype(devices[0] if devices else "cpu")]
    return Report(type(model).__name__, policy, dtype, compile, graphs, tuple(dict.fromkeys(all_notes)), memory, **more)


def _backend(compile: Compile, options: Options) -> str:
    return (compile if isinstance(compile, str) else getattr(compile, "__name__", "a callable")) + options_text(options)


def _status(found: Conversion) -> str:
    if found.policy.level == "O0":
        return AS_WRITTEN
    nothing = FAILED if found.diagnostics.notes or found.diagnostics.skips else NOT_CAPTURED
    return "" if found.graphs else nothing
