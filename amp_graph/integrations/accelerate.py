"""accelerate: ``model, optimizer = prepare(accelerator, model, optimizer, policy="bf16")``.

Before: ``Accelerator(mixed_precision="bf16")`` and ``accelerator.prepare(...)``, the model's forward under
``torch.autocast``. After: ``Accelerator()`` and this call, and the loop as it was.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_graph.capture.conversion import conversion_of
from amp_graph.convert import convert, revert
from amp_graph.errors import CaptureError, PolicyError, ScaleError
from amp_graph.integrations import missing, unscale_once
from amp_graph.lists.errors import Undo
from amp_graph.policy import Policy
from amp_graph.policy_words import HELD_LOW
from amp_graph.scaling.grad_scaler import GradScaler

try:
    import accelerate
except ModuleNotFoundError as error:
    raise missing(error, "accelerate", "amp_graph.integrations.accelerate") from None


def prepare(
    accelerator: accelerate.Accelerator,
    *objects: Any,
    policy: Policy | str | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Any:
    """Convert the models among ``objects``, and return what ``accelerator.prepare(*objects)`` returns.

    accelerator: one without mixed precision of its own. objects: models, optimizers and what else ``prepare`` takes.
    policy: as for ``amp_graph.convert``. scaler: for fp16; by default an ``amp_graph.GradScaler``, which the
    accelerator then uses in ``backward``, ``clip_grad_norm_``, ``step`` and ``save_state``.

    Raises PolicyError for an accelerator with its own mixed precision, CaptureError and ScaleError as ``convert``;
    nothing has changed then.
    """
    wanted = Policy.parse(policy)
    mode = str(accelerator.mixed_precision)
    if mode != "no":
        raise PolicyError(
            f"accelerate: Accelerator(mixed_precision={mode!r}) runs models under torch.autocast, and policy "
            f"'{wanted}' decides their precision\n  legal: mixed_precision='no', the default\n"
            f"  fix:   prepare(Accelerator(), model, optimizer, policy={mode!r})"
        )
    kind = accelerator.distributed_type.value
    if wanted.level in HELD_LOW and kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise CaptureError(
            f"accelerate: {kind} holds the parameters that level {wanted.level} lowers\n  legal: levels O1 and O0\n"
            f"  fix:   prepare(accelerator, model, optimizer, policy='{wanted.dtype}')"
        )
    done: list[torch.nn.Module] = []

    def undo() -> None:
        for model in done:
            if conversion_of(model) is not None:
                revert(model)

    with Undo(undo):
        for model in (given for given in objects if isinstance(given, torch.nn.Module)):
            done += [model] if conversion_of(model) is None else []
            convert(model, wanted)
        if wanted.level != "O0" and wanted.torch_dtype(accelerator.device.type) is torch.float16:
            give_scaler(accelerator, scaler)
    return accelerator.prepare(*objects)


# -- fp16: accelerate/accelerator.py, 1.15 ------------------------------------------------------------


def give_scaler(accelerator: Any, scaler: torch.amp.GradScaler | None = None) -> torch.amp.GradScaler:
    """Make ``accelerator`` scale losses, unscale before it clips, skip bad steps and save the scale; return it.

    Optimizers that it has prepared already get the scaler, too.
    """
    if accelerator.scaler is not None:
        if scaler is None or accelerator.scaler is scaler:
            return accelerator.scaler
        raise ScaleError(
            "accelerate: this Accelerator has a scaler already\n"
            "  fix:   leave scaler= out, or Accelerator(mixed_precision='no')"
        )
    made = accelerator.scaler = scaler or GradScaler()

    def unscale_gradients(optimizer: Any = None) -> None:
        given = accelerator._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, (list, tuple)) else [given]:
            while hasattr(one, "accelerator_state"):  # an AcceleratedOptimizer
                one = one.optimizer
            unscale_once(made, one)

    accelerator.unscale_gradients = unscale_gradients  # accelerate's own does nothing with mixed_precision="no"
    for optimizer in accelerator._optimizers:
        optimizer.__setstate__({"scaler": made})
    return made
