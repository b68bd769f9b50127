"""The graphs inside of a graph: the bodies of ``cond``, ``scan``, ``while_loop`` and other higher-order operators.

Before: ``cond(pred, true, false, (x,))`` in module ``mixer``. After: ``bodies_of(gm)`` yields the graphs of ``true``
and ``false``, and each knows its place, such as ``mixer.cond/0/``, whatever Dynamo calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from amp_graph.passes.graph.meta_keys import INSIDE
from amp_graph.passes.graph.node_info import is_higher_order, module_path
from amp_graph.passes.torch_compat.dispatch import HigherOrderOperator


@dataclass(frozen=True, eq=False)
class Body:
    """A graph, and its ``name`` in the graph around it."""

    name: str
    graph: GraphModule


def graph_read(gm: GraphModule, node: Node) -> GraphModule | None:
    """Return the graph that ``node`` reads, an operand of a higher-order operator; None if it reads none."""
    found = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
    return found if isinstance(found, GraphModule) else None


def bodies_of(gm: GraphModule) -> Iterator[Body]:
    """Yield each graph that an operator of ``REWRITTEN`` runs once, and write its place into its metadata."""
    outer, calls, seen = gm.meta.get(INSIDE, ""), Counter[str](), set[str]()
    for node in gm.graph.nodes:
        if not is_higher_order(node) or getattr(node.target, "__name__", "") not in REWRITTEN:
            continue
        place = ".".join(filter(None, (module_path(node), node.target.__name__)))
        number, position = calls[place], 0
        calls[place] += 1
        for source in node.all_input_nodes:
            graph = graph_read(gm, source)
            if graph is None:
                continue
            if str(source.target) not in seen:
                seen.add(str(source.target))
                graph.meta[INSIDE] = f"{outer}{place}{f'.{number}' if number else ''}/{position}/"
                yield Body(str(source.target), graph)
            position += 1


# -- as Python ----------------------------------------------------------------------------------------------
# Semantics: torch._higher_order_ops of torch 2.11 to 2.14, as Dynamo captures them, with dimension 0 first.

Runs = Callable[..., Any]  # runs a body


def _while_loop(goes_on: Runs, body: Runs, carried: Sequence[Any], more: Sequence[Any] = ()) -> Any:
    carried = tuple(carried)
    while bool(_only(goes_on(*carried, *more))):
        carried = tuple(body(*carried, *more))
    return carried


def _only(found: Any) -> Any:
    return found[0] if isinstance(found, (tuple, list)) else found


def _scan(body: Runs, init: Sequence[Any], xs: Sequence[Any], more: Sequence[Any] = ()) -> Any:
    carried, rows = list(init), list[list[Any]]()
    for i in range(len(xs[0])):
        found = list(body(*carried, *(x[i] for x in xs), *more))
        carried, row = found[: len(init)], found[len(init) :]
        rows.append(row)
    return [*carried, *map(_stacked, zip(*rows, strict=True))]


def _map(body: Runs, xs: Sequence[Any], more: Sequence[Any] = ()) -> Any:
    rows = [body(*(x[i] for x in xs), *more) for i in range(len(xs[0]))]
    return tuple(map(_stacked, zip(*rows, strict=True)))


def _stacked(rows: Sequence[Any]) -> Any:
    return None if rows[0] is None else torch.stack(tuple(rows))


# Run as Python, so that each run of a body can be observed and differentiated: ``scan(body, (init,), (xs,), (w,))`` is
# ``body(init, xs[0], w)``, ``body(carry, xs[1], w)``, and so on, with the same results.
OPERATORS: Mapping[str, Callable[..., Any]] = {
    "cond": lambda chosen, true, false, operands=(): (true if bool(chosen) else false)(*operands),
    "while_loop": _while_loop, "scan": _scan, "map_impl": _map,
    **dict.fromkeys(("wrap", "tag_activation_checkpoint"), lambda body, *operands: body(*operands)),
    "invoke_subgraph": lambda body, identifier, *operands: body(*operands),
}  # fmt: skip
REWRITTEN = frozenset(OPERATORS)  # the bodies of these operators are rewritten; those of others stay as captured
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
