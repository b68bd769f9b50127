"""What a log of a training shows, as a dict of numbers: loss scale, skipped steps, casts, held memory.

Before: ``scaler.get_scale()`` and ``scaler.skipped_steps.item()``, a copy to the host each. After:
``metrics(model, scaler)``, one copy for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import CaptureError
from amp_graph.numerics.overflow.scale_history import scale_behind
from amp_graph.optim.master_weights import MASTER
from amp_graph.passes.graph.graph_text import grouped
from amp_graph.report.graph_parts import is_cast, parts_of
from amp_graph.rewrite import Rewritten
from amp_graph.scaling.loss_scale import LossScale
from amp_graph.scaling.mixed_precision_optimizer import MixedPrecisionOptimizer
from amp_graph.step.train_step import TrainStep

Value = float | Tensor  # a tensor: 0-d, on its device
LEGAL = "a converted model, a TrainStep, a GradScaler, a LossScale, a MixedPrecisionOptimizer, None"


def metrics(*sources: Any, grad_norm: Tensor | float | None = None) -> dict[str, float]:
    """Return numbers for a log: of converted models, steps, scalers and mixed-precision optimizers.

    The keys: ``loss_scale``, ``skipped_steps`` and, from the first step on, ``skipped_of_last_100`` of a source that
    scales losses; ``casts``, cast operations in the captured graphs, and ``held_bytes``, weight copies, fp32 masters
    and recorded graphs that are held between steps, in bytes, both added up over the models; ``grad_norm`` of a
    ``TrainStep`` with ``clip_norm``, before it clips, or the given one.

    sources: converted models, steps, scalers, loss scales, mixed-precision optimizers; None is left out.
    grad_norm: what ``clip_grad_norm_`` returned, a number or a 0-d tensor.

    All that is on a device is copied to the host at once: call it once per logging interval. Raises CaptureError for
    a source without metrics.
    """
    found: dict[str, Value] = {}
    for source in sources:
        for name, value in _of(source):
            found[name] = found.get(name, 0) + value if name in ADDED else value
    if grad_norm is not None:
        found["grad_norm"] = grad_norm.detach() if isinstance(grad_norm, Tensor) else grad_norm
    return _on_host(found)


LATELY = 100  # steps
ADDED = ("casts", "held_bytes")


def _of(source: Any) -> Iterator[tuple[str, Value]]:
    converted = conversion_of(source) if isinstance(source, torch.nn.Module) else None
    scaler = source.scaler if isinstance(source, MixedPrecisionOptimizer) else source
    is_off = isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled()
    scale = None if is_off else scale_behind(source)
    if isinstance(source, TrainStep):
        graphs = [captured.rewritten for captured in source.captured]
        yield from _held(source.model, graphs, _bytes(source.weight_copies()))
        if source.grad_norm is not None:
            yield "grad_norm", source.grad_norm
    elif converted is not None:
        parts = (converted.captured.frozen, converted.captured.replays)
        graphs = [graph.rewritten for graph in converted.graphs]
        yield from _held(converted.model, graphs, sum(part.bytes for part in parts if part is not None))
    elif source is not None and not isinstance(source, (LossScale, MixedPrecisionOptimizer, torch.amp.GradScaler)):
        raise CaptureError(
            f"metrics: a {type(source).__name__} has none\n  legal: {LEGAL}\n"
            "  fix:   metrics(amp_graph.convert(model), scaler)"
        )
    if isinstance(scale, LossScale):
        yield "loss_scale", scale.scale if scale.ready else scale.values()[0]
        yield "skipped_steps", scale.skipped
        if scale.records.count:
            yield "skipped_of_last_100", scale.skipped - scale.records.skipped_before(LATELY)
    elif isinstance(scale, torch.amp.GradScaler):
        yield "loss_scale", scale._init_scale if scale._scale is None else scale._scale  # torch's counts no skips


def _held(model: torch.nn.Module, graphs: Iterable[Rewritten], copies: int) -> Iterator[tuple[str, Value]]:
    nodes = (node for graph in graphs for part in parts_of(graph) for node in part.gm.graph.nodes)
    yield "casts", sum(map(is_cast, nodes))
    yield "held_bytes", copies + _bytes(_masters(model.parameters()))


def _on_host(found: dict[str, Value]) -> dict[str, float]:
    """Return the values as numbers, with one copy from each device."""
    tensors = ((value.device, (name, value.double())) for name, value in found.items() if isinstance(value, Tensor))
    read: dict[str, Value] = {}
    for here in map(dict, grouped(tensors).values()):
        read |= dict(zip(here, torch.stack([*here.values()]).tolist(), strict=True))
    return {name: float(value) for name, value in (found | read).items()}


# -- memory in training -------------------------------------------------------------------------------


def memory_of(model: torch.nn.Module, optimizer: Any = None, copies: Iterable[Tensor] = ()) -> dict[str, int]:
    """Return bytes by kind, without kinds of 0 bytes.

    Gradients are counted for every parameter that trains, in its dtype, whether they exist at the moment or not;
    ``copies`` are the low-precision copies in the weight cache.
    """
    params = [p for p in model.parameters() if not is_lazy(p)]
    trained = [p for p in params if p.requires_grad]
    state = [t for s in optimizer.state.values() for t in s.values()] if optimizer is not None else []
    found = {
        "parameters": _bytes(params),
        "gradients": _bytes(trained),
        "masters": _bytes(_masters(params)),
        "weight copies": _bytes(copies),
        "optimizer state": _bytes(t for t in state if isinstance(t, Tensor)),
    }
    return {kind: size for kind, size in found.items() if size}


def _bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of ``tensors``, of sharded ones this rank's."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)


def _masters(params: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the fp32 masters that are held, without asking whether their parameters were written to."""
    masters = (getattr(p, MASTER, None) for p in params)
    yield from (master.full for master in masters if master is not None and master.full is not None)
