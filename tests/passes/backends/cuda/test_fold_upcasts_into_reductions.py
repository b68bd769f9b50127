"""Reductions read low precision themselves where kernels widen in registers; no bit changes."""

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.backends.cuda.fold_upcasts_into_reductions import FoldUpcastsIntoReductions
from amp_graph.passes.manager import run_passes
from amp_graph.policy import Policy
from tests.passes.graphs import capture_function, differences, passes_for, run_step

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) / 3

POLICY = "bf16,device=cuda,deny=mean"  # which CUDA's list lets be low

READS = {
    "a sum": lambda s, x: (x @ s.w).sum(-1),
    "of all": lambda s, x: torch.sum(x @ s.w),
    "a mean": lambda s, x: torch.mean(x @ s.w, dim=(0, 1), keepdim=True),
    "a norm": lambda s, x: torch.linalg.vector_norm(x @ s.w, dim=-1),
    "a product": lambda s, x: (x @ s.w).prod(-1),
}
KEPT = {
    "of full precision": lambda s, x: x.sum(-1),
    "that says its dtype": lambda s, x: (x @ s.w).sum(-1, dtype=torch.float64),
    "of what others read in full": lambda s, x: ((h := (x @ s.w).exp()).sum(-1), h),
    "whose kernel does not": lambda s, x: (x @ s.w).var(-1),
    "of several operations": lambda s, x: F.mse_loss(x @ s.w, x),
}


def passed(function, device="cuda"):
    """Return the graph that is planned for CUDA before and after the pass, what it is given, and what was done."""
    graph, passes = capture_function(function, X, w=W), passes_for(Policy.parse(POLICY), "cuda")
    before = passes[: next(i for i, p in enumerate(passes) if isinstance(p, FoldUpcastsIntoReductions))]
    plain, ours = (graph.through(before)[0] for _ in range(2))
    (done,) = run_passes(ours, [FoldUpcastsIntoReductions(device)], checked=True)
    return plain, ours, graph.given, done.result


@pytest.mark.parametrize("name", READS)
def test_no_cast_is_left_and_no_bit_changes(name):
    plain, ours, given, result = passed(READS[name])
    assert [c.action for c in result.changes] == ["reads low precision"]
    count = [sum(n.target == "float" for n in gm.graph.nodes) for gm in (plain, ours)]
    assert count[1] == count[0] - 1
    assert not differences(run_step(ours, given), run_step(plain, given))


@pytest.mark.parametrize("name", KEPT)
def test_all_else_is_left_alone(name):
    assert not passed(KEPT[name])[3].changes


def test_on_the_cpu_the_cast_stays():
    assert not passed(READS["a sum"], "cpu")[3].changes


def test_what_is_written_meanwhile_is_read_before():
    def function(s, x):
        h = x @ s.w
        wide = h.sum(-1)
        h.mul_(2)
        return wide + h.sum(-1)

    plain, ours, given, _ = passed(function)
    assert not differences(run_step(ours, given), run_step(plain, given))
