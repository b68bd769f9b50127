"""The user's own torch.autocast and no_grad regions are marked and obeyed."""

import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import CAST, MARK, REGION
from tests.passes.graphs import BF16, FP32, Function, assert_near, capture_function, rewritten, run_step

X, W = torch.randn(4, 4), torch.randn(4, 4)


def disabled(s, x):
    a = x @ s.w
    with torch.autocast("cpu", enabled=False):
        b = a.float() @ s.w
    return b @ s.w


def enabled(s, x):
    with torch.autocast("cpu", torch.bfloat16):
        a = x @ s.w
    return a.float() * 2


def without_grad(s, x):
    a = x @ s.w
    with torch.no_grad():
        b = a @ s.w
        with torch.enable_grad():
            c = a @ s.w
    return b, c


def with_grad_inside(s, x):
    with torch.enable_grad():
        return F.linear(x, s.w) + 1


def products(gm):
    return [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == "matmul"]


def test_a_disabled_region_runs_as_captured():
    graph = capture_function(disabled, X, w=W)
    gm = rewritten(graph)
    assert [REGION in n.meta for n in products(gm)] == [False, True, False]
    assert [value(n).dtype for n in products(gm)] == [BF16, FP32, BF16]
    assert "enabled=False" in products(gm)[1].meta[MARK].reason
    step, plain = run_step(gm, graph.given), run_step(graph.gm, graph.given)
    assert (step.outputs[0] - plain.outputs[0]).norm() <= 0.05 * plain.outputs[0].norm()


def test_an_enabled_region_keeps_what_it_computed_bit_for_bit():
    graph = capture_function(enabled, X, w=W)
    gm = rewritten(graph)
    assert REGION in products(gm)[0].meta
    assert torch.equal(run_step(gm, graph.given).outputs[0], run_step(graph.gm, graph.given).outputs[0])
    assert not any(CAST in n.meta for n in gm.graph.nodes)


def test_gradients_pass_through_exactly_the_enabled_part():
    graph = capture_function(without_grad, X, w=W)
    step, plain = run_step(rewritten(graph), graph.given), run_step(graph.gm, graph.given)
    assert_near(step, plain, 0.02)


def test_an_output_of_a_part_with_gradients_has_them_in_a_call_without():
    model = amp_graph.convert(Function(with_grad_inside, w=W), "bf16")
    with torch.no_grad():
        out = model(X)
    assert out.dtype == FP32
    (grad,) = torch.autograd.grad(out.sum(), model.parameters())
    expected = torch.ones(4, 4) @ X.bfloat16().float()
    assert (grad - expected).norm() <= 0.01 * expected.norm()
