"""Recompute activations and norms in backward, where autograd would save them unnecessarily.

Before: ``h = gelu(a); y = linear(h, w, b)``, which saves ``a`` and ``h``.
After: ``h = gelu_computed_again(a); y = linear_computing_again(h, w, b)``, which saves only ``a``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, Skip
from amp_graph.passes.casts.low_layer_norm import layer_norm_low
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.call_arguments import BATCH_NORM_ARGUMENTS, RELUS, batch_norm_arguments
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import CHECKPOINT, REGION, SPARED
from amp_graph.passes.memory import recomputable_ops
from amp_graph.passes.memory.ops_with_recomputed_inputs import computing_again
from amp_graph.passes.memory.recomputable_ops import (
    batch_norm_computed_again,
    gelu_computed_again,
    layer_norm_computed_again,
    layer_norm_low_computed_again,
    relu_computed_again,
    relu_kept,
    silu_computed_again,
)
from amp_graph.passes.memory.saved_tensors import Readers, readers_of
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.registry import NO_TRAITS, traits_of
from amp_graph.passes.torch_compat.fake import numel

LAYER_NORM = torch.ops.aten.layer_norm.default
KINDS = {
    "aten.gelu": "gelu",
    "aten.silu": "silu",
    "aten.layer_norm": "layer norm",
    "aten.relu": "relu",
    "aten.relu_": "relu",
}
SUMS = (("aten.add",), ("aten.add_",))
# Picoseconds of a recomputation on a CPU with bf16 dot products: per call, autograd included, and per element. Calls of
# GELUs took as long as those of norms (120 us, on a shared machine); a smaller number is used, which saves memory in
# wide models. And per multiplication of a reader, for its result and both gradients.
COMPUTED = {
    "relu": (200_000_000, 450),
    "layer norm": (100_000_000, 720),
    "gelu": (40_000_000, 600),
    "gelu by tanh": (40_000_000, 2_400),
    "silu": (40_000_000, 600),
}
MULTIPLIED = 60
# Elements below which these are saved, except with recompute=all: half a MiB in low precision. Steps of CNNs of no size
# took 1.08 to 1.15 of autocast's time with relus computed again, 0.98 to 1.00 without; U-Nets with silu 0.98 to 1.05,
# and 0.91 to 0.94 (host_time.md). Transformers of no size, which have the other kinds, take 0.83 to 0.90 with them.
FEWEST_AGAIN = {"relu": 1 << 18, "silu": 1 << 18}
MOST_AGAIN = 0.15  # the largest share of its readers' time that a recomputation may take, except with recompute=all
LONGEST = 8  # relus in a row that are recomputed, each from the one before
# Elements that a GPU writes while Python runs one autograd.Function, about 0.1 ms: small steps wait for Python. With
# everything recomputed, converted transformers took 1.15 to 1.25 of the time on an H200 (batches of 8, widths of 384
# and 768). The graph of a whole step has no such calls: it took 0.92 to 1.06 of the time.
FEWEST_BESIDE_PYTHON = 1 << 24


@dataclass(frozen=True)
class RecomputeActivations(Pass):
    """Replaces an activation or a norm, and the matmuls and pools that read it, with ones that do not save it.

    Law: the value's operation saves what the value is computed from anyway (a GELU, SiLU or layer norm its input; a
    batch norm with a relu behind it, its input and statistics), no reader that is not replaced saves the value, and
    nothing writes to it. Only in training, outside of checkpoints and of the user's own autocast. Exactness: bit-exact:
    backward runs the same kernel on the same bits, and reuses the statistics of batch norms. Cost: that kernel a second
    time, which may be a small part of its readers', see ``MOST_AGAIN``; ``recompute=all`` has no such limit.
    """

    options: PipelineOptions

    def rewrite(self, gm: GraphModule) -> Iterator[Change | Skip]:
        """Visit every activation and norm, in order."""
        work = _Work(self.options, observe(gm, marks(gm)))
        for node in list(gm.graph.nodes):
            if node.target is relu_computed_again or (traits_of(node.target).kind == "relu" and _is_recomputed(node)):
                work.note(node)
            elif kind := _kind(node):
                yield from work.visit(node, kind)


@dataclass
class _Work:
    """Which values are recomputed so far, and from how many others in a row."""

    options: PipelineOptions
    memory: Memory
    depths: dict[Node, int] = field(default_factory=dict)

    def visit(self, node: Node, kind: str) -> Iterator[Change | Skip]:
        """Make one value recomputable if the law allows it and it is profitable."""
        made = self._makers(_before(node)) if kind == "relu" and not traits_of(node.target).norm else ()
        if made is None:
            return
        found = readers_of(node)
        if not found.readers:
            return
        reason = self._why_not(node, kind, found)
        if reason:
            yield Skip(node.name, reason)
            return
        for one in made:
            _replace(one, relu_kept)
        _replace(node, relu_computed_again)
        for reader in found.readers:
            target: Any = reader.target
            reader.target = computing_again(target)
        if kind == "relu":
            self.note(node)
        node.meta[SPARED] = numel(value(node)) * value(found.readers[0]).dtype.itemsize
        names = ", ".join(r.name for r in found.readers)
        yield Change(RecomputeActivations.name, "recomputes", node.name, f"{kind} is not saved for {names}")

    def note(self, relu: Node) -> None:
        """Record that a relu is recomputed: others may be computed from it."""
        self.depths[relu] = self._depth(relu)

    def _why_not(self, node: Node, kind: str, found: Readers) -> str:
        if found.reason:
            return found.reason
        if self.memory.written_after(node):
            return "it is written to later"
        if self.options.recompute != "all":
            if self.options.accuracy != "fast" and (kind == "layer norm" or _cost(node, kind) == "gelu by tanh"):
                return f"recomputing a {kind} takes more time than its memory is worth; recompute=all recomputes it"
            if self._takes_time(node, kind, found.products):
                return "its readers take too little time to hide a recomputation; recompute=all recomputes it as well"
        if kind == "relu" and self._depth(node) > LONGEST:
            return f"the {LONGEST} before it are recomputed already"
        return ""

    def _takes_time(self, node: Node, kind: str, products: float) -> bool:
        elements = numel(value(node))
        calls_are_seen = self.options.planned_for != "cpu" and not self.options.in_step
        return (calls_are_seen and elements < FEWEST_BESIDE_PYTHON) or is_seen(_cost(node, kind), products, elements)

    def _depth(self, node: Any) -> int:
        """Return how many relus in a row must be computed for that of ``node``, itself included."""
        stack, deepest = [_before(node)], 0
        while stack:
            one = stack.pop()
            if names_of(one) in SUMS:
                stack += one.args[:2]
            deepest = max(deepest, self.depths.get(one, 0))
        return deepest + 1

    def _makers(self, source: Any) -> tuple[Node, ...] | None:
        """Return the norms and saved relus from which a relu's input is computed; None if anything else contributes."""
        if not isinstance(source, Node) or REGION in source.meta or CHECKPOINT in source.meta:
            return None
        if source.target is batch_norm_computed_again or traits_of(source.target).norm or _is_batch_norm(source):
            return (source,)
        if source in self.depths:
            return ()
        if (traits_of(source.target).summand is not None or names_of(source) in RELUS) and is_trained(source):
            return (source,)
        if names_of(source) not in SUMS or len(source.args) != 2 or source.kwargs:
            return None
        parts = [self._makers(p) if _dtype(p) == _dtype(source) else None for p in source.args]
        return None if None in parts else tuple(dict.fromkeys(m for part in parts if part for m in part))


