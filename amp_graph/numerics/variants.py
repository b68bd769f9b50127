"""One captured graph in four precisions, each run node by node: fp64, fp32, planned, and under torch.autocast.

Before: a captured graph. After: ``Variants(gm, policy, device)``, whose ``run(mode, sink, args)`` returns outputs in
their captured dtypes, whatever ran inside. The nodes of all four have the same names as far as they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.numerics.exact_operations import exact_result, origin, wide, wide_dtypes
from amp_graph.passes.graph.aliasing import observe
from amp_graph.passes.graph.bodies import bodies_of
from amp_graph.passes.graph.fake_values import captured, is_eligible
from amp_graph.passes.graph.meta_keys import CAST, MARK
from amp_graph.passes.graph.node_info import is_higher_order
from amp_graph.passes.graph.observe import Observer, Sink
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.policy import Policy
from amp_graph.rewrite import copy_graph, has_values, read_values, ready_to_plan, rewrite_in_place

FP64, FP32, PLAN, AUTOCAST = "fp64", "fp32", "plan", "autocast"
MODES = (FP64, FP32, PLAN, AUTOCAST)
Bodies = Mapping[str, Callable[..., Any]]
OUTSIDE = ("placeholder", "get_attr")  # what a graph reads that others read as well


class Variants:
    """The four forms of one captured graph. ``prepared``: as it is when it is planned, whose nodes are compared.

    ``inside``: those of the graphs inside it, by name: of branches and loops. The planned form has the plan's
    precisions and casts, without the passes of one device, whose kernels compute the same with other code.
    """

    _captured: GraphModule | None = None  # a copy, to be planned; None for a graph inside of another

    def __init__(self, gm: GraphModule, policy: Policy, device: str | None) -> None:
        self._captured = copy_graph(gm)
        self._take(copy_graph(gm), gm, policy, device)
        self.plan(replace(policy, skip=tuple(dict.fromkeys((*policy.skip, "backend")))))

    @classmethod
    def _of_body(cls, prepared: GraphModule, gm: GraphModule, policy: Policy, device: str | None) -> Variants:
        """Return the forms of a graph inside of another, which plans it."""
        made = cls.__new__(cls)
        made._take(prepared, gm, policy, device)
        return made

    def _take(self, prepared: GraphModule, gm: GraphModule, policy: Policy, device: str | None) -> None:
        self.prepared, self._policy = prepared, policy
        problem = ready_to_plan(prepared, policy, device)
        read_values(gm)
        self.dtype, self.device = policy.torch_dtype(device or "cpu"), device or "cpu"
        self.memory = problem.memory
        self._forms = {
            FP64: (prepared, problem.memory),
            FP32: (prepared, problem.memory),
            AUTOCAST: (gm, observe(gm, {})),
        }
        self.inside = {
            body.name: self._of_body(body.graph, getattr(gm, body.name), policy, device)
            for body in bodies_of(prepared)
            if has_values(body.graph)
        }

    @property
    def is_whole(self) -> bool:
        """Whether this is no graph inside of another."""
        return self._captured is not None

    def plan(self, policy: Policy | None = None) -> None:
        """Make the planned form; without ``policy``, with the passes of the device, whose kernels may be needed."""
        assert self._captured is not None, "a graph inside of another is planned with that"
        planned = copy_graph(self._captured)
        asked = policy or self._policy  # whatever time its roundings take
        asked = replace(asked, skip_unprofitable=asked.skip_unprofitable or "false")
        rewrite_in_place(planned, asked, self.device)
        self._take_planned(planned)

    def _take_planned(self, planned: GraphModule) -> None:
        self.planned = planned
        self._forms[PLAN] = planned, observe(planned, marks(planned))
        for name, body in self.inside.items():
            body._take_planned(getattr(planned, name))

    def run(self, mode: str, sink: Sink, args: Sequence[Any], bodies: Bodies) -> tuple[Any, list[torch.Tensor]]:
        """Run one form; return its outputs, and the inputs to differentiate for; ``bodies``: what runs ``inside``."""
        gm, memory = self._forms[mode]
        kind = {FP64: Widened, PLAN: Checked}.get(mode, Restoring)
        observer = kind(gm, sink, memory, bodies)
        observer.is_whole = self.is_whole
        region: AbstractContextManager[Any] = nullcontext()
        if mode == AUTOCAST:
            region = torch.autocast(self.device, self.dtype, cache_enabled=False)
        with region:
            return observer.run(*args), observer.leaves

    def precisions(self) -> dict[str, tuple[str, str]]:
        """Return the planned precision of each operation, and its reason, by the name of its node."""
        return {n.name: (m.precision, m.reason) for n in self.planned.graph.nodes if (m := n.meta.get(MARK))}


class Restoring(Observer):
    """Runs a graph; its outputs get their captured dtypes, where it ``is_whole`` and not inside of another."""

    is_whole = True

    def fetch_args_kwargs_from_env(self, n: Node) -> tuple[Any, Any]:
        """Cast what the graph returns to the dtype that was captured; a graph inside it hands on what it has."""
        if n.op == "output" and self.is_whole:
            for source in n.all_input_nodes:
                found = self.env[source]
                if is_eligible(captured(source)) and isinstance(found, torch.Tensor) and found.is_floating_point():
                    self.env[source] = found.float()
        return super().fetch_args_kwargs_from_env(n)


class Widened(Restoring):
    """Runs a graph in float64: its float32 inputs, parameters, constants and conversions are widened.

    What it writes to them is written to the caller's tensors at its end: other graphs of the call read those.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, in which new tensors without a dtype are float64 as well."""
        assert self.memory is not None, "given by ``Variants``"
        before, self._widened = torch.get_default_dtype(), dict[str, tuple[Any, Any]]()
        torch.set_default_dtype(torch.float64)
        try:
            result = super().run(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)
        for node in self.graph.nodes:
            if str(node.target) in self._widened and node.op in OUTSIDE and self.memory.is_written(node):
                _write(*self._widened[str(node.target)])
        return result

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Widen an input."""
        return self._wide(target, super().placeholder(target, args, kwargs))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Widen a constant."""
        return self._wide(target, super().get_attr(target, args, kwargs))

    def _wide(self, target: Any, given: Any) -> Any:
        made = wide(given)
        if made is not given and isinstance(given, torch.Tensor):
            self._widened[str(target)] = given, made
        return made

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call with float64 in the place of float32."""
        return super().call_function(target, *wide_dtypes(args, kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call with float64 in the place of float32."""
        return super().call_method("double" if target == "float" else target, *wide_dtypes(args, kwargs))


def _write(given: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` to ``given``, with their gradients unless it is a parameter, which is written without."""
    is_parameter = given.is_leaf and given.requires_grad
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_parameter):
        given.copy_(values)


class Checked(Restoring):
    """Runs a planned graph, and each of its operations once more in float64, on the same inputs."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; results are kept until its end, as casts of them are read later than they are."""
        self._kept: dict[Node, Any] = {}
        try:
            return super().run(*args, **kwargs)
        finally:
            self._kept = {}

    def run_node(self, n: Node) -> Any:
        """Run ``n``, and tell the sink what it returns in float64."""
        inputs = {origin(s).name: self._kept[origin(s)] for s in n.all_input_nodes if origin(s) in self._kept}
        exact = exact_result(n, inputs) if MARK in n.meta and not is_higher_order(n) else None
        result = super().run_node(n)
        if CAST not in n.meta and n.op != "output":
            self._kept[n] = result
        if exact is not None:
            self.sink.local(n, result, exact)  # type: ignore[attr-defined]
        return result
