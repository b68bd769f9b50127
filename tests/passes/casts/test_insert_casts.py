"""InsertCasts: one cast per (value, dtype), none across a write or out of no_grad, and retreats."""

import operator
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.casts.insert_casts import InsertCasts
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import CAST, GRAD
from tests.passes.graphs import BF16, FP16, FP32, capture_function, options, passes_before, passes_until, run_step
from tests.relative_error import errors

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) / 3


def inserted(function, *inputs, policy="bf16", **state):
    """Return (graph after InsertCasts, its casts, the capture)."""
    graph = capture_function(function, *(inputs or (X,)), **(state or {"w": W}))
    gm, _ = graph.through(passes_until(InsertCasts, policy))
    return gm, [n for n in gm.graph.nodes if CAST in n.meta], graph


def is_near(gm, graph, bound=0.05):
    low, plain = run_step(gm, graph.given), run_step(graph.gm, graph.given)
    return all((a - b).norm() <= bound * (b.norm() + 1e-6) for a, b in zip(low.outputs, plain.outputs, strict=True))


def test_one_cast_per_value_and_dtype():
    gm, casts, graph = inserted(lambda s, x: F.linear(h := x.exp(), s.w) + F.linear(h, s.w) * (h @ s.w))
    pairs = Counter((c.args[0].name, value(c).dtype) for c in casts)
    assert set(pairs.values()) == {1}
    assert len([p for p in pairs if p[1] == BF16]) == 2
    assert is_near(gm, graph)


@pytest.mark.parametrize("planner", ["", ",planner=paint"])
def test_on_cuda_a_batch_norm_stays_low_and_a_softmax_is_full_as_under_autocast(planner):
    def function(s, x):
        h = F.batch_norm(x @ s.w, None, None, training=True)
        return h.tanh(), (x @ s.w).softmax(-1).tanh(), F.layer_norm(x @ s.w, (8,)).tanh()

    gm, _, graph = inserted(function, policy="bf16,device=cuda,keep_outputs=false" + planner)
    found = {
        name: value(n).dtype for n in gm.graph.nodes for name in names_of(n) if "norm" in name or "softmax" in name
    }
    assert found == {"aten.batch_norm": BF16, "aten.softmax": FP32, "aten.layer_norm": FP32}
    assert is_near(gm, graph)


def test_an_activation_is_cast_right_after_its_producer():
    _, casts, _ = inserted(lambda s, x: (h := x.exp()).log1p() * 2 + h @ s.w)
    (cast,) = [c for c in casts if value(c).dtype == BF16 and c.args[0].op != "placeholder"]
    assert cast.prev is cast.args[0]


@pytest.mark.parametrize("planner", ["", ",planner=paint"])
@pytest.mark.parametrize(
    "expand",
    [
        lambda w: w.expand(16, -1, -1),
        lambda w: w.unsqueeze(0).expand(16, -1, -1),
        lambda w: w.broadcast_to(16, 8, 8),
        lambda w: w.repeat(16, 1, 1),
        lambda w: w.expand(16, -1, -1).transpose(1, 2),
    ],
    ids=["expand", "unsqueeze", "broadcast_to", "repeat", "transpose"],
)
def test_a_weight_is_cast_before_it_is_expanded(expand, planner):
    x = torch.randn(16, 4, 8, generator=torch.Generator().manual_seed(3))
    gm, casts, graph = inserted(lambda s, x: torch.bmm(x, expand(s.w)), x, policy="bf16" + planner)
    assert sorted(value(c).numel() for c in casts if value(c).dtype == BF16) == [W.numel(), x.numel()]
    low, plain = run_step(gm, graph.given), run_step(graph.gm, graph.given)
    with torch.autocast("cpu", torch.bfloat16):
        autocasts = torch.bmm(x, expand(W))
    assert torch.equal(low.outputs[0], autocasts.float())
    assert max(errors(low.grads, plain.grads)) <= 0.01


def test_a_weight_that_fp32_reads_as_well_is_cast_behind_its_expansion():
    def function(s, x):
        w = s.w.expand(16, -1, -1)
        return torch.bmm(x, w), w.exp()

    _, casts, _ = inserted(function, torch.randn(16, 4, 8))
    assert sorted(value(c).numel() for c in casts if value(c).dtype == BF16) == [16 * 4 * 8, 16 * W.numel()]


def between(write):
    def function(s, x):
        h, w = x.exp(), s.w.detach()
        a = h @ w
        write(h)
        return a, h @ w

    return function


def write_to_weight(s, x):
    a = x @ s.w
    with torch.no_grad():
        s.w.mul_(0.5)
    return a.detach(), (x @ s.w).detach()


@pytest.mark.parametrize(
    "function",
    [between(lambda h: h.mul_(0.5)), between(lambda h: h[:2].add_(1.0)), write_to_weight],
    ids=["a value", "a view", "a weight"],
)
def test_no_cast_is_shared_across_a_write(function):
    gm, _, graph = inserted(function)
    low, plain = run_step(gm, graph.given), run_step(graph.gm, graph.given)
    assert max(errors(low.outputs + low.inputs, plain.outputs + plain.inputs)) <= 0.02


def read_without_and_with_gradients(s, x):
    with torch.no_grad():
        first = x @ s.w
    return x @ s.w + first