def is_seen(kind: str, products: float, elements: int) -> bool:
    """Say whether recomputing ``elements`` of ``kind`` takes a large part of the time of its readers' ``products``."""
    call, element = COMPUTED[kind]
    is_small = elements < FEWEST_AGAIN.get(kind, 0)
    return is_small or call + elements * element > MOST_AGAIN * elements * products * MULTIPLIED


def _kind(node: Node) -> str:
    """Return the kind of value that ``node`` makes; "" if it is not recomputable."""
    names, declared = names_of(node), traits_of(node.target).kind
    kind = declared or (KINDS.get(names[0], "") if len(names) == 1 else "")
    if not kind or _is_recomputed(node) or not is_trained(node):
        return ""
    if REGION in node.meta or CHECKPOINT in node.meta:  # these affect what is saved, or computed
        return ""
    return kind if (node.op == "call_function" or kind == "relu") and node.args else ""


def _is_recomputed(node: Node) -> bool:
    """Say whether ``node`` already calls a function whose value is recomputed."""
    known = traits_of(node.target)
    ours = getattr(node.target, "__module__", "") == recomputable_ops.__name__
    return ours or (known is not NO_TRAITS and known.replacement is None)


def _before(relu: Node) -> Any:
    """Return what a relu reads; for one that is fused with a norm and a sum, what is added to the norm."""
    return relu.args[traits_of(relu.target).summand or 0]


