"""Triton kernels at full size on a GPU: long rows, many rows, more than 2**31 elements, and whole models.

``tests/passes/backends/cuda/kernels`` compares every form at small sizes, on a GPU as in Triton's interpreter.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.loss.cross_entropy_functions import cross_entropy_and_logits, cross_entropy_low
from amp_graph.passes.backends.cpu.norm.add_norm_by_torch import norm_by_torch, norm_gradients_by_torch
from amp_graph.passes.backends.cpu.norm.add_norm_functions import add_norm
from amp_graph.passes.backends.cuda.kernels import add_norm as norms
from amp_graph.passes.backends.cuda.kernels import cross_entropy as losses
from amp_graph.passes.backends.cuda.kernels import optimizer_update
from amp_graph.passes.native.triton_loader import VARIABLE, why_failed, why_no_triton

BF16, FP16 = torch.bfloat16, torch.float16
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    if why := why_no_triton():
        pytest.skip(why)
    yield
    assert not why_failed(), "a fallback hides a kernel that does not work"
    torch.cuda.empty_cache()


def error(got, exact):
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


def check_loss(logits, target, rows, smoothing=0.0):
    """Compare the loss and the gradient of some ``rows`` with torch's in fp64."""
    losses_, stats = losses.cross_entropy_and_stats(logits, target, None, -100, smoothing)
    grad = torch.ones((), device="cuda").expand(len(losses_))
    made = losses.cross_entropy_backward_of_stats(grad, logits, stats, target, None, None, -100, smoothing)
    x = logits[rows].double().requires_grad_()
    exact = F.cross_entropy(x, target[rows], reduction="none", label_smoothing=smoothing)
    (exact_grad,) = torch.autograd.grad(exact.sum(), x)
    assert error(losses_[rows], exact.detach()) < 1e-6
    assert error(made[rows], exact_grad) <= 1.02 * error(exact_grad.to(logits.dtype), exact_grad)


@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("classes", [30522, 32000, 50257, 128256, 262144])
def test_vocabularies(classes, low):
    logits = (4 * torch.randn(300, classes, device="cuda")).to(low)
    target = torch.randint(classes, (300,), device="cuda")
    target[::7] = -100
    for smoothing in (0.0, 0.1):
        check_loss(logits, target, slice(0, 40), smoothing)
        check_loss(logits, target, slice(260, 300), smoothing)


def test_more_rows_than_a_grid_has_in_its_other_dimensions():
    logits = torch.randn(200_000, 129, device="cuda").to(BF16)
    target = torch.randint(129, (200_000,), device="cuda")
    check_loss(logits, target, slice(199_000, 200_000))


def test_more_logits_than_an_int32_counts():
    rows = 2**31 // 128256 + 100
    logits = torch.empty(rows, 128256, device="cuda", dtype=BF16).normal_()
    target = torch.randint(128256, (rows,), device="cuda")
    check_loss(logits, target, slice(rows - 20, rows))


def test_rows_farther_apart_than_an_int32_counts():
    memory = torch.empty(2**31 + 2008, device="cuda", dtype=BF16)
    logits = memory.as_strided((2, 1000), (2**31 + 1000, 1)).normal_()
    check_loss(logits, torch.tensor([5, 999], device="cuda"), slice(0, 2))


