"""A value that a steep function or a cancellation reads is rounded only where ``torch.autocast`` rounds it."""

import math
import operator

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.passes.casts.insert_casts import InsertCasts
from amp_graph.passes.precision import rule_based_planner
from tests.passes.graphs import Function, capture_function, passes_until
from tests.random_chains import NAMES, errors, too_large, wrong_behind_chains

POLICIES = ("bf16", "bf16,accuracy=fast", "bf16,accuracy=1.0", "fp16,accuracy=3")
WIDTH = 64


def rotary(s, x, t):
    f = t * (1 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH))
    f = torch.cat((f, f), -1)
    return x * f.cos() + x.roll(1, -1) * f.sin()


def timesteps(s, x, t):
    a = 1000 * t / 4000 * torch.exp(-torch.arange(WIDTH // 2) / 7)
    return x + torch.cat((a.sin(), a.cos()), -1)


def fourier_features(s, x, t):
    a = (2 * math.pi * x) * s.frequencies
    return torch.stack((a.sin(), a.cos()), -1).flatten(1)[:, :WIDTH]


def nerf(s, x, t):
    a = x[..., None] * (2.0 ** torch.arange(10)) * math.pi
    return torch.cat((a.sin(), a.cos()), -1).flatten(1)[:, :WIDTH]


def dct(s, x, t):
    k = torch.arange(WIDTH) / 1
    return x @ torch.cos(math.pi / WIDTH * (k[:, None] + 0.5) * k[None])


def noise_schedule(s, x, t):
    kept = torch.cumprod((1 - 1e-5 * s.frequencies.abs()) * 1.0, -1)
    return x * (1 - kept).sqrt() * 30


def segment_sums(s, x, t):
    c = x.abs().cumsum(0) * 5
    return (c[:, None] - c[None]).tril(-1).sum(1) * 0.01 + (-(c[1:] - c[:-1]).abs()).exp().sum(0)


def absolute_alibi(s, x, t):
    scores = x @ s.w.T + t.T.abs() * -0.125
    return scores.softmax(-1)


def variance_by_hand(s, x, t):
    y = (x + 100) * 1.0
    return y - y.mean(-1, keepdim=True)


KINDS = [
    rotary, timesteps, fourier_features, nerf, dct, noise_schedule, segment_sums, absolute_alibi, variance_by_hand,
]  # fmt: skip
KINDS = {kind.__name__: kind for kind in KINDS} | {
    "through_a_norm": lambda s, x, t: torch.sin(300 * F.layer_norm(x + x @ s.w, (WIDTH,))),
    "through_a_product_with_low": lambda s, x, t: torch.sin(torch.where(x > 0, x @ s.w, t) * 1.5),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("function", KINDS.values(), ids=KINDS)
def test_what_is_read_steeply_is_as_exact_as_under_autocast(function, policy):
    state = {"w": torch.randn(WIDTH, WIDTH) / 8, "frequencies": torch.randn(WIDTH) * 10}
    inputs = (torch.randn(64, WIDTH, requires_grad=True), torch.arange(3000.0, 3064.0)[:, None])
    assert not too_large(errors(lambda s, x, t: (function(s, x, t) @ s.w,), policy, inputs, state))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_each_operation_where_it_is_ill_conditioned(seed, policy):
    assert not wrong_behind_chains(seed, policy)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["bf16,accuracy=fast", "bf16,accuracy=3", "fp16,accuracy=3"])
def test_a_control_without_the_rule_is_found(policy, monkeypatch):
    monkeypatch.setattr(rule_based_planner, "kept_as_in_autocast", lambda problem, low: {})
    assert len(wrong_behind_chains(0, policy)) > 3


def test_every_elementwise_operation_and_reduction_of_the_lists_is_tried():
    lists = amp_graph.Policy.parse("bf16").op_list("cpu")
    listed = {rule.op.split(".")[1] for rule in lists if rule.cls in ("follow", "deny", "fp32_inside")}
    assert {name for name in listed if _computes(name)} - set(NAMES) == OTHERS


# Answers, counts and indices, a random slope, and the neighbour of a number in its own dtype.
OTHERS = set(
    "all any argmax argmin count_nonzero eq ge gt isfinite isinf isnan isneginf isposinf le logical_and logical_not"
    " logical_or logical_xor lt ne signbit rrelu nextafter".split()
)


def _computes(name):
    packet = getattr(torch.ops.aten, name, None)
    tags = {tag for one in packet.overloads() for tag in getattr(packet, one).tags} if packet else set()
    return bool(tags & {torch.Tag.pointwise, torch.Tag.reduction})


def added_through_a_view(s, scores, mask):
    scores.view(-1, *scores.shape[1:]).add_(mask)
    return scores


SCORES = {
    "baddbmm": lambda q, k, mask: torch.baddbmm(mask, q, k.mT, beta=2, alpha=0.5),
    "addmm": lambda q, k, mask: torch.addmm(mask[0], q[0], k[0].T)[None],
    "add_": lambda q, k, mask: (q @ k.mT).div_(2).add_(mask),
    "sub_": lambda q, k, mask: (q @ k.mT).mul(0.5).sub_(mask),
    "iadd": lambda q, k, mask: operator.iadd(torch.bmm(q, k.mT), mask),
    "view": lambda q, k, mask: added_through_a_view(None, q @ k.mT, mask).clamp(min=-1e4),
    "converted": lambda q, k, mask: torch.baddbmm(mask.to(q.dtype), q, k.mT),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["bf16", "fp16,emulate=cuda", "bf16,accuracy=fast,skip=recognize"])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("written", SCORES)
def test_a_mask_is_added_to_scores_in_fp32(written, log, policy):
    def attention(s, x, mask):
        q = x @ s.w
        scores = SCORES[written](q, q.roll(1, -1), mask)
        return (scores.log_softmax(-1).exp() if log else scores.softmax(-1)) @ q

    x, mask = torch.randn(2, 9, 8, requires_grad=True), 1000 + 0.4 * torch.arange(9.0) + torch.zeros(2, 9, 9)
    model = Function(attention, w=torch.randn(8, 8) / 3)
    want = model(x, mask)
    assert ((amp_graph.convert(model, policy)(x, mask) - want).norm() / want.norm()).item() < 0.02


def test_the_bias_of_a_layer_is_added_in_its_product():
    given = {"w": torch.ones(8, 8), "b": torch.ones(8)}
    graph = capture_function(lambda s, x: torch.addmm(s.b, x, s.w).softmax(-1), torch.ones(8, 8), **given)
    gm, _ = graph.through(passes_until(InsertCasts))
    assert [n for n in gm.graph.nodes if "addmm" in str(n.target)]
