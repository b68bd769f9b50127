"""A decorator that sets the precision of a module or an ``autograd.Function`` in the code itself.

Before: ``class Router(nn.Module)``. After: ``@amp_graph.precision("full") class Router(nn.Module)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from amp_graph.errors import PolicyError
from amp_graph.lists import OpClass
from amp_graph.passes.precision.classify import register_function

Target = TypeVar("Target")
WORDS = {"full": "full", "fp32": "full", "low": "low"}


def precision(word: str) -> Callable[[Target], Target]:
    """Return a decorator that fixes the precision of a module class, a module, or an ``autograd.Function``.

    word: "full" (or "fp32"): computes and returns fp32, inputs cast up, as ``custom_fwd(cast_inputs=float32)``;
    "low": runs in the policy's low precision, inputs cast down.

    It applies to everything inside the module, except to submodules with their own setting. Undecorated autograd
    Functions run as captured.

    Raises PolicyError for another word, or another kind of object.
    """
    if word not in WORDS:
        raise PolicyError(
            f"precision: unknown word {word!r}\n  legal: 'full', 'fp32', 'low'\n  fix:   @amp_graph.precision('full')"
        )

    def mark(target: Any) -> Any:
        if isinstance(target, type) and issubclass(target, torch.autograd.Function):
            register_function(target, OpClass.DENY if WORDS[word] == "full" else OpClass.ALLOW)
        elif isinstance(target, torch.nn.Module) or (isinstance(target, type) and issubclass(target, torch.nn.Module)):
            target.amp_precision = WORDS[word]  # type: ignore[union-attr]
        else:
            raise PolicyError(
                f"precision: {target!r} is neither a torch.nn.Module nor a torch.autograd.Function\n"
                "  fix:   decorate a module class, a module instance, or an autograd.Function subclass"
            )
        return target

    return mark
