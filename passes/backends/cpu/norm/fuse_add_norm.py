"""Fuse a residual sum, the following layer norm and the casts of both into one pass over memory, and one in backward.

Before: ``s = branch + x; n = layer_norm(s, ...); c = n.bfloat16()``, whose gradients are upcast, sent back through the
norm, added to those of ``s`` and cast for the branch.
After: ``s, c = add_norm(x, branch, ...)``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.norm import add_norm_recompute  # noqa: F401  declares how norms are computed again
from amp_graph.passes.backends.cpu.norm.add_norm_functions import add_norm
from amp_graph.passes.backends.cpu.norm.choose_norm_kernel import is_large, why_no_kernel
from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.casts.low_layer_norm import layer_norm_low
from amp_graph.passes.casts.shared_cast import shared_cast
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.activation_checkpoints import place_of
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.edit import OWN, take_over
from amp_graph.passes.graph.fake_values import captured, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import CAPTURED, CAST, MARK, REGION
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.symbolic_sizes import same

LAYER_NORM, RMS_NORM = torch.ops.aten.layer_norm.default, torch.ops.aten.rms_norm.default
NORMS: dict[Any, OpOverload] = {
    **dict.fromkeys((F.layer_norm, torch.layer_norm, layer_norm_low), LAYER_NORM),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), RMS_NORM),
}
LEFT_BEHIND = (*OWN, CAST)  # the rest of a node's meta is copied to its replacement


@dataclass(frozen=True)
class FuseAddNorm(Pass):
    """Replaces ``layer_norm(x + branch)`` or ``rms_norm`` in fp32, and the casts of its result, with one ``add_norm``.

    Law: the norm's input is fp32, on the CPU, and a low-precision branch is added to it, or the norm is cast to low
    precision; or the input is low precision, of an RMS norm, which torch computes with two casts, or of a layer norm
    that trains. Nothing writes to sum or norm; all is in one checkpoint, and in no region of the user's. Without a sum
    of its own, other readers of the norm's input join in, so that gradients meet in the kernel. Exactness:
    rounding-different; the sum is bit-exact, norm and gradients are fp32 inside and rounded once, at most in the last
    place from torch's fp32 norm and cast. Only where C can be compiled, or on CUDA Triton runs, and above a profitable
    size.
    """

    device: str = "cpu"  # that the graph is planned for
    name: ClassVar[str] = "fuse-add-norm"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every layer norm and RMS norm, in order."""
        memory = observe(gm, marks(gm))
        changes, skips = [], []
        for node in list(gm.graph.nodes):
            found = _found(node, self.device)
            if found is None:
                continue
            reason = _why_not(found, memory) or why_no_kernel(found.total, found.arguments, found.dtype, self.device)
            if reason:
                skips.append(Skip(node.name, reason))
                continue
            told, fused = found.told(), _rewrite(gm, found)
            changes.append(Change(self.name, "fused", fused.name, told))
        return PassResult(gm, tuple(changes), tuple(skips))


@dataclass(frozen=True)
class Found:
    """A norm, its input, and its readers; one ``add_norm`` replaces ``casts`` and other nodes."""

    norm: Node
    x: Node
    branch: Node | None
    arguments: dict[str, Any]
    dtype: torch.dtype
    casts: tuple[Node, ...]
    centered: bool  # a layer norm, else an RMS norm

    @property
    def total(self) -> Node:
        """The norm's input: the sum, or ``x``."""
        return self.arguments["input"]

    @property
    def low(self) -> tuple[Node, ...]:
        """The low-precision values, one per reader with a gradient of its own; the norm itself if it is one."""
        if value(self.norm).dtype == self.dtype:
            return (self.norm,)
        return tuple(part for cast in self.casts for part in _parts(cast)[0])

    @property
    def full(self) -> tuple[Node, ...]:
        """The values of the norm in fp32, if anything reads them: the norm, or a part of a shared cast."""
        read = any(user not in self.casts for user in self.norm.users)
        own = [self.norm] if read and value(self.norm).dtype == torch.float32 else []
        return (*own, *(part for cast in self.casts for part in _parts(cast)[1]))

    @property
    def kept(self) -> tuple[Node, ...]:
        """The other readers of the sum; or of ``x``, whose gradients pass through here."""
        users = [user for user in self.total.users if user is not self.norm]
        if self.branch is not None:
            return tuple(users)
        trained = is_trained(self.norm) and is_trained(self.total)
        place = place_of(self.norm)
        return tuple(u for u in users if trained and self.norm < u and u.op != "output" and place_of(u) == place)

    @property
    def parts(self) -> tuple[Node, ...]:
        """All replaced nodes, readers first."""
        parts = [part for cast in self.casts if cast.target is shared_cast for one in _parts(cast) for part in one]
        return (*parts, *self.casts, self.norm, *([self.total] if self.branch is not None else []))

    def told(self) -> str:
        """Describe what becomes one pass."""
        what = "norm" if self.branch is None else "sum and norm"
        return f"{what} of {tuple(value(self.norm).shape)} in one pass, for {len(self.low)} readers in low precision"


