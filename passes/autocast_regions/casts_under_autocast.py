"""Count the casts that ``torch.autocast`` makes when it runs a graph as captured, in forward.

Before: ``h = linear(x, w); return linear(h, w)``. After: ``CastsUnderAutocast(activations=1, weights=1)``: of ``x``,
and of ``w`` once, as autocast keeps the casts of weights until its region ends.

It is no model of autocast: the graph runs under the real one, on fake tensors, and a dispatch mode counts the
conversions below it, as one would count those of an eager call. A graph behind a graph break gets fp32 values, as in
its capture, where an eager call may hand on low ones: then this counts their casts as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map_only

from amp_graph.lists.errors import Attempt
from amp_graph.passes.autocast_regions.autocast_fallback import Regions
from amp_graph.passes.graph.fake_values import captured
from amp_graph.passes.graph.graph_snapshot import copied_graph
from amp_graph.passes.graph.meta_keys import INPUT
from amp_graph.passes.graph.observe import Observer
from amp_graph.passes.torch_compat.dispatch import TorchDispatchMode
from amp_graph.passes.torch_compat.dynamo_settings import errors_not_logged
from amp_graph.passes.torch_compat.fake import (
    DEPENDS_ON_DATA,
    SYMBOLIC,
    FakeTensorMode,
    concrete_number,
    empty_of_numbers,
    outside_modes,
    tracing,
)
from amp_graph.passes.torch_compat.operators import TO_COPY
from amp_graph.passes.torch_compat.storage import storage_key

BY_COPY = torch.ops.aten.copy_.default  # of another dtype
CONVERSIONS = frozenset((TO_COPY, torch.ops.prims.convert_element_type.default, BY_COPY))
CONTAINERS = (tuple, list, dict)
DATA = "its sizes depend on data"
NOT_STRIDED = "it has inputs that are sparse, nested or of a tensor subclass"


@dataclass(frozen=True)
class CastsUnderAutocast:
    """Conversions between floating-point dtypes in one forward; ``why_not``: why they could not be counted.

    ``weights``: those of parameters and buffers, each once a call, or of what was made of one by a cast or a view.
    Conversions that the code as captured makes itself are among them.
    """

    activations: int = 0
    weights: int = 0
    why_not: str = ""

    @property
    def all(self) -> int:
        """All casts of a call."""
        return self.activations + self.weights


@dataclass
class Written:
    """A graph as captured, to be run again: its nodes without metadata, what they read by name, and its inputs.

    ``found``: the casts in it, once they were counted.
    """

    graph: Graph
    held: dict[str, Any]
    inputs: tuple[tuple[str, Any], ...]
    found: CastsUnderAutocast | None = None

    @staticmethod
    def of(gm: GraphModule) -> Written:
        """Copy what is left of ``gm`` only until passes rewrite it; tensors are shared."""
        inputs = tuple(_input(node) for node in gm.graph.nodes if node.op == "placeholder")
        graph = copied_graph(gm)
        graph.owning_module = None
        for node in graph.nodes:
            node.meta = {}
        names = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr")
        return Written(graph, {name: _copied(_read(gm, name)) for name in names}, inputs)


def _input(node: Node) -> tuple[str, Any]:
    """Return the name of an input and its value."""
    return str(node.meta.get(INPUT, node.target)), captured(node)


def _read(gm: GraphModule, name: str) -> Any:
    found: Any = gm
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _copied(found: Any) -> Any:
    """Return a copy of an inner graph, which is rewritten in place as well."""
    if not isinstance(found, GraphModule):
        return found
    inner = {name: part for name, part in found.named_children() if isinstance(part, GraphModule)}
    copied = GraphModule(found, copied_graph(found))
    for name, part in inner.items():
        if hasattr(copied, name):
            setattr(copied, name, _copied(part))
    return copied


def casts_under_autocast(
    written: Written, device: str, dtype: torch.dtype, grad: bool, is_weight: Callable[[str, Any], bool]
) -> CastsUnderAutocast:
    """Count the casts of one call of ``written``; ``is_weight`` is asked for the name and value of what it reads.

    Draws no random numbers, and changes nothing that is there. A graph is counted once.
    """
    if written.found is None:
        written.found = _found(written, device, dtype, grad, is_weight)
    return written.found


def _found(
    written: Written, device: str, dtype: torch.dtype, grad: bool, is_weight: Callable[[str, Any], bool]
) -> CastsUnderAutocast:
    with (
        Attempt() as tried,  # whatever an operation raises, in other dtypes than as captured
        warnings.catch_warnings(),
        errors_not_logged(),
        tracing(None),
        outside_modes(),
        torch.inference_mode(False),
    ):
        warnings.simplefilter("ignore")
        return _counted(written, device, dtype, grad, is_weight)
    by_data = isinstance(tried.error, DEPENDS_ON_DATA)
    return CastsUnderAutocast(why_not=DATA if by_data else f"under torch.autocast it fails: {tried.reason}")


def _counted(
    written: Written, device: str, dtype: torch.dtype, grad: bool, is_weight: Callable[[str, Any], bool]
) -> CastsUnderAutocast:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made = _inputs(mode)
    given = [made(value) for _, value in written.inputs]
    held = {name: made(value) for name, value in written.held.items()}
    read = zip((*written.inputs, *written.held.items()), (*given, *held.values()), strict=True)
    counter = _Counter(fake for (name, value), fake in read if is_weight(name, value))
    with torch.random.fork_rng(devices=()), mode, torch.set_grad_enabled(grad), counter:
        with Regions() as regions, torch.autocast(device, dtype):
            _Run(written, held, regions).run(*given)
    return CastsUnderAutocast(counter.activations, counter.weights)


def _inputs(mode: FakeTensorMode) -> Callable[[Any], Any]:
    """Return what makes an input of a run: fake tensors of ``mode``, one for each, with numbers for symbolic sizes."""
    made: dict[int, torch.Tensor] = {}

    def tensor(value: torch.Tensor) -> torch.Tensor:
        if value.layout is not torch.strided:
            raise NotImplementedError(NOT_STRIDED)
        with mode, torch.enable_grad():
            fake = empty_of_numbers(value)
            fake.requires_grad_(value.requires_grad)
            return fake if value.is_leaf or not value.requires_grad else fake.clone()  # autocast keeps casts of leaves

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in made:
                made[id(value)] = tensor(value)
            return made[id(value)]
        if isinstance(value, SYMBOLIC):
            return concrete_number(value)
        return tree_map_only((torch.Tensor, torch.SymInt), of, value) if isinstance(value, CONTAINERS) else value

    return of


class _Run(Observer):
    """Runs a graph from what ``Written`` kept."""

    def __init__(self, written: Written, held: dict[str, Any], regions: Regions) -> None:
        super().__init__(torch.nn.Module(), regions, graph=written.graph)
        self.held = held

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return what the graph held under that name."""
        return self.held[target]


class _Counter(TorchDispatchMode):
    """Counts conversions between floating-point dtypes, below autocast and autograd."""

    def __init__(self, weights: Iterable[Any]) -> None:
        super().__init__()
        self.activations = self.weights = 0
        # Storages of weights and of their casts, by identity; the tensors are held so that no identity is used again.
        self._of_weights = {storage_key(w): w for w in weights if isinstance(w, torch.Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator, and count it if it is a conversion."""
        result = func(*args, **(kwargs or {}))
        if func in CONVERSIONS:
            source, target = (args[1], args[0]) if func is BY_COPY else (args[0], result)
            if source.dtype != target.dtype and source.is_floating_point() and target.is_floating_point():
                self._count(source, target)
        return result

    def _count(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if storage_key(source) in self._of_weights:
            self.weights += 1
            self._of_weights[storage_key(target)] = target
        else:
            self.activations += 1
