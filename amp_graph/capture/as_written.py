"""Runs calls without graphs: as the user wrote them, under the policy's autocast, or in fp32 where that fails.

Before: a loop over experts that Dynamo cannot capture, in fp32. After: the call as under ``torch.autocast``, with the
dtypes that its result had in fp32.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from amp_graph.devices import device_of_model
from amp_graph.lists.errors import first_line
from amp_graph.model_state import ModelState
from amp_graph.passes.precision.fp32_operands import DENSE
from amp_graph.passes.torch_compat.autograd import users_functions
from amp_graph.passes.torch_compat.modules import plain_attribute
from amp_graph.passes.torch_compat.storage import storage_key
from amp_graph.policy import Policy
from amp_graph.policy_words import HALVES

if TYPE_CHECKING:
    from amp_graph.capture.conversion import Conversion

Region = tuple[str, torch.dtype]  # of autocast: device and dtype
Mode = tuple[bool, bool, bool]  # training, gradients, half inputs
MAKES = re.compile(r"to_sparse|sparse_\w+_tensor")  # functions that make sparse tensors from dense ones


def region_of(model: torch.nn.Module, policy: Policy) -> Region | None:
    """Return the region of autocast in which code of ``model`` without a graph runs; None: in fp32."""
    kind = device_of_model(model) or "cpu"
    return (kind, policy.torch_dtype(kind)) if policy.runs_under_autocast(kind) else None


def mode_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mode:
    """Return what changes the code of a call more than its sizes do."""
    halves = any(isinstance(t, Tensor) and t.dtype in HALVES for t in tree_leaves((args, kwargs)))
    return model.training, torch.is_grad_enabled(), halves


def in_words(region: Region | None) -> str:
    """Return how code in ``region`` runs, in words."""
    return "under torch.autocast({!r}, {})".format(*region) if region else "in fp32"


@dataclass(eq=False)
class AsWritten:
    """Runs calls of the model that is converted by ``of``."""

    of: Conversion
    # Of the values of a result, by mode (None: of the last call) and by the number of values: models return others in
    # evaluation than in training.
    dtypes: dict[tuple[Mode | None, int], list[Any]] = field(default_factory=dict)
    widens: bool = False  # whether half inputs are upcast in fp32, as no operation may take them beside fp32 weights
    in_fp32: bool = False  # whether all calls run in fp32: graphs are measured, in fp32 as well
    _works: bool = False  # whether a call has run under autocast
    _fails: bool = False  # whether one has failed there, so that all now run in fp32

    @property
    def region(self) -> Region | None:
        """The region of autocast of calls; None in fp32, as autocast does not know what modules ask for themselves."""
        asks = any(plain_attribute(m, "amp_precision") for m in self.of.model.modules())
        return None if self.in_fp32 or self._fails or asks else region_of(self.of.model, self.of.policy)

    @property
    def how(self) -> str:
        """How calls run, in words."""
        return in_words(self.region)

    def learn(self, mode: Mode, result: Any) -> None:
        """Note the dtypes of the result of a call in fp32, or of graphs, which restore those."""
        found = [getattr(leaf, "dtype", None) for leaf in tree_leaves(result)]
        self.dtypes[mode, len(found)] = self.dtypes[None, len(found)] = found

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call. The first one that fails under autocast runs again in fp32, with the state of before.

        Once a call has run there, parameters are not copied: a later one that wrote to some before it failed raises.
        """
        region = self.region
        self.of.reads_unseen()
        if region is None:
            if self.widens:
                args, kwargs = tree_map_only(Tensor, widened, (args, kwargs))
            return self.of.wide(*args, **kwargs)
        before = ModelState(self.of.model, (args, kwargs), weights=not self._works)
        try:
            result = self._under_autocast(region, args, kwargs)
        except Exception as error:  # whatever an operation without a low kernel raises, or the user's code
            if before.is_lost():
                raise
            before.restore()
            result = self.of.wide(*args, **kwargs)
            self._fails = True
            self.of.diagnostics.warn(
                f"code without a graph fails {in_words(region)}: it runs in fp32 from now on",
                f"{type(error).__name__}: {first_line(error)}",
            )
        self._works = not self._fails
        return result

    def _under_autocast(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A mode would change the graphs of parts, whose checkpoints compute again without it.
        with _autocast(*region), nullcontext() if self.of.parts else _SparseInFull():
            result = self.of.wide(*args, **kwargs)
        leaves, spec = tree_flatten(result)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for node in users_functions([t for t in leaves if isinstance(t, Tensor)], given):
            node.apply = _in_region(node, region)
        if not self.of.policy.keep_outputs:
            return result
        modes = (mode_of(self.of.model, args, kwargs), None)
        known = next((self.dtypes[m, len(leaves)] for m in modes if (m, len(leaves)) in self.dtypes), None)
        own = set(map(id, (*given, *self.of.model.parameters(), *self.of.model.buffers())))
        return tree_unflatten(_restored(leaves, known or [torch.float32] * len(leaves), own), spec)


@contextmanager
def _autocast(kind: str, dtype: torch.dtype) -> Iterator[None]:
    """Enter autocast, without the weight casts that an outer region of the user may have cached."""
    torch.clear_autocast_cache()
    try:
        with torch.autocast(kind, dtype):
            yield
    finally:
        torch.clear_autocast_cache()


class _SparseInFull(TorchFunctionMode):
    """Runs functions that take or make sparse tensors in fp32: autocast casts operands that have no low sparse kernel.

    Some fail only in their backward, where no rung of the ladder is left.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not MAKES.match(getattr(func, "__name__", "")) and not any(map(_is_sparse, tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, lambda t: t if _is_sparse(t) else widened(t), (args, kwargs))
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return func(*args, **kwargs)


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout not in DENSE


def _restored(leaves: list[Any], dtypes: list[Any], own: set[int]) -> list[Any]:
    """Return a result's values in the dtypes that they have without autocast, except those whose ids are in ``own``.

    Values that share memory go on sharing it: what they are views of is cast once.
    """
    memory: dict[Any, list[int]] = {}
    for i, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True)):
        if (
            isinstance(leaf, Tensor)
            and leaf.dtype in HALVES
            and dtype not in (None, leaf.dtype)
            and id(leaf) not in own
        ):
            key = storage_key(leaf) if leaf.layout is torch.strided and not leaf.is_nested else None
            memory.setdefault((id(leaf) if key is None else key, dtype), []).append(i)
    found = list(leaves)
    for (_, dtype), places in memory.items():
        first = max((leaves[i] for i in places), key=lambda leaf: leaf.requires_grad)
        whole = first if len(places) == 1 else _base(first)
        wide = whole.to(dtype)
        for i in places:
            found[i] = wide if leaves[i] is whole else _view(wide, whole, leaves[i])
    return found


def _base(tensor: Tensor) -> Tensor:
    """Return what ``tensor`` is a view of; itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def _view(wide: Tensor, whole: Tensor, leaf: Tensor) -> Tensor:
    """Return ``leaf``, which shares the memory of ``whole``, as a view of its cast ``wide``, or as a cast of its own.

    The latter where it reaches beyond ``whole``, or has a gradient by another way.
    """
    start = leaf.storage_offset() - whole.storage_offset()
    end = start + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    inside = wide.stride() == whole.stride() and 0 <= start and (leaf.numel() == 0 or end < whole.numel())
    if not inside or (leaf.requires_grad and _base(leaf) is not whole):
        return leaf.to(wide.dtype)
    return (wide if leaf.requires_grad else wide.detach()).as_strided(leaf.shape, leaf.stride(), start)


def widened(tensor: Tensor) -> Tensor:
    """Return ``tensor``, in fp32 if it is half precision."""
    return tensor.float() if tensor.dtype in HALVES else tensor


def _in_region(node: Any, region: Region) -> Callable[..., Any]:
    """Return the backward of ``node`` under autocast: it may compute again what its forward computed there."""
    reference, backward = weakref.ref(node), type(node).apply

    def apply(*grads: Any) -> Any:
        with _autocast(*region):
            return backward(reference(), *grads)

    return apply
