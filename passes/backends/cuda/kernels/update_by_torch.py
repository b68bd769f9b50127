"""The optimizer's update of ``optimizer_update.py`` by torch's operations, a tensor at a time.

Before: a Triton kernel that does not compile. After: the same numbers to a few last places, more slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RuleInput:
    """What a rule reads besides tensors: the rate, the number of this step, options and the words of the rule."""

    lr: Tensor
    number: Any
    options: Mapping[str, Any]
    words: Sequence[str]

    def option(self, name: str) -> float:
        """Return an option of the optimizer, 0 where it is not given."""
        found: float = self.options.get(name, 0.0)
        return found


Rule = Callable[[Tensor, Tensor, Sequence[Tensor], RuleInput], list[Tensor]]  # value, gradient, old state


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
    at = RuleInput(rate, number, options, words)
    made += RULES[words[0]](param, _prepared(g, param, clip, at), states, at)
    for target, new in zip(targets, made, strict=True):
        target.copy_(new if found_inf is None else torch.where(found_inf > 0, target, new))
    if low is not None:
        low.copy_(param)


def _prepared(g: Tensor, p: Tensor, clip: Tensor | None, at: RuleInput) -> Tensor:
    g = g if clip is None else g * clip
    limit = at.options.get("clip_value")
    g = g if limit is None else g.clamp(-limit, limit)
    g = -g if at.options.get("maximize") else g
    return g + at.option("weight_decay") * p if "decay" in at.words else g


def _adam(p: Tensor, g: Tensor, old: Sequence[Tensor], at: RuleInput) -> list[Tensor]:
    beta1, beta2 = at.option("beta1"), at.option("beta2")
    rate, root = (at.lr / (1 - beta1**at.number)).float(), (1 - beta2**at.number).sqrt().float()
    keep = (1 - at.lr * (at.option("weight_decay") if "decoupled" in at.words else 0.0)).float()
    m, v = old[0].lerp(g, 1 - beta1), old[1] * beta2 + (1 - beta2) * g * g
    largest = [torch.maximum(old[2], v)] if "amsgrad" in at.words else []
    square = largest[0] if largest else v
    return [p * keep - rate * m / (square.sqrt() / root + at.option("eps")), m, v, *largest]


def _adagrad(p: Tensor, g: Tensor, old: Sequence[Tensor], at: RuleInput) -> list[Tensor]:
    total = old[0] + g * g
    rate = (at.lr / (1 + (at.number - 1) * at.option("lr_decay"))).float()
    return [p - rate * g / (total.sqrt() + at.option("eps")), total]


def _sgd(p: Tensor, g: Tensor, old: Sequence[Tensor], at: RuleInput) -> list[Tensor]:
    if "momentum" not in at.words:
        return [p - at.lr.float() * g]
    momentum = at.option("momentum")
    m = momentum * old[0] + g
    return [p - at.lr.float() * (g + momentum * m if "nesterov" in at.words else m), m]


RULES: dict[str, Rule] = {"adam": _adam, "adagrad": _adagrad, "sgd": _sgd}
