"""Two flat graphs of ATen calls for a captured graph and its backward, which need no autograd to run.

Before: the rewritten GraphModule, which runs under autograd. After: ``Flat.forward``, which returns the outputs and the
values that backward reads, and ``Flat.backward``, which takes those and the outputs' gradients.

The trace keeps the operations as they are (no functionalization, no decompositions), so the kernels are those that
autograd would run, in its order. Each edge of autograd's graph that leads to an argument has a gradient of its own
(``argument_edges``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from amp_graph.passes.casts.product_precision import Lost
from amp_graph.passes.graph.direct_dispatch import direct_calls
from amp_graph.passes.graph.node_info import draws, schema_arguments
from amp_graph.passes.torch_compat.dispatch import OpOverload

# The strides of the gradient that each differentiable output receives; None for an output that receives none.
Pattern = tuple[tuple[int, ...] | None, ...]


class CannotBeFlat(Exception):
    """A graph cannot be traced flat, or must not be; the text is the reason."""


@dataclass(frozen=True)
class Output:
    """One output of the captured graph: a new tensor (``place`` in the flat forward's results), or something given.

    ``passed``: the number of the argument that is returned as it is. ``constant``: what is returned if both are None.
    """

    place: int | None = None
    passed: int | None = None
    constant: Any = None
    has_gradient: bool = False


def is_draw(node: Node) -> bool:
    """Say whether a node of a flat graph draws random numbers."""
    if not isinstance(node.target, OpOverload):
        return False
    return draws(node.target, schema_arguments(node.target, node.args, dict(node.kwargs)))


@dataclass
class Flat:
    """Two flat graphs, and how they connect to the captured graph's arguments and outputs.

    tensors: the arguments that forward takes, all that are tensors. made: how many new tensors it returns, in front of
    the saved values. routes: the argument that each gradient of backward belongs to. kept: the arguments that backward
    takes, in front of the saved values and the outputs' gradients. written: the arguments that are written to.
    uncounted: those of them whose version counter the write does not move, as of a batch norm's statistics.
    lost: the products that run in another precision than planned.
    """

    tensors: tuple[int, ...]
    outputs: tuple[Output, ...]
    made: int
    routes: tuple[int, ...]
    written: frozenset[int]
    forward: GraphModule
    backward: GraphModule | None
    saved: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()
    pattern: Pattern = ()
    uncounted: frozenset[int] = frozenset()
    lost: tuple[Lost, ...] = ()
    run_forward: Callable[..., Any] = field(init=False, repr=False)
    run_backward: Callable[..., Any] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        """Bind the operators of both graphs."""
        self.run_forward = direct_calls(self.forward)
        if self.backward is not None:
            self.run_backward = direct_calls(self.backward)

    @functools.cached_property
    def unwritten(self) -> tuple[int, ...]:
        """The arguments that nothing writes to."""
        return tuple(i for i in self.tensors if i not in self.written)

    @functools.cached_property
    def draws(self) -> bool:
        """Whether forward draws random numbers."""
        return any(map(is_draw, self.forward.graph.nodes))

    @functools.cached_property
    def with_gradient(self) -> tuple[int, ...]:
        """The places, in forward's results, of the outputs that have a gradient."""
        found = dict.fromkeys(o.place for o in self.outputs if o.place is not None and o.has_gradient)
        return tuple(found)
