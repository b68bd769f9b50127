"""Warns where a method of a converted model returns another module, which nothing converted.

Before: ``model = model.merge_and_unload()`` of peft, and ``model(x)`` in fp32, silently. After: an AmpGraphWarning that
names the method and the fix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from amp_graph.errors import warn

# peft's PeftModel and its tuners: the model inside, with or without the adapters' weights in it.
RETURN_ANOTHER = ("merge_and_unload", "unload")
CONVERSION = "_amp_graph"


@dataclass
class Watched:
    """Calls ``method``, and warns if what it returns is a module that is not converted; can be copied and pickled."""

    method: Callable[..., Any]
    name: str
    policy: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        result = self.method(*args, **kwargs)
        if isinstance(result, torch.nn.Module) and CONVERSION not in result.__dict__:
            warn(
                f"amp_graph: {self.name}() of a converted model returned another object, a {type(result).__name__}, "
                "which is not converted: it runs as it was written\n"
                f"  fix:   amp_graph.convert(amp_graph.revert(model).{self.name}(), '{self.policy}')"
            )
        return result


def watch_new_objects(model: torch.nn.Module, policy: str) -> None:
    """Put a watch on the methods of ``model`` that return another module."""
    for name in RETURN_ANOTHER:
        if name not in model.__dict__ and callable(method := getattr(model, name, None)):
            model.__dict__[name] = Watched(method, name, policy)


def forget_new_objects(model: torch.nn.Module) -> None:
    """Remove the watch."""
    for name in RETURN_ANOTHER:
        if isinstance(model.__dict__.get(name), Watched):
            del model.__dict__[name]
