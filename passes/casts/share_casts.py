"""Sum the gradients of all readers of one cast in fp32, including those of a full-precision reader.

Before: ``c = h.bfloat16()`` is read by q, k and v, whose gradients are summed in bf16. After:
``c0, c1, c2 = shared_cast(h, bfloat16, 3)``: one cast in forward, fp32 sums in backward.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from amp_graph.passes.base import Change, Pass
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.edit import give_value, take_over
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.meta_keys import CAST, GRAD
from amp_graph.passes.graph.node_info import nodes_inside
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.autograd import is_plain, leaves_to_torch
from amp_graph.passes.torch_compat.fake import concrete_size

own_functions(__name__)


class _SharedCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype, low: int, full: bool) -> tuple[torch.Tensor, ...]:
        ctx.full = full
        cast = x.to(dtype)
        copies = [cast, *[cast.view_as(cast) for _ in range(low - 1)]]
        return (x.view_as(x), *copies) if full else tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        given = [g for g in grads if g is not None]
        total: Any = given[0].float() if given else None
        if is_plain(*given):  # a plain sum, without in-place writes
            total = sum((g.float() for g in given[1:]), total)
        else:
            for grad in given[1:]:  # the first sum is fp32, and new memory
                total = total.add(grad) if total is given[0] else total.add_(grad)
        return total, None, None, None


def shared_cast(x: torch.Tensor, dtype: torch.dtype, low: int, full: bool) -> tuple[torch.Tensor, ...]:
    """Cast ``x`` (fp32) once for ``low`` readers in ``dtype``; with ``full``, ``x`` itself comes first.

    Returns one alias of the low-precision copy per reader. Backward sums the readers' gradients in fp32, as one cast
    per reader would; a plain shared cast would sum, and round, them in ``dtype``.
    """
    if not (torch.is_grad_enabled() and x.requires_grad) or leaves_to_torch(x):
        cast = x.to(dtype)
        return (x, *([cast] * low)) if full else (cast,) * low
    return _SharedCast.apply(x, dtype, low, full)


@dataclass(frozen=True)
class ShareCasts(Pass):
    """Replaces a cast with several readers by one ``shared_cast`` when gradients flow through it.

    Law: forward changes no bit; backward sums in fp32 instead of low precision. The gradient of a full-precision
    reader after the cast joins this sum in kernels that promote, without a cast. A small value is cast once for each
    reader instead, if the graph runs eagerly in calls; so is each value of a portable graph. Exactness:
    forward bit-exact, gradients rounding-equal to one cast per reader.
    """

    options: PipelineOptions

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Visit every inserted cast to low precision."""
        memory = observe(gm, marks(gm))
        for node in list(gm.graph.nodes):
            if CAST in node.meta and node.op == "call_method" and _is_trained(node, memory):
                full = [u for u in node.args[0].users if node < u and u.op != "output" and CAST not in u.meta]
                reads = sum(nodes_inside((user.args, user.kwargs)).count(node) for user in node.users)
                if reads + bool(full) > 1 and all(u.op != "output" for u in node.users):
                    readers = f"{reads} low and {len(full)} full readers"
                    if self._is_profitable(node):
                        _share(gm, node, reads, full)
                        yield Change(self.name, "shared", node.name, readers)
                    elif reads > 1:
                        _hand_out(node, _copies(gm, node))
                        yield Change(self.name, "one cast per reader", node.name, readers)

    def _is_profitable(self, cast: Node) -> bool:
        low, how = value(cast), self.options
        eager = how.eager and not how.in_step
        return not how.portable and sharing_a_cast_is_profitable(low.device.type, eager, concrete_size(low.numel()))


def _is_trained(cast: Node, memory: Memory) -> bool:
    """Say whether ``cast`` is a downcast with gradients, of a value that nothing writes."""
    source = cast.args[0]
    if not isinstance(source, Node) or source.op in ("placeholder", "get_attr") or memory.is_written(source):
        return False
    trained = is_trained(source) and cast.meta.get(GRAD, True)
    return trained and value(cast).dtype.itemsize < value(source).dtype.itemsize


def _share(gm: GraphModule, cast: Node, reads: int, full: list[Node]) -> None:
    source: Any = cast.args[0]
    low, wide = value(cast), value(source)
    with gm.graph.inserting_after(cast):
        shared = gm.graph.call_function(shared_cast, (source, low.dtype, reads, bool(full)))
    shared.meta = {k: v for k, v in cast.meta.items() if k != "example_value"}
    give_value(shared, ((wide,) if full else ()) + (low,) * reads)
    parts = _parts(gm, shared, cast)
    if full:
        alias = next(parts)
        for user in full:
            user.replace_input_with(source, alias)
    _hand_out(cast, parts)
    gm.graph.erase_node(cast)


def _hand_out(cast: Node, parts: Iterator[Node]) -> None:
    """Let each read of ``cast`` read the next of ``parts``."""
    pick = lambda n: next(parts) if n is cast else n  # noqa: E731
    for user in list(cast.users):
        user.args, user.kwargs = map_arg(user.args, pick), map_arg(user.kwargs, pick)


def _copies(gm: GraphModule, cast: Node) -> Iterator[Node]:
    """Yield ``cast``, and then more casts beside it: autograd sums the gradients of one for each reader in fp32."""
    yield cast
    while True:
        with gm.graph.inserting_after(cast):
            made = gm.graph.node_copy(cast)
        yield take_over(made, cast, value(cast), ())


def _parts(gm: GraphModule, shared: Node, cast: Node) -> Iterator[Node]:
    """Yield one node per part of ``shared``, in order."""
    last = shared
    for index, val in enumerate(value(shared)):
        with gm.graph.inserting_after(last):
            last = gm.graph.call_function(operator.getitem, (shared, index))
        yield take_over(last, cast, val, (CAST,))


# Elements of a value below which one cast per reader is faster than one that all readers share.
FEWEST_SHARED = 1 << 15


def sharing_a_cast_is_profitable(device: str, eager: bool, elements: int) -> bool:
    """Say whether several readers of a value of so many ``elements`` should share its cast, by a Python function.

    Its gradients are the same as with one cast per reader, which are C++ in torch. Time of the function over that of
    the casts, two and three readers: 1.2 to 1.4 up to 4,096 elements, 1.2 at 16,384, 1.15 at 32,768, 1.0 to 1.05 at
    131,072, 0.5 to 0.6 at 262,144. Each cast saves its result for backward, so the limit is lower than that of time. A
    compiler traces through the function. On CUDA each cast is a kernel; not timed.
    """
    return device != "cpu" or not eager or elements >= FEWEST_SHARED
