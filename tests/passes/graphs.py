"""Graphs to test passes on: captured from small models, run on real tensors, with their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from amp_graph.passes.backends.cpu.convolution import depthwise_conv_gradients, lower_pointwise_conv
from amp_graph.passes.backends.cpu.inference import fold_batch_norms
from amp_graph.passes.base import Pass, PassResult
from amp_graph.passes.graph import grad_regions
from amp_graph.passes.graph.activation_checkpoints import inline_checkpoints
from amp_graph.passes.graph.fake_values import adopt_values
from amp_graph.passes.graph.graph_text import graph_text
from amp_graph.passes.layout import channels_last
from amp_graph.passes.manager import Timed, run_passes
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.pipeline_table import pipeline
from amp_graph.policy import Policy
from amp_graph.rewrite import copy_graph
from tests.layers import layers
from tests.relative_error import error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@layers(
    lambda function, **state: dict(
        function=function, **{n: nn.Parameter(t) if t.is_floating_point() else nn.Buffer(t) for n, t in state.items()}
    )
)
def Function(self: Any, *args: Any) -> Any:
    """A module out of a function; ``state`` becomes its parameters (floats that train) and buffers."""
    return self.function(self, *args)


@dataclass(frozen=True)
class Capture:
    """A Dynamo graph as captured, and the real tensors for its placeholders."""

    gm: GraphModule
    given: tuple[Any, ...]

    def fresh(self) -> GraphModule:
        """Return a copy with its values adopted and its regions marked, as ``rewrite`` starts from."""
        gm = copy_graph(self.gm)
        adopt_values(gm)
        inline_checkpoints(gm)
        adopt_values(gm)
        grad_regions.mark_regions(gm)
        return gm

    def through(self, passes: list[Pass]) -> tuple[GraphModule, tuple[Timed, ...]]:
        """Return a fresh copy after ``passes``, each verified, and what they did."""
        gm = self.fresh()
        return gm, run_passes(gm, passes, checked=True)


def capture(model: Any, *inputs: Any, dynamic: bool | None = None) -> Capture:
    """Capture one whole graph of ``model`` by Dynamo."""
    found: list[Any] = []

    def backend(gm: GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            found.append(Capture(gm, args))
            return gm.forward(*args)

        return run

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    compiled(*[x.clone() if isinstance(x, torch.Tensor) else x for x in inputs])
    (one,) = found
    return one


def capture_function(function: Any, *inputs: Any, dynamic: bool | None = None, **state: torch.Tensor) -> Capture:
    """Capture ``function(self, *inputs)``, where ``self`` has ``state`` as parameters."""
    return capture(Function(function, **state), *inputs, dynamic=dynamic)


def options(policy: str = "bf16", device: str = "cpu", **mode: Any) -> PipelineOptions:
    """Return the options of passes; mode: further fields of them."""
    return Policy.parse(policy).pipeline_options(device, **mode)


def multiply_bf16(monkeypatch: pytest.MonkeyPatch, *, multiplies: bool = True) -> None:
    """Let the passes over images take this CPU for one with, or without, dot products of bf16."""
    for module in (channels_last, depthwise_conv_gradients, fold_batch_norms, lower_pointwise_conv):
        monkeypatch.setattr(module, "multiplies_bf16", lambda: multiplies)


def passes_for(policy: Policy, device: str, **mode: Any) -> list[Pass]:
    """Return the passes over a captured graph; mode: ``eager``, ``in_step``, ``measured``."""
    return pipeline(Phase.CAPTURED, policy.pipeline_options(device, **mode))


def standard_passes(policy: str = "bf16") -> list[Pass]:
    return passes_for(Policy.parse(policy), "cpu")


def passes_until(last: type[Pass], policy: str = "bf16") -> list[Pass]:
    """Return the standard passes up to and with ``last``."""
    passes = standard_passes(policy)
    index = next(i for i, p in enumerate(passes) if isinstance(p, last))
    return passes[: index + 1]


def passes_before(last: type[Pass], policy: str = "bf16") -> list[Pass]:
    return passes_until(last, policy)[:-1]


class Passed(NamedTuple):
    """A graph before a pass and after it, what it was given, and what the pass did."""

    plain: GraphModule
    ours: GraphModule
    given: tuple[Any, ...]
    result: PassResult


def with_and_without(
    one: Pass, graph: Capture, policy: str = "bf16", *, behind: Sequence[Pass] | None = None
) -> Passed:
    """Run ``one`` over ``graph``, behind the passes that come before it, or behind those given."""
    before = passes_before(type(one), policy) if behind is None else [*behind]
    plain, ours = (graph.through(before)[0] for _ in range(2))
    (done,) = run_passes(ours, [one], checked=True)
    return Passed(plain, ours, graph.given, done.result)


def rewritten(captured: Capture, policy: str = "bf16") -> GraphModule:
    """Return a copy of the captured graph after all standard passes, each verified."""
    return captured.through(standard_passes(policy))[0]


def node_named(gm: GraphModule, name: str) -> torch.fx.Node:
    return next(n for n in gm.graph.nodes if n.name == name)


def body_text(gm: GraphModule) -> str:
    """Return the graph's text without the lines of its inputs and without blank comments."""
    return "\n".join(line.rstrip() for line in graph_text(gm).splitlines() if " = input " not in line)