@pytest.mark.parametrize("centered", [True, False], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize(
    "size", [(70_000, 768), (9_000, 4099), (4_000, 8192), (2_000, 16384), (290_000, 8192)], ids=str
)
def test_rows_of_norms(size, centered):
    rows, width = size
    large = rows * width > 2**31
    x = torch.empty(size, device="cuda", dtype=BF16 if large else torch.float32).normal_()
    branch = None if large else torch.randn(size, device="cuda").to(BF16)
    weight, bias = torch.randn(2, width, device="cuda")
    stats, *made = norms.forward(x, branch, weight, bias, width, 1e-5, BF16, True, False, centered)
    total = x if branch is None else made[0]
    wants = (not large, True, True, True)
    grads = norms.backward([made[-1]], None, total, stats, weight, width, BF16, *wants, centered)
    end = slice(rows - 100, rows)
    few = [None if t is None else t[end].double() for t in (x, branch)]
    exact = norm_by_torch(*few, weight.double(), bias.double(), width, 1e-5, BF16, False, True, centered)[-1]
    assert error(made[-1][end], exact) < 2**-8
    again = ([made[-1][end]], None, total[end], stats[:, end], weight, width, BF16)
    expected = norm_gradients_by_torch(*again, True, False, False, False, centered)[0]
    assert error(grads[not large][end], expected) < 2**-8
    if not large:
        expected = norm_gradients_by_torch([made[-1]], None, total, stats, weight, width, BF16, *wants, centered)
        for got, want in zip(grads, expected, strict=True):
            assert error(got, want) < (2**-8 if got.dtype == BF16 else 1e-5)


def test_neither_waits_for_the_device():
    x = torch.randn(512, 1000, device="cuda").to(BF16).requires_grad_()
    stream, weight = torch.randn(512, 1000, device="cuda").requires_grad_(), torch.randn(1000, device="cuda")
    target = torch.randint(1000, (512,), device="cuda")

    def step():
        cross_entropy_low(x, target).backward()
        total, low = add_norm(stream, x, (1000,), weight, weight, 1e-5, BF16, 1, False, True)
        (total.sum() + low.sum()).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Model(nn.Module):
    """A head over 32,768 words behind two residual blocks of 8,192 tokens: all above what is profitable."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(32768, 512)
        self.norms = nn.ModuleList(nn.LayerNorm(512) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))

    def forward(self, ids):
        x = self.words(ids)
        for norm, block in zip(self.norms, self.blocks, strict=False):
            x = x + block(norm(x))
        logits = F.linear(self.norms[2](x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


def gradients(model, ids, dtype=None):
    with torch.autocast("cuda", dtype or BF16, enabled=dtype is not None):
        loss = model(ids)
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    return [p.grad.double() for p in model.parameters()], torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_model_is_as_exact_as_under_autocast_and_takes_less(policy):
    ids = torch.randint(32768, (16, 512), device="cuda")
    model = amp_graph.convert(Model().cuda(), policy)
    found, peak = gradients(model, ids)
    (graph,) = conversion_of(model).graphs
    targets = [n.target for n in graph.rewritten.gm.graph.nodes]
    assert sum(t in (cross_entropy_low, cross_entropy_and_logits) for t in targets) == 1
    assert sum(getattr(t, "__name__", "").startswith("add_norm") for t in targets) == 3
    theirs, their_peak = gradients(Model().cuda(), ids, getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[policy]))
    exact, _ = gradients(Model().cuda().double(), ids)
    for ours, other, right in zip(found, theirs, exact, strict=True):
        assert error(ours, right) <= 1.1 * error(other, right)
    assert peak < their_peak - 2**28 * 4 * 0.5, "one of two fp32 copies of the logits at least"


def test_whole_steps_recorded_or_not_are_the_loop():
    ids = torch.randint(32768, (16, 512), device="cuda")
    results = []
    for options in ({}, {"cuda_graph": True}):
        model = Model().cuda()
        step = amp_graph.TrainStep(model, None, torch.optim.SGD(model.parameters(), 0.1), "bf16", **options)
        results.append([step(ids).item() for _ in range(6)])
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    assert results[0][-1] < results[0][0]


# -- the optimizer's update -------------------------------------------------------------------------------------------


def test_an_update_of_more_elements_than_an_int32_counts():
    """The last elements are those of torch's rule in fp64, and a verdict leaves all of them as they are."""
    size = 2**31 + 5001
    p, g = torch.empty(size, device="cuda").normal_(), torch.empty(size, device="cuda", dtype=BF16).normal_()
    low, end = torch.empty(size, device="cuda", dtype=BF16), slice(size - 5000, size)
    before, lr = p[end].clone(), torch.tensor(0.1, device="cuda")
    verdict = torch.ones((), device="cuda")
    for bad, moved in ((1, 0.0), (0, 0.1)):
        own = ([p], [g], [], [], [low], [0], lr, verdict.fill_(bad), None, None)
        optimizer_update.update(*own, rule="sgd bf16")
        assert (p[end].double() - (before.double() - moved * g[end].double())).abs().max() < 1e-6
        assert torch.equal(low[end], p[end].to(BF16))
    assert optimizer_update.look([g])[1].item() == pytest.approx(size**0.5, rel=1e-2)
