"""Custom ``autograd.Function``s in a captured graph that runs eagerly: one class per call site.

Before: ``autograd_function_apply(forward, backward, x)``, for which torch creates a class in every call, interprets
both bodies, and saves tensors in the class, where they stay until garbage collection, as classes are reference cycles.
After: ``custom_function(x)``, which saves tensors as the user's function did, until backward has read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.graph import node_info
from amp_graph.passes.torch_compat.autograd import autograd_function_apply
from amp_graph.passes.torch_compat.dispatch import SET_GRAD, in_transform


def call_custom_functions(gm: GraphModule) -> None:
    """Make ``gm`` call each custom function without creating its class again. Exactness: bit-exact."""
    for node in list(gm.graph.nodes):
        bodies = bodies_of(gm, node)
        if bodies is None or node.kwargs.get("dirty_idx"):  # torch runs functions that write to their inputs
            continue
        for body in bodies:
            follow_grad_mode(body)
        node.target, node.args, node.kwargs = _callable(*bodies, dict(node.kwargs)), node.args[2:], {}
    drop_bodies(gm)


def drop_bodies(gm: GraphModule) -> None:
    """Remove the bodies of custom functions that nothing calls any more."""
    for node in list(gm.graph.find_nodes(op="get_attr")):
        if not node.users and isinstance(getattr(gm, str(node.target), None), GraphModule):
            gm.graph.erase_node(node)
            delattr(gm, str(node.target))


def bodies_of(gm: GraphModule, node: Node) -> tuple[GraphModule, GraphModule] | None:
    """Return the two bodies of a custom function; None for any other node."""
    is_custom = node_info.is_higher_order(node) and getattr(node.target, "__name__", "") == "autograd_function_apply"
    names = node.args[:2] if is_custom else ()
    found = [getattr(gm, str(name.target), None) for name in names if isinstance(name, Node)]
    if len(found) != 2 or not all(isinstance(body, GraphModule) for body in found):
        return None
    return found[0], found[1]  # type: ignore[return-value]


def follow_grad_mode(body: GraphModule) -> None:
    """Make ``body``, which was traced without gradients, run in the caller's grad mode, as the user's code does.

    With ``create_graph=True``, backward runs with gradients enabled, for a second derivative.
    """
    calls = [n for n in body.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    ends = [n for n in (calls[0], calls[-1]) if n.target is SET_GRAD] if len(calls) > 1 else []
    if [n.args[0] for n in ends] == [False, True]:
        for node in ends:
            body.graph.erase_node(node)
        body.recompile()


def _callable(forward: GraphModule, backward: GraphModule, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return a differentiable function with the given forward and backward.

    ``forward`` returns results and saved values; ``backward`` takes the results' gradients and the saved values.
    """
    made = _function_class(forward.forward, backward.forward, **kwargs)

    def custom_function(*args: Any) -> Any:
        if in_transform():
            return autograd_function_apply(forward, backward, *args, **kwargs)
        return made.apply(*args)

    return custom_function


def _function_class(
    ahead: Callable[..., Any],
    back: Callable[..., Any],
    non_differentiable_idx: Sequence[int],
    saved_for_backward_idx: Sequence[int],
    dirty_idx: Sequence[int] = (),
) -> Any:
    """Return the ``autograd.Function`` subclass.

    non_differentiable_idx: the results without a gradient. saved_for_backward_idx: the saved values that the user's
    function passed to ``save_for_backward``; it stored the others on its context.
    """

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results, saved = ahead(*args)
            ctx.others = list(saved)
            given = [i for i in saved_for_backward_idx if isinstance(saved[i], Tensor)]
            ctx.save_for_backward(*(saved[i] for i in given))
            for i in given:
                ctx.others[i] = None
            ctx.given = given
            if non_differentiable_idx:
                parts = results if isinstance(results, (tuple, list)) else (results,)
                ctx.mark_non_differentiable(*(parts[i] for i in non_differentiable_idx))
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved = list(ctx.others)
            for i, tensor in zip(ctx.given, ctx.saved_tensors, strict=True):
                saved[i] = tensor
            return back(*grads, *saved)

    return Custom
