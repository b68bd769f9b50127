"""What a case of the corpus is, and the table that the family modules fill.

A family module has `@add("resnet_basic", inputs, loss, "cnn")` above what builds a model; a test says
`make("resnet_basic")`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from amp_graph.passes.torch_compat.devices import onednn_takes_bf16

Inputs = tuple[tuple, dict]


@dataclass(frozen=True)
class Case:
    """One model: how to build it, what to feed it, and the scalar that is made of its output.

    `loss` is the part of the user's program that stays outside of the model (for a model that computes its
    own loss, it only picks it out). `without_grad` names the parameters that legitimately get no gradient.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Callable[[Any], torch.Tensor]
    tags: frozenset[str] = frozenset()
    without_grad: frozenset[str] = frozenset()


CASES: dict[str, Case] = {}

# Tags of an LSTM: autocast has none in fp16, and none in bf16 on a CPU for which oneDNN has no bf16.
LSTM = ("rnn", "no_autocast_fp16", *(() if onednn_takes_bf16() else ("no_autocast",)))


def add(
    name: str,
    inputs: Callable[[], Inputs],
    loss: Callable[[Any], torch.Tensor],
    *tags: str,
    without_grad: tuple[str, ...] = (),
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Put what builds a model in the table as a case; a name is given once."""

    def noted(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        if name in CASES:
            raise ValueError(f"the corpus already has a case {name!r}")
        CASES[name] = Case(name, build, inputs, loss, frozenset(tags), frozenset(without_grad))
        return build

    return noted


def args(*positional: Any, **keyword: Any) -> Inputs:
    """Write inputs the way they are passed: `args(x, mask=m)`."""
    return positional, keyword


def normal(*shapes: tuple[int, ...]) -> Callable[[], Inputs]:
    """Return what draws inputs of these shapes."""
    return lambda: args(*map(torch.randn, shapes))


def make(name: str | Case, seed: int = 0) -> tuple[nn.Module, tuple, dict]:
    """Build a case's model in training mode, and its inputs, from one seed; `name` may be a case itself."""
    case = CASES[name] if isinstance(name, str) else name
    torch.manual_seed(seed)
    model = case.build()
    if "eval" not in case.tags:
        model.train()
    # The inputs have a seed of their own: they must not change when a model draws one weight more.
    torch.manual_seed(seed + 10_000)
    positional, keyword = case.inputs()
    return model, positional, keyword


def to_double(obj: Any) -> Any:
    """Copy nested arguments with every float32 tensor in float64 (complex64 in complex128)."""
    if isinstance(obj, torch.Tensor):
        wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
        return obj.detach().to(wide[obj.dtype]) if obj.dtype in wide else obj
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return type(obj)(*map(to_double, obj))
    if isinstance(obj, (list, tuple)):
        return type(obj)(map(to_double, obj))
    if isinstance(obj, dict):
        return {key: to_double(value) for key, value in obj.items()}
    if is_dataclass(obj) and not isinstance(obj, type):
        return replace(obj, **{f.name: to_double(getattr(obj, f.name)) for f in fields(obj)})
    return obj
