"""Which embeddings are planned to get their gradient in one write on CUDA, and why others are not; no GPU is needed."""

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.backends.cuda.embedding_functions import low_rows, tied_rows
from amp_graph.passes.backends.cuda.kernels import embedding_gradient
from amp_graph.passes.backends.cuda.lower_embedding_gradients import LowerEmbeddingGradients
from amp_graph.passes.manager import run_passes
from amp_graph.passes.native import kernel_table
from amp_graph.passes.native.run_compiler import CompilerError
from amp_graph.passes.profitability import cuda_kernel_thresholds
from amp_graph.passes.profitability.cuda_kernel_thresholds import (
    bytes_of_embedding_gradient,
    embedding_kernel_is_profitable,
)
from amp_graph.policy import Policy
from tests.passes.graphs import BF16, capture_function, passes_for, run_step

KERNEL, ROWS, WIDTH = "embedding_gradient on cuda", 23, 16
IDS = torch.randint(ROWS, (4, 6), generator=torch.Generator().manual_seed(1))
STATE = {
    "table": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2)),
    "w": torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)) / 4,
}


def refuses(*_, **__):
    raise CompilerError("no Triton kernel: compute capability 7.5 is below 8.0\n  more")


@pytest.fixture(autouse=True)
def _however_small(monkeypatch):
    """Plan for a GPU; what runs here is torch's."""
    monkeypatch.setattr(cuda_kernel_thresholds, "LEAST_SPARED", 1)
    monkeypatch.setitem(kernel_table._loaders, KERNEL, lambda low: None)
    monkeypatch.setattr(embedding_gradient, "launch", refuses)


def passed(function, device="cuda", policy="bf16,device=cuda"):
    graph = capture_function(function, IDS, **STATE)
    passes = passes_for(Policy.parse(policy), "cpu", eager=True)
    before = passes[: next(i for i, p in enumerate(passes) if isinstance(p, LowerEmbeddingGradients))]
    plain, ours = (graph.through(before)[0] for _ in range(2))
    (done,) = run_passes(ours, [LowerEmbeddingGradients(device)], checked=True)
    return plain, ours, graph.given, done.result


def calls(gm):
    return [n.target for n in gm.graph.nodes if n.target in (low_rows, tied_rows)]


def tied(s, ids):
    return F.linear(F.linear(F.embedding(ids, s.table), s.w), s.table)


def tied_stream(s, ids):
    x = F.embedding(ids, s.table)
    return F.linear(x + F.linear(x, s.w), s.table)


def twice(s, ids):
    return F.linear(F.embedding(ids, s.table) + F.embedding(ids.flip(0), s.table), s.table).sin()


def read_before(s, ids):
    h = F.linear(s.w, s.table)
    return F.embedding(ids, s.table).sum(1) @ s.w + h.sum()