def test_a_weight_that_no_grad_and_training_read_is_cast_once_with_gradients():
    """pytorch#158232: autocast's cache hands out the cast without a graph, and the weight gets no gradient."""
    gm, casts, graph = inserted(read_without_and_with_gradients)
    weights = [c for c in casts if c.args[0].op == "placeholder" and value(c.args[0]).shape == W.shape]
    assert [c.meta[GRAD] for c in weights] == [True], "one, made before gradients are switched off"
    step, plain = run_step(gm, graph.given), run_step(graph.gm, graph.given)
    (got,), (want,) = step.grads, plain.grads
    assert got is not None
    assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp16,accuracy=fast"])
def test_the_constant_of_a_mask_stays_finite_in_low_precision(policy):
    mask = torch.ones(4, 8, dtype=torch.bool).triu(1)
    gm, _, graph = inserted(
        lambda s, x: (x @ s.w).masked_fill(s.mask, torch.finfo(FP32).min).softmax(-1), X, policy=policy, w=W, mask=mask
    )
    for node in gm.graph.nodes:
        for constant in (a for a in node.args if isinstance(a, float)):
            assert abs(constant) <= torch.finfo(value(node).dtype).max, node
    step = run_step(gm, graph.given)
    assert step.outputs[0].isfinite().all()
    assert not step.outputs[0][mask].any()
    assert all(g.isfinite().all() for g in step.grads)


def assigns(number, where=lambda m: m):
    def function(s, x):
        h = x @ s.w
        h[where(x > 0)] = number
        return h @ s.w

    return function


@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16,lists=autocast_cpu"])
def test_a_number_assigned_by_a_mask_is_written_in_the_precision_of_the_rest(policy):
    """As wav2vec2 does where its padding is: the stream behind it would be full precision to the end."""
    gm, casts, graph = inserted(assigns(0.0), policy=policy)
    low = FP16 if policy == "fp16" else BF16
    assert [value(n).dtype for n in gm.graph.nodes if is_product(n)] == [low, low]
    assert not [c for c in casts if is_product(c.args[0]) and c.users.keys() - {gm.graph.output_node()}]
    assert is_near(gm, graph)


@pytest.mark.parametrize("number", [-1e9, -(10**9)])
def test_a_large_number_assigned_by_a_mask_is_written_in_full_precision(number):
    gm, _, graph = inserted(assigns(number), policy="fp16")
    (written,) = (n.args[0] for n in gm.graph.nodes if n.target is operator.setitem)
    assert value(written).dtype == FP32
    low, plain = run_step(gm, graph.given), run_step(graph.gm, graph.given)
    assert not torch.equal(low.outputs[0], plain.outputs[0])  # the control: products are low
    gm, _, _ = inserted(assigns(number), policy="bf16")  # which holds it
    (written,) = (n.args[0] for n in gm.graph.nodes if n.target is operator.setitem)
    assert value(written).dtype == BF16


def assign(h, s, rows):
    h[rows > 0] = s.row


def add_in(h, s, rows):
    h.index_add_(0, (rows > 0).long(), s.row.exp().expand(4, 8))


def add_at(h, s, rows):
    h.index_put_((rows > 0,), s.row, accumulate=True)


def assign_to_a_view(h, s, rows):
    h.view(2, 2, 8)[rows.view(2, 2) > 0] = s.row


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16,accuracy=fast", "bf16,lists=autocast_cpu"])
@pytest.mark.parametrize("write", [assign, add_in, add_at, assign_to_a_view])
def test_a_product_reads_what_was_written_in_full_precision(write, policy):
    """The written value stands in full precision for the low one: nobody may go back to that."""

    def function(s, x):
        h = x @ s.w
        write(h, s, x.sum(1))
        return h @ s.w

    gm, _, graph = inserted(function, policy=policy, w=W, row=torch.randn(8))
    low = FP16 if policy == "fp16" else BF16
    assert [value(n).dtype for n in gm.graph.nodes if is_product(n)] == [low, low]
    assert is_near(gm, graph)
    ours, theirs = run_step(gm, graph.given).grads, run_step(graph.gm, graph.given).grads
    assert all((a - b).norm() <= 0.05 * b.norm() for a, b in zip(ours, theirs, strict=True))


def is_product(node):
    return node.target in (operator.matmul, torch.matmul)


def test_a_large_constant_that_masks_nothing_is_not_saturated():
    gm, _, graph = inserted(lambda s, x: (x @ s.w).clamp(max=1e30).exp() * 1e-30, policy="fp16")
    assert any(1e30 in (*n.args, *n.kwargs.values()) for n in gm.graph.nodes)
    assert is_near(gm, graph)


def test_a_kernel_that_refuses_two_precisions_gets_full_precision():
    gm, _, graph = inserted(lambda s, x: torch.lerp(x @ s.w, x.exp(), 0.5))
    node = next(n for n in gm.graph.nodes if n.target is torch.lerp)
    assert {value(s).dtype for s in node.all_input_nodes} == {FP32}
    assert is_near(gm, graph)


class SharesOutOfNoGrad(InsertCasts):
    """Wrong: lets a cast made inside no_grad serve readers that train."""

    def run(self, gm):
        for node in gm.graph.nodes:
            node.meta[GRAD] = False
        return super().run(gm)


def test_negative_control_a_cast_out_of_no_grad_loses_the_gradient():
    graph = capture_function(read_without_and_with_gradients, X, w=W)
    gm, _ = graph.through([*passes_before(InsertCasts), SharesOutOfNoGrad(options())])
    assert all(grad is None for grad in run_step(gm, graph.given).grads)
