"""Positions that feed sin, cos or exp stay exact; other matrix products are not held back."""

import pytest
import torch

from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import MARK
from amp_graph.passes.precision.conditioning import POSITIONS
from amp_graph.passes.precision.plan_precision import PlanPrecision
from tests.passes.graphs import BF16, FP32, capture_function, passes_until, rewritten, run_step

X = torch.randn(1, 600, 4)
FREQUENCIES = torch.tensor([1.0, 0.1])


def rotary(s, x):
    ids = torch.arange(x.shape[1])[None, None, :].float()
    angles = (s.f[None, :, None] @ ids).transpose(1, 2)
    return x * torch.cat([angles.cos(), angles.sin()], -1)


def rotary_from_ids(s, x, ids):
    angles = (s.f[None, :, None].float() @ ids[:, None, :].float()).transpose(1, 2)
    return x * torch.cat([angles.cos(), angles.sin()], -1)


def decay(s, x):
    steps = torch.arange(x.shape[1], dtype=torch.float32)
    rates = torch.outer(steps, s.f)
    return x * torch.exp(-torch.einsum("tf,fg->tg", rates, s.w))


CASES = [
    (rotary, (X,), {"f": FREQUENCIES}),
    (rotary_from_ids, (X, torch.arange(600)[None]), {"f": FREQUENCIES}),
    (decay, (X,), {"f": FREQUENCIES.abs() / 100, "w": torch.rand(2, 4) / 10}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("function", "inputs", "state"), CASES)
@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast", "bf16,accuracy=1", "fp16"])
def test_the_product_that_carries_positions_stays_full(function, inputs, state, policy):
    graph = capture_function(function, *inputs, **state)
    gm, _ = graph.through(passes_until(PlanPrecision, policy))
    assert [n for n in gm.graph.nodes if MARK in n.meta and n.meta[MARK].reason.endswith(POSITIONS)]
    done = rewritten(graph, policy)
    step, plain = run_step(done, graph.given), run_step(graph.gm, graph.given)
    assert (step.outputs[0] - plain.outputs[0]).norm() <= 0.01 * plain.outputs[0].norm()
    for node in done.graph.nodes:
        if getattr(node.target, "__name__", str(node.target)) in ("sin", "cos", "exp", "matmul", "einsum"):
            assert value(node).dtype == FP32, node


def test_control_without_the_rule_positions_collapse():
    """256 and 257 are one number in bf16: with PyTorch's own list, which has no such rule, the error is large."""
    graph = capture_function(rotary, X, f=FREQUENCIES)
    low = rewritten(graph, "bf16,lists=autocast_cpu")
    step, plain = run_step(low, graph.given), run_step(graph.gm, graph.given)
    assert (step.outputs[0] - plain.outputs[0]).norm() > 0.05 * plain.outputs[0].norm()


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: torch.exp(x @ s.w),  # sensitive, and no positions
        lambda s, x: torch.arange(4.0)[None] @ s.w + x,  # positions that feed nothing sensitive
        lambda s, x: torch.sin(s.e[torch.arange(600)] @ s.w) + x,  # positions looked up in a table
    ],
)
def test_other_products_are_low(function):
    gm = rewritten(capture_function(function, X, w=torch.randn(4, 4), e=torch.randn(600, 4)))
    products = [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == "matmul"]
    assert products
    assert all(value(n).dtype == BF16 for n in products)
