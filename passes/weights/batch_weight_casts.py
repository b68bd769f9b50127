"""Batch the casts of many parameters into few calls.

Before: ``a = w1.bfloat16(); b = w2.bfloat16()``, one kernel and one autograd node each. After: ``low =
low_weights((w1, w2), torch.bfloat16, formats); a, b = low``: one kernel for all, and one for their gradients. Only on
devices where a call costs more than a cast: GPUs.
Source of the kernels: aten/src/ATen/native/cuda/ForeachBinaryOpList.cu.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.fake_values import captured, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.meta_keys import CHECKPOINT, REGION
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.dispatch import is_batched, is_wrapper
from amp_graph.passes.torch_compat.operators import foreach_copy_
from amp_graph.passes.torch_compat.storage import bytes_of
from amp_graph.passes.weights.cast_weights import casts_of_parameters

own_functions(__name__)

# Casts: one call for fewer takes the host as long, because with gradients it is an autograd node written in Python.
# Estimated from a CPU's times without the copies, forward and backward: 15 us a cast and 60 us + 15 us a cast of a
# group, plus 4 us for each launch. Time over that of the casts alone: 6 casts 1.07, 8 casts 0.96, 12 casts 0.88.
LEAST, LEAST_TRAINED = 3, 8
# Bytes of weights per group: a group upcasts and returns none of its gradients before the last one has arrived, and its
# low-precision gradients, half of these bytes, wait. Several processes, which all-reduce gradients as they arrive, have
# no groups.
MOST = 256 << 20


@dataclass(frozen=True)
class BatchWeightCasts(Pass):
    """Casts parameters together, and in backward their gradients, when it is profitable.

    Law: the graph neither writes to these parameters, nor returns a cast, nor switches gradients on or off; the members
    of a group get gradients from the same outputs. Exactness: bit-exact, gradients included. In backward, a group's
    gradients become available only when its last one does.
    """

    options: PipelineOptions

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Visit every inserted cast of a parameter."""
        if not few_calls_are_profitable(self.options.device) or any(_switches_gradients(n) for n in gm.graph.nodes):
            return
        may: dict[torch.device, list[Node]] = {}
        for node, reason in casts_of_parameters(gm, self.options.dtype):
            if not reason and _fits(node):
                may.setdefault(value(node).device, []).append(node)
        reached = outputs_reached(gm, observe(gm, marks(gm))) if may and torch.is_grad_enabled() else {}
        for together in chain.from_iterable(_in_groups(on_one_device, reached) for on_one_device in may.values()):
            trains = torch.is_grad_enabled() and any(map(is_trained, together))
            if len(together) >= (LEAST_TRAINED if trains else LEAST):
                self._group(gm, together)
                told = f"with {len(together) - 1} others"
                yield from (Change(self.name, "grouped", n.name, told) for n in together)

    def _group(self, gm: GraphModule, together: list[Node]) -> None:
        formats = tuple(n.kwargs.get("memory_format") for n in together)
        with gm.graph.inserting_before(together[0]):
            made = gm.graph.call_function(
                low_weights, (tuple(n.args[0] for n in together), self.options.dtype, formats)
            )
        made.meta["val"] = tuple(value(n) for n in together)
        for i, node in enumerate(together):
            node.op, node.target = "call_function", low_weight
            node.args, node.kwargs = (node.args[0], made, i), {}


def _in_groups(casts: list[Node], reached: Mapping[Node, int]) -> Iterator[list[Node]]:
    """Yield groups of casts on one device: without gradients all; else frozen and trained apart, of at most ``MOST``.

    Weights that get gradients from different outputs are in different groups: one might get none, and its hooks would
    be called with None.
    """
    if not torch.is_grad_enabled():
        yield casts
        return
    weights: dict[Node, Any] = {node: captured(node.all_input_nodes[0]) for node in casts}
    yield [n for n in casts if not weights[n].requires_grad]
    trained = [n for n in casts if weights[n].requires_grad]
    for outputs in () if has_process_group() else sorted({reached[n] for n in trained} - {0}):
        group: list[Node] = []
        for node in [n for n in trained if reached[n] == outputs]:
            if group and sum(bytes_of(weights[n]) for n in (*group, node)) > MOST:
                yield group
                group = []
            group.append(node)
        yield group


