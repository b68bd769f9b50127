"""Reads and checks the arguments of a ``TrainStep``: model, optimizer, batch, loss scale.

Before: ``step({"input_ids": ids, "labels": ids})``. After: the model called with its arguments, and its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from amp_graph.capture.conversion import conversion_of
from amp_graph.capture.frozen_conversion import FrozenConversion
from amp_graph.convert import refuse_what_cannot_be_converted
from amp_graph.errors import AmpGraphError, CaptureError
from amp_graph.lists.errors import shortened
from amp_graph.optim.check_optimizer import refuse_closures
from amp_graph.passes.graph.graph_text import type_text
from amp_graph.passes.torch_compat.dispatch import mode_without_capture
from amp_graph.policy import Policy
from amp_graph.scaling.loss_scale import LossScale, loss_scale_of
from amp_graph.scaling.mixed_precision_optimizer import MixedPrecisionOptimizer


def policy_of(model: Any, policy: Policy | str | None) -> Policy:
    """Return the policy of a step; it must be that of the model if the model is converted."""
    found = conversion_of(model)
    if found is None:
        return Policy.parse(policy)
    if isinstance(found, FrozenConversion):
        raise CaptureError("TrainStep: the model is frozen for inference\n  fix:   amp_graph.thaw(model)")
    if policy is not None and Policy.parse(policy) != found.policy:
        raise CaptureError(
            f"TrainStep: the model is converted with policy='{found.policy}', and this step asks for "
            f"'{Policy.parse(policy)}'\n  fix:   leave policy out, or amp_graph.revert(model) first"
        )
    return found.policy


def forward_of(model: torch.nn.Module) -> Callable[..., Any]:
    """Return the callable that a step captures: the model, or the original forward of a converted one."""
    found = conversion_of(model)
    return model if found is None else found.as_written()


def call_model(model: Callable[..., Any], *given: Any) -> Any:
    """Call ``model``; a single dict or tuple is unpacked as its arguments."""
    if len(given) == 1 and isinstance(given[0], dict):
        return model(**given[0])
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        return model(*given[0])
    return model(*given)


def loss_of(out: Any) -> Any:
    """Return the loss that a model returns: its result, the result's ``loss``, or the result's first element."""
    if isinstance(out, Tensor):
        return out
    if isinstance(out, dict) and "loss" in out:
        return out["loss"]
    return out.loss if hasattr(out, "loss") else out[0]


def split_batch(batch: Sequence[Any], count: int) -> list[list[Any]]:
    """Split every tensor in ``batch`` along dimension 0 into ``count`` equal parts."""
    flat, spec = tree_flatten(list(batch))
    for tensor in flat:
        if isinstance(tensor, Tensor) and (tensor.dim() == 0 or tensor.shape[0] % count):
            raise CaptureError(
                f"TrainStep: a batch tensor of shape {tuple(tensor.shape)} is not {count} equal micro-batches\n"
                f"  legal: a first dimension that {count} divides\n  fix:   another batch size, or micro_batches=1"
            )
    columns = [_chunks(t, count) if isinstance(t, Tensor) else [t] * count for t in flat]
    return [tree_unflatten([c[i] for c in columns], spec) for i in range(count)]


def _chunks(tensor: Tensor, count: int) -> list[Tensor]:
    """Return equal parts of ``tensor``, as leaves if it is one; CaptureError if gradients would flow through it."""
    refuse_gradients_beyond([tensor])
    if isinstance(tensor, torch.nn.Parameter):
        raise CaptureError(
            f"TrainStep: a Parameter of shape {tuple(tensor.shape)} in the batch, which is split into {count} parts\n"
            "  legal: parameters in the batch with micro_batches=1\n  fix:   keep it in the model, and index it there"
        )
    return [part.requires_grad_(tensor.requires_grad) for part in tensor.detach().chunk(count)]


def refuse_gradients_beyond(given: Sequence[Any]) -> None:
    """Raise CaptureError if gradients would flow to the history of a step's inputs, outside of its graph."""
    for tensor in given:
        if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
            raise CaptureError(
                f"TrainStep: a tensor of shape {tuple(tensor.shape)} was computed before the step from tensors that "
                "require gradients, which would not get them\n"
                "  legal: a batch, and attributes of the model, that are data or parameters\n"
                "  fix:   compute it in the model or in loss_fn; tensor.detach() if it needs no gradient"
            )


