"""``emulate=cuda``: CUDA's plan, and operations that sum in fp32 and round once, whatever this CPU's kernels do."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import PolicyError
from amp_graph.passes.emulation.emulate_cuda import EmulateCuda, emulated
from amp_graph.passes.graph.meta_keys import MARK
from amp_graph.policy import Policy
from tests.layers import layers
from tests.passes.drawn import drawn
from tests.passes.graphs import (
    body_text,
    capture,
    capture_function,
    passes_before,
    passes_until,
    run_step,
    standard_passes,
    with_and_without,
)

POLICY = "fp16,emulate=cuda"


def planned(graph, policy=POLICY):
    """Return a graph before and after the pass, and what the pass did."""
    before, after, _, result = with_and_without(passes_until(EmulateCuda, policy)[-1], graph, policy)
    return before, after, result


# -- rounding ---------------------------------------------------------------------------------------------

# Products that sum to much more than the result: sums in fp16 lose all of it.
ROUNDED_ONCE = {
    "linear": (lambda x, w, b: F.linear(x, w, b), (drawn(4, 4096), drawn(8, 4096), drawn(8))),
    "matmul": (lambda x, w: x @ w, (drawn(2, 4, 2048), drawn(2, 2048, 8))),
    "addbmm": (torch.addbmm, (drawn(4, 4), drawn(8, 4, 256), drawn(8, 256, 4))),
    "transposed": (F.conv_transpose2d, (drawn(1, 64, 4, 4), drawn(64, 4, 3, 3))),
    "conv3d": (F.conv3d, (drawn(1, 16, 5, 5, 5), drawn(4, 16, 3, 3, 3))),
    "average": (lambda x, w: F.avg_pool3d(x @ w, 2), (drawn(1, 4, 8, 8, 8), torch.eye(8))),
    "adaptive": (lambda x, w: F.adaptive_avg_pool2d(x @ w, 3), (drawn(2, 4, 16, 16), torch.eye(16))),
}
POOLS = ("average", "adaptive")


@pytest.mark.parametrize("case", ROUNDED_ONCE)
def test_sums_are_of_fp32_and_rounded_once_with_their_gradients(case):
    function, inputs = ROUNDED_ONCE[case]
    _, after, done = planned(capture_function(lambda self, *args: function(*args), *inputs))
    assert done.changes
    low = [t.half().float().requires_grad_() for t in inputs]
    made = after(*low)
    made = made[0] if isinstance(made, tuple) else made
    exact_inputs = [t.detach().double().requires_grad_() for t in low]
    exact = function(*exact_inputs)
    seed = torch.randn(exact.shape).half()
    trained = slice(1 if case in POOLS else None)  # the matmul before a pool sees a gradient that is rounded already
    found = [made, *torch.autograd.grad(made, low[trained], seed.float())]
    wanted = [exact, *torch.autograd.grad(exact, exact_inputs[trained], seed.double())]
    for got, want in zip(found, wanted, strict=True):
        rounded = want.half().double()
        ulp = torch.nextafter(want.abs().half(), torch.tensor(torch.inf).half()).double() - want.abs().half().double()
        assert ((got.double() - rounded).abs() <= ulp).all()
        assert (got.double() != rounded).sum() <= max(1, 0.02 * got.numel())  # fp32's own rounding, near a tie


def test_a_convolution_adds_its_bias_to_a_rounded_result_as_cudnn_does():
    x, w, b = drawn(1, 8, 6, 6), drawn(4, 8, 3, 3), drawn(4) * 30
    _, after, _ = planned(capture_function(lambda self, x, w, b: F.conv2d(x, w, b, padding=1), x, w, b))
    low = [t.half().double() for t in (x, w, b)]
    twice = F.conv2d(*low[:2], padding=1).half() + low[2].half()[:, None, None]
    (made,) = after(x, w, b)
    assert torch.equal(made, twice.float())
    assert not torch.equal(made, F.conv2d(*low, padding=1).half().float())


def test_attention_rounds_probabilities_and_the_gradient_of_scores():
    q, k, v = (drawn(1, 2, 16, 8) + i for i in range(3))
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    _, after, _ = planned(capture_function(lambda self, *given: causal(*given), q, k, v))
    low = [t.half().double().requires_grad_() for t in (q, k, v)]
    scores = (low[0] @ low[1].mT / 8**0.5).masked_fill(~torch.ones(16, 16).bool().tril(), -torch.inf)
    unscaled = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = (unscaled.half().double() @ low[2] / unscaled.sum(-1, keepdim=True)).half().float()
    (made,) = after(*[t.half().float().requires_grad_() for t in (q, k, v)])
    assert (made != rounded).double().mean() < 0.02
    exact = causal(*low)
    assert (made.double() - exact).norm() < 1e-3 * exact.norm()


def test_attention_rounds_the_gradient_of_scores_for_the_products_in_backward():
    q, k, v = drawn(1, 1, 16, 16) / 1024, torch.eye(16)[None, None], drawn(1, 1, 16, 16)
    _, after, _ = planned(capture_function(lambda self, *x: F.scaled_dot_product_attention(*x, scale=1024.0), q, k, v))
    given = [t.half().float().requires_grad_() for t in (q, k, v)]
    (made,) = after(*given)
    units = torch.autograd.grad(made, given[0], torch.full_like(made, 2.0**-17))[0] * 2.0**14
    assert units.abs().max() > 0
    assert torch.equal(units, units.round())  # multiples of 2^-24, the least number of fp16, times the scale


@pytest.mark.parametrize("mask", [torch.ones(6, 6).tril().bool(), torch.randn(6, 6)])
def test_attention_with_a_mask_and_a_row_that_sees_nothing(mask):
    mask = mask.clone()
    mask[2] = False if mask.dtype == torch.bool else -torch.inf
    q, k, v = (drawn(1, 2, 6, 8) for _ in range(3))
    function = lambda self, q, k, v, m: F.scaled_dot_product_attention(q, k, v, m)  # noqa: E731
    _, after, done = planned(capture_function(function, q, k, v, mask))
    (made,) = after(q, k, v, mask)
    assert [change.node for change in done.changes]
    assert (made[:, :, 2] == 0).all()
    rows = [0, 1, 3, 4, 5]
    wanted = F.scaled_dot_product_attention(q, k, v, mask)
    assert torch.allclose(made[:, :, rows], wanted[:, :, rows], atol=5e-3)


def test_operations_inside_of_one_call_round_one_by_one():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    @layers(lambda: dict(attention=attention))
    def Model(self, x):
        return self.attention(x, x, x, need_weights=False)[0]

    before, after, done = planned(capture(Model(), torch.randn(2, 5, 8)))
    assert "multi_head_attention_forward" in body_text(before)
    assert "multi_head_attention_forward" not in body_text(after)
    assert len([c for c in done.changes if c.action == "emulated"]) >= 3
    assert all(MARK in node.meta for node in after.graph.nodes if "emulated" in str(node.target))


def test_a_recurrent_layer_trains_in_fp16():
    layer, x = nn.LSTM(8, 16, batch_first=True), torch.randn(4, 5, 8)
    wanted = layer(x)[0].detach()
    amp_graph.convert(layer, POLICY)
    made = layer(x)[0]
    amp_graph.GradScaler(init_scale=256.0).scale(made.square().mean()).backward()
    assert layer.weight_hh_l0.grad.abs().sum() > 0
    assert torch.allclose(made, wanted, atol=2e-3)
    (graph,) = amp_graph.report(layer).graphs
    assert "emulated_lstm" in graph.text


# -- what it leaves alone ---------------------------------------------------------------------------------


def test_low_memory_that_is_written_to_is_left_to_the_kernel_and_says_so():
    def function(self, x, w):
        h = x @ w
        h.addmm_(x, w)
        return h

    graph = capture_function(function, torch.randn(4, 4), torch.randn(4, 4))
    before, after, done = planned(graph)
    assert any("writes to a tensor in low precision" in skip.reason for skip in done.skips)
    step, plain = (run_step(gm, graph.given) for gm in (after, before))
    assert torch.allclose(step.outputs[0], plain.outputs[0], rtol=2e-3)


def test_statistics_of_a_batch_norm_are_updated_in_place():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    graph = capture(model, torch.randn(2, 3, 6, 6))
    _, after, _ = planned(graph)
    assert "emulated_batch_norm" in body_text(after)
    mean = model[1].running_mean.clone()
    after(*graph.given)
    assert not torch.equal(model[1].running_mean, mean)


def test_operands_of_fp64_are_computed_with_as_they_are():
    x, w = torch.randn(4, 4).double(), torch.randn(4, 4).double()
    assert torch.equal(emulated(torch.mm, (torch.float16,))(x, w), x @ w)


def test_the_plan_is_that_for_a_gpu():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(-1))
    graph = capture(model, torch.randn(4, 8))
    marks = []
    for policy in (POLICY, "fp16,device=cuda", "fp16"):
        gm, _ = graph.through(passes_before(EmulateCuda, POLICY) if policy == POLICY else standard_passes(policy))
        marks.append({n.name: n.meta[MARK].precision for n in gm.graph.nodes if MARK in n.meta})
    assert marks[0] == marks[1]
    assert marks[0] != marks[2]  # the CPU's layer norm takes fp16


# -- bad policies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["fp16,emulate=cpu", "fp16,emulate=cuda,device=cpu"])
def test_policies_that_emulate_nothing(text):
    with pytest.raises(PolicyError, match="emulate"):
        Policy.parse(text)


def test_a_model_on_a_gpu_needs_no_emulation():
    with pytest.raises(PolicyError, match=r"on a cuda device, which needs no emulation[\s\S]*policy='fp16-O1'"):
        Policy.parse(POLICY).op_list("cuda")