def has_process_group() -> bool:
    """Say whether several processes may train the model together, which all-reduce gradients as these appear."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def outputs_reached(gm: GraphModule, memory: Memory) -> dict[Node, int]:
    """Return for each node the set of graph outputs that hand it gradients, as a bit mask."""
    sharing: dict[int, list[Node]] = {}
    for node, keys in memory.storages.items():
        for key in keys:
            sharing.setdefault(key, []).append(node)
    found: dict[Node, int] = {}
    for i, given in enumerate(gm.graph.output_node().all_input_nodes):
        found[given] = 1 << i
    for node in reversed(gm.graph.nodes):
        readers = set(node.users)
        for key in memory.storages[node]:
            if memory.order[node] in memory.writers.get(key, ()):  # what it wrote is also read under other names
                readers.update(u for n in sharing[key] for u in n.users if node < u)
        bits = found.get(node, 0) | functools.reduce(operator.or_, (found[u] for u in readers if u.op != "output"), 0)
        found[node] = bits if is_trained(node) else 0
    return found


def _fits(cast: Node) -> bool:
    """Say whether ``cast`` may run as soon as its parameter exists, and changes only precision and layout."""
    elsewhere = not {REGION, CHECKPOINT}.isdisjoint(cast.meta) or is_wrapper(captured(cast.all_input_nodes[0]))
    return not elsewhere and set(cast.kwargs) <= {"memory_format"}


def _switches_gradients(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "_set_grad_enabled"


def low_weight(weight: Tensor, group: Sequence[Tensor], place: int) -> Tensor:
    """Return the cast of ``weight`` from a group; the call names the weight in printed graphs."""
    return group[place]


def low_weights(weights: Sequence[Tensor], dtype: torch.dtype, formats: Sequence[Any]) -> Any:
    """Cast ``weights`` to ``dtype``, each into its format, where that is not None; all train, or none does."""
    if torch.is_grad_enabled() and weights[0].requires_grad:
        return _LowWeights.apply(dtype, formats, *weights)
    return _cast(weights, dtype, formats)


def _cast(weights: Sequence[Tensor], dtype: torch.dtype, formats: Sequence[Any]) -> list[Tensor]:
    low = [
        torch.empty_like(w, dtype=dtype, requires_grad=False, **({} if f is None else {"memory_format": f}))
        for w, f in zip(weights, formats, strict=True)
    ]
    return _copy_all(low, weights)


class _LowWeights(torch.autograd.Function):
    """One cast of several weights, and of their gradients back."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, formats: Sequence[Any], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.weights = weights  # for their layout only
        return tuple(_cast(weights, dtype, formats))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        given = [g for g in grads if g is not None]
        if not given or torch.is_grad_enabled() or any(map(is_batched, given)):
            wide = [None if g is None else g.to(w.dtype) for g, w in zip(grads, ctx.weights, strict=True)]
            return None, None, *wide
        pairs = zip(ctx.weights, grads, strict=True)
        rest = iter(_copy_all([torch.empty_like(w, requires_grad=False) for w, g in pairs if g is not None], given))
        return None, None, *(None if g is None else next(rest) for g in grads)


def _copy_all(into: list[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Copy each of ``given`` into its destination: one call for those of equal layout, and one for the others.

    torch compares all strides, also of dimensions of size 1, as those of a 1 x 1 convolution in channels_last.
    """
    alike: tuple[list[Tensor], list[Tensor]] = ([], [])
    others: tuple[list[Tensor], list[Tensor]] = ([], [])
    for a, b in zip(into, given, strict=True):
        same = all(x == y for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size != 1)
        first, second = alike if same else others
        first.append(a)
        second.append(b.as_strided(b.shape, a.stride()) if same and a.stride() != b.stride() else b)
    for part in (alike, others):
        if part[0]:
            foreach_copy_(*part)
    return into


def few_calls_are_profitable(device: str) -> bool:
    """Say whether one call for many small tensors beats one call for each.

    H200: the cast of a weight takes 2 us on the GPU and 16 to 24 us on the host; the casts are a quarter of the time
    of a GPT's token.
    """
    return device == "cuda"
