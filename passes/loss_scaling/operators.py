"""The operators of loss scaling, by names that graphs show: ``check_finite_and_unscale_``, ``update_loss_scale_``.

Before: ``inf = any(not g.isfinite().all() for g in grads)`` on the host. After: one operator over all gradients, whose
verdict stays on the device, and one that moves the scale by it.

Sources: torch/amp/grad_scaler.py and aten/src/ATen/native/cuda/AmpKernels.cu (kernels, growth and backoff);
Megatron-LM's DynamicGradScaler and DeepSpeed's DynamicLossScaler (hysteresis).
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from amp_graph.passes.native.operator_library import LIBRARY, define_operator
from amp_graph.passes.native.operator_library import OPS as OPS  # for whoever calls what is defined here
from amp_graph.passes.torch_compat.operators import unscale_and_check_finite_, update_scale_


def check_finite_and_unscale_(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply ``grads`` by ``inv_scale`` in place and set ``found_inf`` to 1.0 where any element is not finite.

    grads: dense, of any shapes, floating or complex, on one device; computed in fp32, rounded to their own dtype.
    inv_scale, found_inf: 0-d fp32 on that device. ``found_inf`` is never set back to 0.
    """
    kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for grad in grads:
        parts = torch.view_as_real(grad) if grad.is_complex() else grad  # torch's kernel knows no complex numbers
        kinds[parts.dtype].append(parts)
    for alike in kinds.values():  # one fused call for each dtype
        unscale_and_check_finite_(alike, found_inf, inv_scale)


def update_loss_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_left: Tensor,
    skipped: Tensor,
    stuck: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    floor: float,
    ceiling: float,
) -> None:
    """Move the scale by one step's verdict, in place and without a copy to the host.

    scale: 0-d fp32. growth_tracker, hysteresis_left, skipped, stuck: 0-d int32; good steps in a row, bad steps left
    before the scale backs off, bad steps in all, bad steps in a row at the floor. found_inf: 0-d fp32, 0 for a good
    step. After ``growth_interval`` good steps the scale grows and hysteresis starts anew; after ``hysteresis`` bad
    ones it backs off, and at every further bad one; it is kept within ``floor`` and ``ceiling``.
    """
    growth_tracker.clamp_(max=growth_interval - 1)  # of a longer interval: torch's kernel grows at equality alone
    bad, before = found_inf > 0, scale.clone()
    update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)
    if hysteresis > 1:
        left = torch.clamp_min(hysteresis_left - bad.int(), 0)
        scale.copy_(torch.where(bad & (left > 0), before, scale))
        grew = ~bad & (growth_tracker == 0)
        hysteresis_left.copy_(torch.where(grew, hysteresis, left))
    scale.clamp_(floor, ceiling)
    skipped.add_(bad)
    stuck.add_(1).mul_(bad & (scale <= floor))


# In-place operators write nothing that has a shape of its own: their fakes have nothing to do.
define_operator(
    "check_finite_and_unscale_(Tensor(a!)[] grads, Tensor inv_scale, Tensor(b!) found_inf) -> ()",
    check_finite_and_unscale_,
    lambda *given: None,
)
define_operator(
    "update_loss_scale_(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor(c!) hysteresis_left, Tensor(d!) skipped, "
    "Tensor(e!) stuck, Tensor found_inf, float growth_factor, float backoff_factor, int growth_interval, "
    "int hysteresis, float floor, float ceiling) -> ()",
    update_loss_scale_,
    lambda *given: None,
)
# A mark that a captured graph carries: clone, because an output may not be the input itself.
LIBRARY.impl(LIBRARY.define("loss(Tensor loss) -> Tensor"), torch.clone, "CompositeImplicitAutograd")
