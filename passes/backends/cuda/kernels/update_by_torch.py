"""The optimizer's update of ``optimizer_update.py`` by torch's operations, a tensor at a time.

Before: a Triton kernel that does not compile. After: the same numbers to a few last places, more slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Takes value, gradient, old state, rate, the number of this step, options and the words of the rule.
Rule = Callable[[Tensor, Tensor, Sequence[Tensor], Tensor, Any, Mapping[str, Any], Sequence[str]], list[Tensor]]


def update_by_torch(
    param: Tensor,
    grad: Tensor,
    states: Sequence[Tensor],
    step: Tensor | None,
    low: Tensor | None,
    lr: Tensor | float,
    found_inf: Tensor | None,
    unscale: Tensor | None,
    clip: Tensor | None,
    rule: str,
    options: Mapping[str, Any],
    store: bool = False,
) -> None:
    """Update a parameter, its states and its copy; ``step``, the number of steps so far, stays. See ``update``."""
    words = rule.split()
    g = grad.float() if unscale is None else grad.float() * unscale
    targets, made = [*([grad] if store else []), param, *states], [g] if store else []
    number: Any = 1.0 if step is None else step.double() + 1
    rate = torch.as_tensor(lr, dtype=torch.float64, device=param.device)
    g = _prepared(g, param, clip, words, options)
    made += RULES[words[0]](param, g, states, rate, number, options, words)
    for target, new in zip(targets, made, strict=True):
        target.copy_(new if found_inf is None else torch.where(found_inf > 0, target, new))
    if low is not None:
        low.copy_(param)


def _prepared(g: Tensor, p: Tensor, clip: Tensor | None, words: Sequence[str], options: Mapping[str, Any]) -> Tensor:
    g = g if clip is None else g * clip
    limit = options.get("clip_value")
    g = g if limit is None else g.clamp(-limit, limit)
    g = -g if options.get("maximize") else g
    return g + options.get("weight_decay", 0.0) * p if "decay" in words else g


def _adam(
    p: Tensor,
    g: Tensor,
    old: Sequence[Tensor],
    lr: Tensor,
    step: Any,
    options: Mapping[str, Any],
    words: Sequence[str],
) -> list[Tensor]:
    beta1, beta2 = options.get("beta1", 0.0), options.get("beta2", 0.0)
    rate, root = (lr / (1 - beta1**step)).float(), (1 - beta2**step).sqrt().float()
    keep = (1 - lr * (options.get("weight_decay", 0.0) if "decoupled" in words else 0.0)).float()
    m, v = old[0].lerp(g, 1 - beta1), old[1] * beta2 + (1 - beta2) * g * g
    largest = [torch.maximum(old[2], v)] if "amsgrad" in words else []
    square = largest[0] if largest else v
    return [p * keep - rate * m / (square.sqrt() / root + options.get("eps", 0.0)), m, v, *largest]


def _adagrad(
    p: Tensor,
    g: Tensor,
    old: Sequence[Tensor],
    lr: Tensor,
    step: Any,
    options: Mapping[str, Any],
    words: Sequence[str],
) -> list[Tensor]:
    total = old[0] + g * g
    rate = (lr / (1 + (step - 1) * options.get("lr_decay", 0.0))).float()
    return [p - rate * g / (total.sqrt() + options.get("eps", 0.0)), total]


def _sgd(
    p: Tensor,
    g: Tensor,
    old: Sequence[Tensor],
    lr: Tensor,
    step: Any,
    options: Mapping[str, Any],
    words: Sequence[str],
) -> list[Tensor]:
    if "momentum" not in words:
        return [p - lr.float() * g]
    momentum = options.get("momentum", 0.0)
    m = momentum * old[0] + g
    return [p - lr.float() * (g + momentum * m if "nesterov" in words else m), m]


RULES: dict[str, Rule] = {"adam": _adam, "adagrad": _adagrad, "sgd": _sgd}