def make_loss_scale(given: Any, policy: Policy, model: torch.nn.Module) -> LossScale | None:
    """Return the loss scale that ``given`` names; by default dynamic in fp16 and none in bf16."""
    if isinstance(given, str) and given == "default":
        device = next((p.device.type for p in model.parameters()), "cpu")
        given = "dynamic" if policy.level != "O0" and policy.torch_dtype(device) is torch.float16 else None
    return loss_scale_of("TrainStep", given)


def refuse(model: Any, loss_fn: Any, optimizer: Any, policy: Policy) -> None:
    """Raise CaptureError or ScaleError for arguments of a wrong kind."""
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, Optimizer):
        wrong = model if not isinstance(model, torch.nn.Module) else optimizer
        raise CaptureError(
            f"TrainStep: a {type(wrong).__name__} in the place of the "
            f"{'model' if wrong is model else 'optimizer'}\n  fix:   TrainStep(model, loss_fn, optimizer, policy)"
        )
    refuse_loss_fn("TrainStep", loss_fn, CaptureError)
    if isinstance(optimizer, MixedPrecisionOptimizer):
        raise CaptureError(
            "TrainStep: a MixedPrecisionOptimizer scales losses and updates masters itself, as a TrainStep does\n"
            "  legal: the optimizer alone, over the model's own parameters\n"
            "  fix:   TrainStep(model, loss_fn, torch.optim.AdamW(model.parameters()), 'fp16-O2')"
        )
    refuse_closures("TrainStep", optimizer)
    if conversion_of(model) is None:
        refuse_what_cannot_be_converted(model, policy)


def refuse_loss_fn(caller: str, loss_fn: Any, kind: type[AmpGraphError]) -> None:
    """Raise ``kind`` for what is no loss function: a class, or nothing that can be called."""
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, type)):
        raise kind(
            f"{caller}: loss_fn={shortened(loss_fn)} returns no loss\n  legal: a function or module, called as "
            "loss_fn(outputs, *targets); None where the model returns its loss\n"
            "  fix:   loss_fn=torch.nn.functional.cross_entropy"
        )


def refuse_options(micro_batches: Any, clip_norm: Any, clip_value: Any, reduce_dtype: Any, outputs: Any) -> None:
    """Raise CaptureError for invalid numbers, such as clip limits of 0 or less."""
    if type(micro_batches) is not int or micro_batches < 1:
        raise CaptureError(
            f"TrainStep: micro_batches={micro_batches!r}\n  legal: a whole number, 1 or more\n  fix:   micro_batches=1"
        )
    for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        number = isinstance(limit, Real) and not isinstance(limit, bool)
        if limit is not None and not (number and float(limit) > 0):
            raise CaptureError(
                f"TrainStep: {name}={limit!r}\n  legal: a number above 0; None for no clipping\n  fix:   {name}=1.0"
            )
    if type(outputs) is not bool:
        raise CaptureError(
            f"TrainStep: outputs={outputs!r}\n  legal: True for (loss, outputs), False for the loss\n"
            "  fix:   outputs=True"
        )
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
        raise CaptureError(
            f"TrainStep: reduce_dtype={reduce_dtype!r}\n  legal: a floating-point torch.dtype; None for fp32\n"
            "  fix:   reduce_dtype=torch.bfloat16"
        )


def refuse_what_is_no_loss(loss: Any, who: str = "TrainStep") -> None:
    """Raise CaptureError if an uncaptured ``loss`` cannot be differentiated."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        kind = type_text(loss) if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise CaptureError(
            f"{who}: the loss is {kind}\n  legal: a tensor of one floating-point number\n"
            "  fix:   reduce it in loss_fn, for example by .mean()"
        )


def refuse_surroundings() -> None:
    """Raise CaptureError if a step is called under a mode that its graph does not support."""
    if mode := mode_without_capture():
        raise CaptureError(
            f"TrainStep: called under {mode}, a dispatch mode that captured code does not support"
            "\n  fix:   leave the mode, or call the model itself under it"
        )
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise CaptureError(
            f"TrainStep: called under torch.{mode}(), which disables gradients\n"
            "  fix:   call it outside; for inference call model(inputs)"
        )


def refuse_several_devices(parameters: Sequence[Tensor]) -> None:
    """Raise CaptureError if the trained parameters are on more than one device."""
    devices = sorted({str(p.device) for p in parameters})
    if len(devices) > 1:
        raise CaptureError(
            f"TrainStep: the model's parameters are on several devices: {', '.join(devices)}\n"
            "  legal: one device\n  fix:   model.to(device), or amp_graph.convert(model) with amp_graph.GradScaler"
        )
