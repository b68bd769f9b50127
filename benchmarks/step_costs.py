"""What a step costs beside time: casts and their bytes, what is saved for backward, what is held.

Before: a ``Prepared`` variant. After: ``Casts(count=25, bytes=1_200_000)``, ``Saved(activations, weight_copies)``.
Measured once, outside of the timing. Inside of what Inductor compiles, casts are part of other kernels and not seen.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from variants import Prepared

from amp_graph.passes.torch_compat.storage import bytes_of

PAIRS = {"aten.copy_": (1, 0), "aten._foreach_copy_": (1, 0)}  # where source and result stand among the arguments
CASTS = {"aten._to_copy", "prims.convert_element_type", *PAIRS}


@dataclass(frozen=True)
class Casts:
    """How many conversions between floating-point dtypes ran, and how many bytes they read and wrote."""

    count: int
    bytes: int


@dataclass(frozen=True)
class Saved:
    """Bytes kept for backward, each storage once, beside parameters, buffers and the batch, which exist anyway.

    ``weight_copies``: of those, what was cast from a parameter, or is kept by amp_graph instead; None where a compiler
    hides which is which, and then ``activations`` is None, too.
    """

    activations: int | None
    weight_copies: int | None
    total: int


class CountCasts(TorchDispatchMode):
    """Counts conversions, and notes the results of those that start from ``weights``."""

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.weights = {storage(t) for t in weights}
        self.count = self.bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave what is compiled compiled: under another mode Dynamo runs the original code."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation; what is several of them (only seen in inference mode) is taken apart."""
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for source, result in conversions(str(func.overloadpacket), args, out):
            self.count += 1
            self.bytes += size(source) + size(result)
            if storage(source) in self.weights:
                self.weights.add(storage(result))
        return out


def conversions(name: str, args: tuple, out: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (source, result) of each conversion between floating-point dtypes that one call of ``name`` makes."""
    if name not in CASTS:
        return
    source, result = (args[i] for i in PAIRS[name]) if name in PAIRS else (args[0], out)
    for a, b in zip(tree_leaves(source), tree_leaves(result), strict=True):
        if a.dtype != b.dtype and a.is_floating_point() and b.is_floating_point():
            yield a, b


def storage(t: Tensor) -> StorageWeakRef | int:
    """Identify the memory of a tensor, without keeping it: autograd steals gradients that nobody else holds.

    What is packed for a kernel has no storage; it shares its memory with nothing.
    """
    return StorageWeakRef(t.untyped_storage()) if t.layout is torch.strided else id(t)


def size(t: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return t.numel() * t.element_size()


def casts_of(run: Callable[[], object]) -> Casts:
    """Count the casts of one call."""
    with CountCasts() as counted:
        run()
    return Casts(counted.count, counted.bytes)


def saved_by(made: Prepared, compiled: bool) -> Saved | None:
    """Return what a training step saves, by making one; None for a compiled ``TrainStep``: nobody says."""
    if made.step is not None:
        return None if compiled else saved_in_graph(made)
    return saved_by_autograd(made, compiled)


def saved_by_autograd(made: Prepared, compiled: bool) -> Saved:
    """Return what autograd saves until backward begins."""
    model = made.case.model
    known = {storage(t) for t in (*model.parameters(), *model.buffers(), *made.batch)}
    sizes: dict[StorageWeakRef | int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if storage(t) not in known and torch._C._current_graph_task_id() == -1:
            sizes[storage(t)] = bytes_of(t)
        return t

    with CountCasts(model.parameters()) as casts, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        made.run()
    if compiled:
        return Saved(None, None, sum(sizes.values()))
    kept = {storage(t): bytes_of(t) for t in made.weight_copies()}
    copies = kept | {s: n for s, n in sizes.items() if s in casts.weights}
    return _summed({s: n for s, n in sizes.items() if s not in copies}, copies)


def saved_in_graph(made: Prepared) -> Saved:
    """Return what the graph of a ``TrainStep`` makes before the loss and reads behind it, by running it node by node.

    By running: what the graph says of a workspace of oneDNN is not what the kernel makes.
    """
    captured = made.step.captured[-1]  # what a first call changes (of a config, say) has it captured again
    graph = captured.step
    watched, usual = _Watched(graph.gm), graph.run
    graph.run = watched.run
    try:
        made.run()
    finally:
        graph.run = usual
    kept = {storage(t): bytes_of(t) for t in made.weight_copies()}
    return _summed(watched.sizes, kept)


def _summed(activations: dict[StorageWeakRef | int, int], copies: dict[StorageWeakRef | int, int]) -> Saved:
    low, kept = sum(activations.values()), sum(copies.values())
    return Saved(low, kept, low + kept)


class _Watched(Interpreter):
    """Runs a graph of forward and backward, and notes the memory of what goes from the one to the other."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.read = saved_nodes(gm)
        self.sizes: dict[StorageWeakRef | int, int] = {}
        self._given: set[StorageWeakRef | int] = set()

    def run_node(self, n: Node) -> Any:
        """Run a node; memory that is the caller's does not count."""
        made = super().run_node(n)
        tensors = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
        if n.op == "placeholder":
            self._given |= {storage(t) for t in tensors}
        elif n in self.read:
            self.sizes |= {storage(t): bytes_of(t) for t in tensors if storage(t) not in self._given}
        return made


def saved_nodes(gm: GraphModule) -> set[Node]:
    """Return the nodes from before the loss that are read behind it, but for the loss.

    Its gradient, the last ``ones_like`` of one number, is where backward starts.
    """
    nodes = list(gm.graph.nodes)
    ones = [
        i for i, n in enumerate(nodes) if n.target is torch.ops.aten.ones_like.default and n.meta["val"].numel() == 1
    ]
    start = ones[-1]
    read = {source for n in nodes[start + 1 :] for source in n.all_input_nodes}
    return (read & set(nodes[:start])) - set(nodes[start].all_input_nodes)


def held_by(made: Prepared) -> int:
    """Return the bytes that are held between steps: parameters, buffers, optimizer state, copies, gradients' memory."""
    states = made.optimizer.state.values() if made.optimizer is not None else ()
    state = [t for s in states for t in s.values() if isinstance(t, Tensor)]
    model = made.case.model
    tensors = (*model.parameters(), *model.buffers(), *state, *made.weight_copies(), *made.gradient_memory())
    return sum({storage(t): bytes_of(t) for t in tensors}.values())