def _dtype(node: Any) -> torch.dtype | None:
    return value(node).dtype if isinstance(node, Node) else None


def _cost(node: Node, kind: str) -> str:
    by_tanh = kind == "gelu" and "tanh" in (*node.args[1:], *node.kwargs.values())
    return "gelu by tanh" if by_tanh else kind


def _is_batch_norm(node: Node) -> bool:
    """Say whether ``node`` is a batch norm by the CPU kernel, in training and with fp32 parameters."""
    if node.target is not F.batch_norm or names_of(node) != ("aten.batch_norm",) or not is_trained(node):
        return False
    given = batch_norm_arguments(node)
    parameters = [given["weight"], given["bias"]]
    full = all(isinstance(p, Node) and value(p).dtype == torch.float32 for p in parameters)
    return full and value(node).device.type == "cpu"


def _replace(node: Node, relu: Any) -> None:
    """Let ``node`` call the function with a recomputed value; for a relu, ``relu``."""
    if _is_recomputed(node):
        return
    known = traits_of(node.target)
    if known.replacement is not None:
        node.target = known.keeps if known.keeps is not None and relu is relu_kept else known.replacement
        return
    kind = KINDS.get(names_of(node)[0], "batch norm")
    if kind == "relu":
        function, args = relu, (node.args[0], names_of(node) == ("aten.relu_",))
    else:
        function, arguments = COMPUTED_AGAIN["low layer norm" if node.target is layer_norm_low else kind]
        args = arguments(node)
    node.op, node.target, node.args, node.kwargs = "call_function", function, args, {}


def _of_layer_norm(node: Node) -> tuple[Any, ...]:
    given = node_info.schema_arguments(LAYER_NORM, node.args, dict(node.kwargs))
    return tuple(given[name] for name in ("input", "normalized_shape", "weight", "bias", "eps"))


# By kind, the function with a recomputed value, and its arguments, read off a call.
COMPUTED_AGAIN: dict[str, tuple[Callable[..., Any], Callable[[Node], tuple[Any, ...]]]] = {
    "gelu": (gelu_computed_again, lambda node: (node.args[0], *node.kwargs.values())),  # its form is a keyword
    "silu": (silu_computed_again, lambda node: node.args[:1]),
    "layer norm": (layer_norm_computed_again, _of_layer_norm),
    "low layer norm": (layer_norm_low_computed_again, _of_layer_norm),
    "batch norm": (
        batch_norm_computed_again,
        lambda node: tuple(batch_norm_arguments(node)[name] for name in BATCH_NORM_ARGUMENTS),
    ),
}