FOUND = {
    "one reader": (lambda s, ids: F.linear(F.embedding(ids, s.table, 3), s.w), [low_rows]),
    "two readers": (lambda s, ids: (x := F.embedding(ids, s.table)).sum() + F.linear(x, s.w), [low_rows]),
    "a bag": (lambda s, ids: F.linear(F.embedding_bag(ids, s.table, mode="sum"), s.w), [low_rows]),
    "tied": (tied, [tied_rows]),
    "tied, to a stream": (tied_stream, [tied_rows]),
    "tied, and read twice": (twice, [tied_rows, low_rows]),
    "the product comes first": (read_before, [low_rows]),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_planned_computes_the_same(name):
    function, expected = FOUND[name]
    plain, ours, given, result = passed(function)
    assert calls(ours) == expected
    assert [c.action for c in result.changes] == ["one write"] * len(expected)
    a, b = run_step(ours, given), run_step(plain, given)
    assert all(map(torch.equal, a.outputs, b.outputs))
    for x, y in zip(a.grads, b.grads, strict=True):
        assert (x is None) is (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_the_cast_of_the_result_and_of_the_table_join_in():
    plain, ours, _, _ = passed(tied)
    casts = [sum(n.target == "bfloat16" for n in gm.graph.nodes) for gm in (plain, ours)]
    assert casts[1] == casts[0] - 2
    (rows, low) = (n.meta["val"].dtype for n in ours.graph.nodes if n.name.startswith("getitem"))
    assert (rows, low) == (BF16, BF16)


def frequent(s, ids):
    return F.linear(F.embedding(ids, s.table, scale_grad_by_freq=True), s.w)


def written(s, ids):
    x = F.embedding(ids, s.table)
    x.mul_(2)
    return F.linear(x, s.w)


LEFT = {
    "scaled by frequency": (frequent, "not a plain sum of rows"),
    "sparse": (lambda s, ids: F.linear(F.embedding(ids, s.table, sparse=True), s.w), "not a plain sum of rows"),
    "written in place": (written, "written in place"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_says_why(name):
    function, reason = LEFT[name]
    _, ours, _, result = passed(function)
    assert not calls(ours)
    assert [reason in s.reason for s in result.skips] == [True]


def test_a_computed_table_and_inference_are_left():
    assert not calls(passed(lambda s, ids: F.linear(F.embedding(ids, s.table * 2), s.w))[1])
    with torch.no_grad():
        graph = capture_function(tied, IDS, **STATE)
        passes = passes_for(Policy.parse("bf16,device=cuda"), "cpu", eager=True)
        assert not calls(graph.through(passes)[0])


def test_on_the_cpu_nothing_is_done():
    assert not calls(passed(tied, device="cpu")[1])


def test_without_a_kernel_the_embedding_is_torchs_with_the_reason(monkeypatch):
    monkeypatch.setitem(kernel_table._loaders, KERNEL, refuses)
    _, ours, _, result = passed(tied)
    assert not calls(ours)
    assert [s.reason for s in result.skips] == ["no Triton kernel: compute capability 7.5 is below 8.0"]


def test_small_tables_are_left_alone(monkeypatch):
    monkeypatch.setattr(cuda_kernel_thresholds, "LEAST_SPARED", 1 << 26)
    _, ours, _, result = passed(tied)
    assert not calls(ours)
    assert result.skips[0].reason == "torch's is as fast for 24 indices of 23 x 16: 0.0 MB would be spared"


def test_when_it_is_profitable(monkeypatch):
    monkeypatch.undo()

    def pays(*given):
        return embedding_kernel_is_profitable("cuda", bytes_of_embedding_gradient(*given))

    assert pays(8192, 50257, 1024, False, True), "GPT-2 medium, whose head is tied"
    assert not pays(8192, 50257, 1024, False, False), "at most 34 MB of rows are written twice"
    assert pays(32768, 30522, 768, True, False), "a gradient in low precision is not upcast"
    assert not pays(512, 512, 768, False, False)
    assert not embedding_kernel_is_profitable("cpu", 1 << 40)


# -- the functions -------------------------------------------------------------------------------------------------


def test_second_derivatives_and_batched_gradients_are_torchs():
    def penalty(function, dtype):
        table = STATE["table"].to(dtype).requires_grad_()
        rows, low = function(table)
        first = torch.autograd.grad((rows.sin() * 2).sum() + low.cos().sum(), table, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), table)[0]

    got = penalty(lambda t: tied_rows(t, IDS, 3, False, torch.float32, torch.float32), torch.float32)
    expected = penalty(lambda t: (F.embedding(IDS, t, 3), t * 1), torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    table = STATE["table"].clone().requires_grad_()
    rows = low_rows(table, IDS, None, False, BF16)
    seeds = torch.stack([torch.ones_like(rows), torch.full_like(rows, 2)])
    (batched,) = torch.autograd.grad(rows, table, seeds, is_grads_batched=True)
    assert torch.equal(batched[1], 2 * batched[0])


def test_transforms_and_results_that_nobody_reads():
    table = STATE["table"]
    made = torch.func.grad(lambda t: low_rows(t, IDS, 3, False, BF16).float().sum())(table)
    assert torch.equal(made, torch.func.grad(lambda t: F.embedding(IDS, t, 3).sum())(table))
    trained = table.clone().requires_grad_()
    rows, low = tied_rows(trained, IDS, None, False, torch.float32, BF16)
    assert rows.dtype == torch.float32
    assert torch.equal(torch.autograd.grad(low.float().sum(), trained)[0], torch.ones_like(table))
    with torch.no_grad():
        assert not any(t.requires_grad for t in tied_rows(trained, IDS, None, False, BF16, BF16))