def _found(node: Node, planned_for: str) -> Found | None:
    """Return what there is to fuse around ``node``, None unless it is a norm with a cast or a sum next to it."""
    op = NORMS.get(node.target) if node.op == "call_function" else None
    if op is None or names_of(node) != (str(op).rsplit(".", 1)[0],):
        return None
    given = {"bias": None} | node_info.schema_arguments(op, node.args, dict(node.kwargs))
    total = given["input"]
    x, branch = _summands(node, given)
    if value(total).dtype == value(node).dtype in HALVES and (
        op is RMS_NORM or (is_trained(node) and is_large(total, given, planned_for))
    ):
        return Found(node, x, branch, given, value(node).dtype, (), op is LAYER_NORM)
    if value(total).dtype != torch.float32 or value(node).dtype != torch.float32:
        return None
    casts = tuple(user for user in node.users if _lowers(user) and place_of(user) == place_of(node))
    lows = {_cast_to(cast) for cast in casts} | ({value(branch).dtype} if branch is not None else set())
    dtypes = lows - {torch.float32}
    return Found(node, x, branch, given, dtypes.pop(), casts, op is LAYER_NORM) if len(dtypes) == 1 else None


def _summands(node: Node, given: dict[str, Any]) -> tuple[Node, Node | None]:
    """Return the fp32 and the other part of the norm's input; only the input if it is no sum to fuse."""
    total = given["input"]
    parts = [a for a in total.args if isinstance(a, Node)]
    if names_of(total) != ("aten.add",) or len(parts) != 2 or len(total.args) != 2 or total.kwargs:
        return total, None
    later = [n for n in (given["weight"], given["bias"]) if isinstance(n, Node) and not n < total]
    if later or place_of(total) != place_of(node) or any(not same(value(p).shape, value(total).shape) for p in parts):
        return total, None
    x, branch = parts if value(parts[0]).dtype == torch.float32 else parts[::-1]
    return x, branch


def _lowers(user: Node) -> bool:
    """Say whether ``user`` is an inserted cast to low precision whose result stays in the graph."""
    if user.target is shared_cast:
        return True
    low = CAST in user.meta and user.op == "call_method" and value(user).dtype in HALVES
    return low and all(reader.op != "output" for reader in user.users)


def _cast_to(cast: Node) -> torch.dtype:
    given: Any = cast.args[1] if cast.target is shared_cast else value(cast).dtype
    return given


def _parts(cast: Node) -> tuple[list[Node], list[Node]]:
    """Return the values in low precision and in fp32 that a cast makes, in order."""
    if cast.target is not shared_cast:
        return [cast], []
    parts: list[Any] = sorted(cast.users, key=lambda part: part.args[1])
    wide = [part for part in parts if cast.args[3] and part.args[1] == 0]
    return [part for part in parts if part not in wide], wide


def _why_not(found: Found, memory: Memory) -> str:
    """Return why a norm stays as it is, or ""."""
    weights = [found.arguments[name] for name in ("weight", "bias")]
    if REGION in found.norm.meta:
        return "inside a region that affects what is computed"
    if memory.is_written(found.total) or memory.is_written(found.norm):
        return "the sum or the norm is written in place"
    if not all(isinstance(n, int) for n in found.arguments["normalized_shape"]):
        return "its sizes are not known"
    if any(isinstance(w, Node) and value(w).dtype not in (torch.float32, found.dtype) for w in weights):
        return f"its weights are neither fp32 nor {found.dtype}"
    return ""


def _rewrite(gm: GraphModule, found: Found) -> Node:
    """Replace all that was found with one call; return it."""
    lows, fulls, kept = found.low, found.full, found.kept
    shape, weight, bias, eps = (found.arguments[name] for name in ("normalized_shape", "weight", "bias", "eps"))
    keep = found.branch is not None or bool(kept)
    eps = torch.finfo(torch.float32).eps if eps is None else eps  # an RMS norm's
    options: tuple[Any, ...] = (tuple(shape), weight, bias, eps, found.dtype, len(lows), bool(fulls), keep)
    options += () if found.centered else (False,)
    with gm.graph.inserting_after(found.norm if found.branch is None else found.total):
        fused = gm.graph.call_function(add_norm, (found.x, found.branch, *options))
    # The node that passes x on belongs to the norm's region, maybe a checkpoint, and not to that of x.
    likes = [(found.norm if found.branch is None else found.total, value(found.total))] if keep else []
    likes += [(like, value(like)) for like in fulls[:1]] + [(low, value(lows[0])) for low in lows]
    take_over(fused, found.norm, tuple(val for _, val in likes), LEFT_BEHIND)
    fused.meta[MARK] = found.norm.meta.get(MARK)
    fused.meta[CAPTURED] = (*([captured(found.total)] if found.branch is not None else []), captured(found.norm))
    parts = list(_taken_apart(gm, fused, likes))
    for reader in kept:
        reader.replace_input_with(found.total, parts[0])
    for full in fulls:
        full.replace_all_uses_with(parts[keep], delete_user_cb=lambda user: user not in found.casts)
    for low, part in zip(lows, parts[keep + bool(fulls) :], strict=True):
        low.replace_all_uses_with(part)
    nobody = parts[:keep] if not kept else []
    for node in (*nobody, *found.parts):
        gm.graph.erase_node(node)
    return fused


def _taken_apart(gm: GraphModule, fused: Node, likes: list[tuple[Node, Any]]) -> Iterator[Node]:
    """Yield the parts of ``fused``, each with the meta of one of ``likes`` and the value beside it."""
    last = fused
    for index, (like, val) in enumerate(likes):
        with gm.graph.inserting_after(last):
            last = gm.graph.call_function(operator.getitem, (fused, index))
        yield take_over(last, like, val, LEFT_BEHIND)
