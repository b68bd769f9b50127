"""Registers the custom operators of amp_graph in one library.

Before: a Python function that a tracer traces into.
After: ``amp_graph::attention_backward``, one node of the graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from amp_graph.passes.torch_compat.dispatch import is_seen

LIBRARY = torch.library.Library("amp_graph", "DEF")
OPS: Any = torch.ops.amp_graph
FUNCTIONS: dict[str, Callable[..., Any]] = {}  # the implementation of each operator, by its overload's name
_operators: dict[Callable[..., Any], Callable[..., Any]] = {}  # the operator of each implementation
Result = TypeVar("Result")


def define_operator(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> None:
    """Register ``amp_graph::<schema>``, which runs ``function`` on every device and ``fake`` on fake tensors."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=tuple(tags))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    FUNCTIONS[f"amp_graph.{name}.default"] = function
    _operators[function] = getattr(OPS, name).default
    torch.library.register_fake(f"amp_graph::{name}", fake, lib=LIBRARY)


def called(function: Callable[..., Result], first: torch.Tensor, *given: Any) -> Result:
    """Call ``function``, by its operator only if a mode, such as a tracer, observes ``first``: dispatch takes time."""
    return (_operators[function] if is_seen(first) else function)(first, *given)


def define_as_typed(
    function: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = (), name: str = ""
) -> None:
    """Register ``function`` under ``name``, or its own, with a schema from its annotations; it mutates no argument.

    ``fake`` takes the arguments that it names. Integers are constants, not sizes: they are the same in all calls of a
    graph.
    """
    schema = torch.library.infer_schema(function, mutates_args=()).replace("SymInt", "int")
    known, wanted = inspect.signature(function), tuple(inspect.signature(fake).parameters)

    def picked(*args: Any, **kwargs: Any) -> Any:
        given = known.bind(*args, **kwargs)
        given.apply_defaults()
        return fake(*(given.arguments[name] for name in wanted))

    define_operator((name or function.__name__) + schema, function, picked, tags)
