"""What is concatenated with nothing keeps its bits, and its precision."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.passes.manager import run_passes
from amp_graph.passes.recognize.empty_concat_operands import RemoveEmptyConcatOperands
from tests.measure import CastCounter
from tests.passes.graphs import BF16, FP32, capture_function, differences, passes_before, run_step, with_and_without

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) / 3


def nothing(*shape, dtype=FP32):
    return torch.empty(shape or (0,), dtype=dtype)


LEFT_OUT = {
    "the beginning of a cache": lambda s, x: torch.cat([torch.tensor([], dtype=x.dtype), x @ s.w], dim=-2),
    "behind": lambda s, x: torch.cat((x @ s.w, nothing()), 1),
    "twice, beside two": lambda s, x: torch.cat([nothing(), x, nothing(), x @ s.w], dim=0),
    "by name": lambda s, x: torch.concat(tensors=[nothing(), x @ s.w], dim=-1),
    "of another dtype": lambda s, x: torch.cat([nothing(dtype=BF16), x @ s.w]),
}
KEPT = {
    "nothing but nothing": lambda s, x: (torch.cat([nothing(), nothing()]), x @ s.w),
    "nothing of a shape": lambda s, x: torch.cat([nothing(2, 0, 8), x @ s.w], 1),
    "the wider dtype is its own": lambda s, x: (torch.cat([nothing(), torch.arange(3)]), x @ s.w),
    "a vector of one": lambda s, x: torch.cat([torch.zeros(1), (x @ s.w).flatten()]),
}


def passed(function):
    return with_and_without(RemoveEmptyConcatOperands(), capture_function(function, X, w=W))


@pytest.mark.parametrize("name", LEFT_OUT)
def test_it_is_left_out_and_no_bit_changes(name):
    plain, ours, given, result = passed(LEFT_OUT[name])
    assert [c.action for c in result.changes] == ["deleted"]
    assert not differences(run_step(ours, given), run_step(plain, given))
    assert not run_passes(ours, [RemoveEmptyConcatOperands()], checked=True)[0].result.changes


@pytest.mark.parametrize("name", KEPT)
def test_what_is_left_alone(name):
    plain, ours, given, result = passed(KEPT[name])
    assert not result.changes
    assert not differences(run_step(ours, given), run_step(plain, given))


def test_the_result_is_a_copy_still():
    def function(s, x):
        h = x @ s.w
        copied = torch.cat([nothing(), h], 1)
        copied.mul_(2)
        return h, copied

    plain, ours, given, result = passed(function)
    assert result.changes
    assert not differences(run_step(ours, given), run_step(plain, given))


def test_what_a_gradient_is_asked_of_stays():
    graph = capture_function(lambda s, x: torch.cat([s.empty, x @ s.w], 1), X, w=W, empty=nothing())
    ours, _ = graph.through(passes_before(RemoveEmptyConcatOperands))
    (done,) = run_passes(ours, [RemoveEmptyConcatOperands()], checked=True)
    assert not done.result.changes
    assert any(g is not None and g.shape == (0,) for g in run_step(ours, graph.given).grads)


class Caches(torch.nn.Module):
    """As transformers does by default: keys go through a cache, which the caller gets."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        k, v = (torch.cat([torch.tensor([], dtype=t.dtype), t], dim=-2) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)), k, v


def casts_of_keys(policy):
    """Phases of the casts of keys and values in the second step, in order."""
    model, x = amp_graph.convert(Caches(), policy), torch.randn(2, 5, 16)
    for _ in range(2):
        with CastCounter(model) as casts:
            loss = model(x)[0].square().mean()
            casts.phase = "backward"
            loss.backward()
    return [c.phase for c in casts.events if c.shape == (2, 2, 5, 8)]


def test_keys_stay_low_behind_a_cache_that_begins():
    """Only what is returned is widened; the control casts for attention, and gradients there and back.

    Its code reads the dtype of the keys, and would find it low where calls are captured under autocast.
    """
    assert casts_of_keys("bf16") == casts_of_keys("bf16,escaped=fp32") == ["forward"] * 2
    painted = "bf16,escaped=fp32,planner=paint"  # least cost would cast keys once for both
    assert Counter(casts_of_keys(f"{painted},skip=remove_empty_concat_operands")) == {"forward": 2, "backward": 4}
