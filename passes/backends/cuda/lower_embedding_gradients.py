"""Compute the gradient of an embedding table in one write, from gradients in low precision where they are.

Before: ``x = embedding(ids, table)``, and ``linear(h, table.bfloat16())``.
After: ``x, low = tied_rows(table, ids, ...)``, and ``linear(h, low)``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cuda.embedding_functions import low_rows, tied_rows
from amp_graph.passes.backends.cuda.kernels import embedding_gradient as _kernel  # noqa: F401  registers it
from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.graph.activation_checkpoints import place_of
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.edit import OWN, take_over
from amp_graph.passes.graph.fake_values import captured, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.meta_keys import CAST, MARK, REGION, TRANSFORM
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.memory.reuse_embedding_gradients import SIGNATURES, plain_arguments
from amp_graph.passes.native.kernel_table import load_kernel
from amp_graph.passes.native.run_compiler import CompilerError
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.profitability.cuda_kernel_thresholds import (
    bytes_of_embedding_gradient,
    embedding_kernel_is_profitable,
)
from amp_graph.passes.torch_compat.fake import concrete_size, numel

LEFT_BEHIND = (*OWN, CAST)  # the rest of a node's meta is copied to its replacement


@dataclass(frozen=True)
class Found:
    """An embedding in training. cast: its result in low precision, if nothing reads it otherwise.

    tied: the table in low precision, for products, if the embedding makes that as well.
    """

    node: Node
    arguments: dict[str, Any]
    cast: Node | None
    tied: Node | None

    @property
    def result(self) -> Node:
        """The node whose value is made."""
        return self.node if self.cast is None else self.cast

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of indices, the rows of the table, and their width."""
        rows, width = (concrete_size(n) for n in value(self.arguments["weight"]).shape)
        return concrete_size(numel(value(self.arguments["input"]))), rows, width

    def told(self) -> str:
        """Describe what is one write."""
        ids, rows, width = self.sizes
        also = ", added to that of the product that reads the table" if self.tied is not None else ""
        return f"the gradient of {rows} x {width} from {ids} indices in one write{also}"


@dataclass(frozen=True)
class LowerEmbeddingGradients(Pass):
    """Replaces ``embedding`` or ``embedding_bag`` with ``low_rows`` or ``tied_rows``, whose backward is one kernel.

    Law: an fp32 parameter's table, dense gradients that are plain sums of rows, on CUDA, where Triton runs. A cast of
    the result joins in if it is the only reader. So does the cast of the table to low precision, which products read
    after the embedding (tied weights): the sum of both gradients is not made in a second table. Profitable by the bytes
    that it spares. Exactness: forward bit-exact,
    gradients rounding-equal: fp32 sums in the order of the indices.
    """

    device: str  # that the graph is planned for
    name: ClassVar[str] = "lower-embedding-gradients"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every embedding that trains."""
        reading = [node for node in gm.graph.nodes if _reads_table(node, self.device)]
        if not reading:
            return PassResult(gm)
        memory = observe(gm, marks(gm))
        changes, skips, tied = [], [], set[Node]()
        for node in reading:
            arguments = plain_arguments(node)
            if arguments is None:
                skips.append(Skip(node.name, "its gradient is not a plain sum of rows, or is scaled by frequency"))
                continue
            weight = arguments["weight"]
            found = Found(node, arguments, _cast(node), None if weight in tied else _tied(node, weight, memory))
            reason = self._why_not(found, memory)
            if reason:
                skips.append(Skip(node.name, reason))
                continue
            tied |= {weight} if found.tied is not None else set()
            told = found.told()
            changes.append(Change(self.name, "one write", _rewrite(gm, found).name, told))
        return PassResult(gm, tuple(changes), tuple(skips))

    def _why_not(self, found: Found, memory: Memory) -> str:
        """Return why the embedding stays torch's, or ""."""
        if memory.is_written(found.arguments["weight"]) or any(map(memory.is_written, {found.node, found.result})):
            return "the table or the result is written in place"
        spared = bytes_of_embedding_gradient(*found.sizes, found.cast is not None, found.tied is not None)
        if not embedding_kernel_is_profitable(self.device, spared):
            ids, rows, width = found.sizes
            return f"torch's is as fast for {ids} indices of {rows} x {width}: {spared / 2**20:.1f} MB would be spared"
        try:
            load_kernel(f"embedding_gradient on {self.device}", value(found.result).dtype)
        except CompilerError as error:
            return str(error).partition("\n")[0]
        return ""


def _reads_table(node: Node, planned_for: str) -> bool:
    """Say whether ``node`` is an embedding in training that reads a parameter on CUDA directly."""
    if node.op != "call_function" or node.target not in SIGNATURES or not {REGION, TRANSFORM}.isdisjoint(node.meta):
        return False
    weight = SIGNATURES[node.target].bind(*node.args, **node.kwargs).arguments["weight"]
    if not is_trained(node) or not isinstance(weight, Node) or weight.op != "placeholder":
        return False
    table = captured(weight)
    if not isinstance(table, torch.nn.Parameter) or not table.requires_grad or table.dim() != 2:
        return False
    device = planned_for if table.device.type == "cpu" else table.device.type
    return device == "cuda" and table.dtype == torch.float32 and table.is_contiguous()


def _is_cast(node: Node) -> bool:
    """Say whether ``node`` is an inserted cast to low precision."""
    return CAST in node.meta and node.op == "call_method" and value(node).dtype in HALVES


def _cast(node: Node) -> Node | None:
    """Return the cast that alone reads ``node``."""
    (reader, *others) = list(node.users) or [node]
    return reader if not others and _is_cast(reader) and place_of(reader) == place_of(node) else None


def _tied(node: Node, weight: Node, memory: Memory) -> Node | None:
    """Return the cast of ``weight`` to low precision that stands after ``node``."""
    casts = [user for user in weight.users if user.args[:1] == (weight,) and _is_cast(user) and is_trained(user)]
    fits = len(casts) == 1 and node < casts[0] and place_of(casts[0]) == place_of(node)
    return casts[0] if fits and not memory.is_written(casts[0]) and REGION not in casts[0].meta else None


def _rewrite(gm: GraphModule, found: Found) -> Node:
    """Replace all that was found with one call; return it."""
    node, result, tied = found.node, found.result, found.tied
    names = ("weight", "input", "padding_idx")
    given = (*(found.arguments[name] for name in names), node.target is F.embedding_bag, value(result).dtype)
    with gm.graph.inserting_after(node):
        if tied is None:
            made = gm.graph.call_function(low_rows, given)
        else:
            made = gm.graph.call_function(tied_rows, (*given, value(tied).dtype))
    last, likes = made, [result] if tied is None else [result, tied]
    take_over(made, result, value(result) if tied is None else (value(result), value(tied)), LEFT_BEHIND)
    if MARK in result.meta:
        made.meta[MARK] = node.meta.get(MARK, result.meta[MARK])
    for index, like in enumerate(likes):
        if tied is not None:
            with gm.graph.inserting_after(last):
                last = gm.graph.call_function(operator.getitem, (made, index))
            take_over(last, like, value(like), LEFT_BEHIND)
        like.replace_all_uses_with(last)
        gm.graph.erase_node(like)
    if node is not result:
        gm.graph.erase_node(node)
    return made