@dataclass(frozen=True)
class Step:
    """What one run of a graph gave: outputs, the gradient of each input, and the inputs as it left them."""

    outputs: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor | None, ...]
    inputs: tuple[torch.Tensor, ...]


def run_step(gm: Any, given: tuple[Any, ...], seed: int = 0) -> Step:
    """Run ``gm`` forward and backward on copies of ``given``, with a fixed random cotangent."""
    args = [_copy(a) for a in given]
    torch.manual_seed(seed)
    run = gm.forward if isinstance(gm, GraphModule) else gm
    out = run(*args)
    outputs = tuple(t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
    torch.manual_seed(seed + 1)
    loss: Any = 0.0
    for t in outputs:
        if t.requires_grad:
            loss = loss + (t.double() * torch.randn(t.shape, dtype=torch.float64)).sum()
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    grads: tuple[torch.Tensor | None, ...] = ()
    if isinstance(loss, torch.Tensor):
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    kept = tuple(a.detach() for a in args if isinstance(a, torch.Tensor))
    return Step(tuple(t.detach() for t in outputs), grads, kept)


def _copy(a: Any) -> Any:
    return a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a


def differences(a: Step, b: Step) -> list[str]:
    """Return what is not equal bit for bit (and in dtype) between two steps."""
    found = []
    for what in ("outputs", "grads", "inputs"):
        for i, (x, y) in enumerate(zip(getattr(a, what), getattr(b, what), strict=True)):
            if not _identical(x, y):
                found.append(f"{what}[{i}]")
    return found


def errors_of(found: Step, exact: Step) -> list[float]:
    """Return the relative errors of outputs and gradients that are not zero."""
    both = zip((*found.outputs, *found.grads), (*exact.outputs, *exact.grads), strict=True)
    return [error(a, b) for a, b in both if b is not None and b.norm() > 0]


def assert_near(found: Step, expected: Step, bound: float) -> None:
    """Assert that outputs and gradients are as near as ``bound`` of their norms, and that the same ones are there."""
    for one, other in zip((*found.outputs, *found.grads), (*expected.outputs, *expected.grads), strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one - other).norm() <= bound * other.norm()


def assert_left_alone(passed: Passed) -> None:
    """Assert that the pass changed nothing, and no bit of a step either."""
    assert not passed.result.changes
    assert not differences(run_step(passed.ours, passed.given), run_step(passed.plain, passed.given))


def _identical(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    return x.dtype == y.dtype and x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())
