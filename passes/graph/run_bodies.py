"""Runs higher-order operators as Python, so that each run of a body can be observed and differentiated.

Before: ``scan(body, (init,), (xs,), (w,))``, one operation. After: ``body(init, xs[0], w)``, ``body(carry, xs[1], w)``,
and so on, with the same results.

Semantics: ``torch._higher_order_ops`` of torch 2.11 to 2.14, as Dynamo captures them, with dimension 0 first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from amp_graph.passes.torch_compat.dispatch import HigherOrderOperator

Body = Callable[..., Any]


def _cond(chosen: Any, true: Body, false: Body, operands: Sequence[Any] = ()) -> Any:
    return (true if bool(chosen) else false)(*operands)


def _while_loop(goes_on: Body, body: Body, carried: Sequence[Any], more: Sequence[Any] = ()) -> Any:
    carried = tuple(carried)
    while bool(_only(goes_on(*carried, *more))):
        carried = tuple(body(*carried, *more))
    return carried


def _only(found: Any) -> Any:
    return found[0] if isinstance(found, (tuple, list)) else found


def _scan(body: Body, init: Sequence[Any], xs: Sequence[Any], more: Sequence[Any] = ()) -> Any:
    carried, rows = list(init), list[list[Any]]()
    for i in range(len(xs[0])):
        found = list(body(*carried, *(x[i] for x in xs), *more))
        carried, row = found[: len(init)], found[len(init) :]
        rows.append(row)
    return [*carried, *map(_stacked, zip(*rows, strict=True))]


def _map(body: Body, xs: Sequence[Any], more: Sequence[Any] = ()) -> Any:
    rows = [body(*(x[i] for x in xs), *more) for i in range(len(xs[0]))]
    return tuple(map(_stacked, zip(*rows, strict=True)))


def _stacked(rows: Sequence[Any]) -> Any:
    return None if rows[0] is None else torch.stack(tuple(rows))


def _called(body: Body, *operands: Any) -> Any:
    return body(*operands)


def _invoked(body: Body, identifier: object, *operands: Any) -> Any:
    return body(*operands)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "cond": _cond, "while_loop": _while_loop, "scan": _scan, "map_impl": _map,
    "wrap": _called, "tag_activation_checkpoint": _called, "invoke_subgraph": _invoked,
}  # fmt: skip
# All but the one that calls its body in the open, and in backward again.
AS_PYTHON = OPERATORS.keys() - {"tag_activation_checkpoint"}


def is_run_as_python(target: object, given: Sequence[Any]) -> bool:
    """Say whether ``target``, called with ``given``, hides graphs from a dispatch mode that Python would show."""
    return getattr(target, "__name__", "") in AS_PYTHON and any(isinstance(body, GraphModule) for body in given)


class AsPython(TorchFunctionMode):
    """Runs branches and loops of code that is not captured as Python.

    A dispatch mode then sees the operators inside, and their backward is recorded operator by operator: torch's own
    cannot trace a branch under such a mode.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, or run its branches or steps."""
        given = kwargs or {}
        if isinstance(func, HigherOrderOperator) and func.__name__ in AS_PYTHON:
            with self:
                return OPERATORS[func.__name__](*args, *given.values())
        return func(*args, **given)
