"""Masks that hide nothing, and causal masks, are removed from attention; all others stay."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.recognize.constant_attention_masks import FoldConstantMasks
from tests.corpus import make
from tests.passes.graphs import capture, capture_function, differences, run_step, standard_passes, with_and_without

N, S = 7, 5
Q, K, V = torch.randn(3, 2, 3, N, 8, generator=torch.Generator().manual_seed(1))
ATTEND = F.scaled_dot_product_attention


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def as_transformers_makes_it(s, q, k, v):
    at = torch.arange(N)
    seen = at.new_ones((), dtype=torch.bool) & (at[None, None, None, :] <= at[None, None, :, None])
    return ATTEND(q, k, v, attn_mask=seen.expand(2, -1, N, N), scale=0.3)


def added(s, q, k, v):
    return ATTEND(q, k, v, torch.full((N, N), -math.inf).triu(1), 0.0)


def added_least(s, q, k, v):
    mask = torch.zeros(N, N).masked_fill(~ones(N, N).tril(), torch.finfo(torch.float32).min)
    return ATTEND(q, k, v, attn_mask=mask[None, None])


AHEAD = {f.__name__: f for f in (as_transformers_makes_it, added, added_least)}
NOTHING = {
    "all is seen": lambda s, q, k, v: ATTEND(q, k, v, attn_mask=torch.arange(N).expand(2, 1, N, N) >= 0),
    "zeros are added": lambda s, q, k, v: ATTEND(q, k, v, attn_mask=torch.zeros(N, N)),
    "of fewer keys": lambda s, q, k, v: ATTEND(q, k[:, :, :S], v[:, :, :S], attn_mask=ones(N, S)),
}
KEPT = {
    "what lies behind": lambda s, q, k, v: ATTEND(q, k, v, attn_mask=ones(N, N).triu()),
    "a window": lambda s, q, k, v: ATTEND(q, k, v, attn_mask=ones(N, N).tril() & ones(N, N).triu(-2)),
    "one pair": lambda s, q, k, v: ATTEND(q, k, v, attn_mask=(torch.arange(N * N) != 5).view(N, N)),
    "of fewer keys": lambda s, q, k, v: ATTEND(q, k[:, :, :S], v[:, :, :S], attn_mask=ones(N, S).tril()),
    "of one head": lambda s, q, k, v: ATTEND(
        q, k, v, attn_mask=(torch.arange(3) != 1).view(3, 1, 1) | ones(N, N).tril()
    ),
    "small numbers added": lambda s, q, k, v: ATTEND(q, k, v, attn_mask=torch.full((N, N), -5.0).triu(1)),
    "of what is given": lambda s, q, k, v: ATTEND(q, k, v, attn_mask=(q[..., :1] < 100).expand(2, 3, N, N)),
    "drawn": lambda s, q, k, v: ATTEND(q, k, v, attn_mask=torch.rand(N, N) >= 0),
    "written": lambda s, q, k, v: ATTEND(q, k, v, attn_mask=ones(N, N).fill_(True)),
    "none": lambda s, q, k, v: ATTEND(q, k, v),
    "told already": lambda s, q, k, v: ATTEND(q, k, v, is_causal=True),
}


def passed(function):
    return with_and_without(
        FoldConstantMasks(), capture_function(function, *(t.clone().requires_grad_() for t in (Q, K, V)))
    )


def calls(gm):
    return [n for n in gm.graph.nodes if n.target is ATTEND]


@pytest.mark.parametrize(
    ("function", "ahead"), [(f, True) for f in AHEAD.values()] + [(f, False) for f in NOTHING.values()]
)
def test_they_are_left_out(function, ahead):
    plain, ours, given, result = passed(function)
    assert [c.action for c in result.changes] == ["removed the mask"]
    (call,) = calls(ours)
    assert ("is_causal" in call.kwargs) == ahead
    assert "attn_mask" not in call.kwargs
    assert call.kwargs.get("scale") == calls(plain)[0].kwargs.get("scale")
    assert {n.op for n in call.all_input_nodes} <= {"placeholder", "call_function"}
    assert not any(n.name.startswith(("arange", "full", "zeros", "ones")) for n in ours.graph.nodes)
    a, b = run_step(ours, given), run_step(plain, given)
    for one, other in zip((*a.outputs, *a.grads), (*b.outputs, *b.grads), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KEPT)
def test_all_others_stay(name):
    plain, ours, given, result = passed(KEPT[name])
    assert not result.changes
    if name != "drawn":
        assert not differences(run_step(ours, given), run_step(plain, given))


def test_control_a_mask_that_is_taken_for_another_shows():
    _, ours, given, _ = passed(added)
    _, wrong, _, _ = passed(KEPT["what lies behind"])
    assert (run_step(ours, given).outputs[0] - run_step(wrong, given).outputs[0]).abs().max() > 0.1


def test_sizes_that_are_not_known_stay():
    graph = capture_function(
        lambda s, q, k, v: ATTEND(q, k, v, attn_mask=torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)),
        Q, K, V, dynamic=True,
    )  # fmt: skip
    assert not with_and_without(FoldConstantMasks(), graph)[3].changes


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_causal_models_of_transformers_say_so(name):
    model, args, kwargs = make(name)
    amp_graph.convert(model, "bf16")(*args, **kwargs)
    text = amp_graph.report(model).graphs[0].text
    assert "is_causal=True" in text
    assert "attn_mask" not in text


def test_a_switch_keeps_them():
    class Masked(nn.Module):
        def forward(self, q):
            return ATTEND(q, q, q, attn_mask=torch.ones(N, N, dtype=torch.bool))

    graph = capture(Masked(), Q)
    texts = [graph.through(standard_passes("bf16" + skip))[0].code for skip in ("", ",skip=fold_constant_masks")]
    assert ["attn_mask" in text for text in texts] == [False, True]
