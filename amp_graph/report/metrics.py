"""What a log of a training shows, as a dict of numbers: loss scale, skipped steps, casts, held memory.

Before: ``scaler.get_scale()`` and ``scaler.skipped_steps.item()``, a copy to the host each. After:
``metrics(model, scaler)``, one copy for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from amp_graph.capture.conversion import Conversion, conversion_of
from amp_graph.errors import CaptureError
from amp_graph.optim.master_weights import MASTER
from amp_graph.report.collect_records import is_cast, parts_of
from amp_graph.rewrite import Rewritten
from amp_graph.scaling.grad_scaler import GradScaler
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
    if source is None:
        return
    for kind, read in READERS:
        if isinstance(source, kind):
            yield from read(source)
            return
    converted = conversion_of(source)
    if converted is None:
        raise CaptureError(
            f"metrics: a {type(source).__name__} has none\n  legal: {LEGAL}\n"
            "  fix:   metrics(amp_graph.convert(model), scaler)"
        )
    yield from _of_conversion(converted)


def _of_conversion(found: Conversion) -> Iterator[tuple[str, Value]]:
    yield "casts", sum(_casts(graph.rewritten) for graph in found.graphs)
    copies = 0 if found.captured.frozen is None else found.captured.frozen.bytes
    recorded = 0 if found.captured.replays is None else found.captured.replays.bytes
    yield "held_bytes", copies + recorded + _bytes_of_masters(found.model)


def _of_step(step: TrainStep) -> Iterator[tuple[str, Value]]:
    yield "casts", sum(_casts(captured.rewritten) for captured in step.captured)
    copies = sum(t.numel() * t.element_size() for t in step.weight_copies())
    yield "held_bytes", copies + _bytes_of_masters(step.model)
    if step.grad_norm is not None:
        yield "grad_norm", step.grad_norm
    if step.loss_scale is not None:
        yield from _of_loss_scale(step.loss_scale)


def _of_loss_scale(scale: LossScale) -> Iterator[tuple[str, Value]]:
    if scale.ready:
        yield from (("loss_scale", scale.scale), ("skipped_steps", scale.state[3]))
    else:
        yield from (("loss_scale", scale.values()[0]), ("skipped_steps", scale.values()[3]))
    if scale.records.count:
        skipped = scale.state[3] if scale.ready else scale.values()[3]
        yield "skipped_of_last_100", skipped - scale.records.skipped_before(LATELY)


def _of_scaler(scaler: torch.amp.GradScaler) -> Iterator[tuple[str, Value]]:
    """Read torch's own scaler, which counts no skipped steps."""
    if scaler.is_enabled():
        scale = scaler._scale
        yield "loss_scale", scaler._init_scale if scale is None else scale


READERS: tuple[tuple[type, Callable[[Any], Iterator[tuple[str, Value]]]], ...] = (
    (TrainStep, _of_step),
    (LossScale, _of_loss_scale),
    (MixedPrecisionOptimizer, lambda optimizer: _of_loss_scale(optimizer.scaler._loss_scale)),
    (GradScaler, lambda scaler: _of_loss_scale(scaler._loss_scale) if scaler.is_enabled() else iter(())),
    (torch.amp.GradScaler, _of_scaler),
)


def _casts(rewritten: Rewritten) -> int:
    return sum(is_cast(node) for part in parts_of(rewritten) for node in part.gm.graph.nodes)


def _bytes_of_masters(model: torch.nn.Module) -> int:
    masters = (master for p in model.parameters() if (master := getattr(p, MASTER, None)) is not None)
    return sum(m.full.numel() * m.full.element_size() for m in masters if m.full is not None)


def _on_host(found: dict[str, Value]) -> dict[str, float]:
    """Return the values as numbers, with one copy from each device."""
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    read: dict[str, float] = {}
    for device in {value.device for value in tensors.values()}:
        here = {name: value for name, value in tensors.items() if value.device == device}
        read |= dict(zip(here, torch.stack([value.double() for value in here.values()]).tolist(), strict=True))
    return {name: read[name] if name in read else float(value) for name, value in found.items()}
