"""Dropout drawn by vectors: torch's bits, values, gradients and what is drawn next; an eighth of a byte for each."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.backends.cpu.pointwise import bitmask_dropout as kernel
from amp_graph.passes.backends.cpu.pointwise import lower_dropout
from amp_graph.passes.backends.cpu.pointwise.bitmask_dropout import dropout_in_bits
from amp_graph.passes.native import jit_compiler
from tests.measure import saved_bytes
from tests.passes.builds import INSTRUCTIONS, compile_for
from tests.passes.graphs import Function, capture_function, rewritten

LOW = (torch.bfloat16, torch.float16)
pytestmark = pytest.mark.skipif(kernel.library(torch.bfloat16) is None, reason="needs a C compiler, and torch's draws")


@pytest.fixture(autouse=True)
def it_is_always_profitable(monkeypatch):
    monkeypatch.setattr(lower_dropout, "dropout_in_bits_is_profitable", lambda device, elements: device == "cpu")


@pytest.fixture(params=INSTRUCTIONS)
def any_instructions(request, monkeypatch):
    if compile_for(request.param, monkeypatch):
        monkeypatch.setattr(kernel, "load_if_possible", jit_compiler._loaded)
        found = {dtype: kernel.library.__wrapped__(dtype) for dtype in (torch.float32, *LOW)}
        monkeypatch.setattr(kernel, "library", found.get)


def run(function, x, p, skipped=3):
    """A result, its gradient, and what the generator draws next."""
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    torch.rand(skipped)  # begins amid the generator's state, at an odd word
    out = function(x, p)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    out.backward(grad.masked_fill_(grad > 2, float("inf")))
    return out.detach(), x.grad, torch.rand(5)


def same(one, other):
    """Bit for bit, but for which NaN it is."""
    for a, b in zip(one, other, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.isnan(), b.isnan())
        whole = torch.int32 if a.dtype == torch.float32 else torch.int16
        assert torch.equal(*(t.nan_to_num(7).contiguous().view(whole) for t in (a, b)))


FORMS = {
    "one": lambda x: x[:1],
    "no whole byte": lambda x: x[:5],
    "no whole vector": lambda x: x[:1003],
    "several parts": lambda x: x.view(4, 7, -1),
    "turned": lambda x: x.view(3, -1, 7).transpose(0, 2),
    "images": lambda x: x[:4200].view(2, 3, 20, 35).to(memory_format=torch.channels_last),
    "with gaps": lambda x: x.view(-1, 7)[:, 1:6],
    "turned, with gaps": lambda x: x.view(3, -1, 7).transpose(0, 2)[1:6],
    "of one number": lambda x: x[:1].expand(9, 5),
    "nothing": lambda x: x[:0],
}


@pytest.mark.usefixtures("any_instructions")
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("p", [0.1, 0.3333, 0.5, 0.999])
def test_it_is_torchs(dtype, p):
    x = torch.randn(84 * 840, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[::31], x[::37], x[::41] = float("inf"), float("nan"), -0.0
    for form in FORMS.values():
        same(run(dropout_in_bits, form(x), p), run(F.dropout, form(x), p))


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_the_number_of_threads_changes_nothing(dtype, monkeypatch):
    x = torch.randn(3, 100_001).to(dtype)
    alone = run(dropout_in_bits, x, 0.2)
    monkeypatch.setattr(kernel, "threads_for", lambda elements: 3)
    same(run(dropout_in_bits, x, 0.2), alone)


def test_control_draws_that_begin_a_word_later_differ():
    x = torch.randn(1000)
    with pytest.raises(AssertionError):
        same(run(dropout_in_bits, x, 0.2, skipped=4), run(F.dropout, x, 0.2))


def test_control_a_torch_that_draws_otherwise_keeps_its_own(monkeypatch):
    found = kernel.library(torch.bfloat16)
    assert kernel._draws_as_torch(found)
    theirs = torch.Tensor.bernoulli_
    monkeypatch.setattr(torch.Tensor, "bernoulli_", lambda t, p, generator: theirs(t, p, generator=generator).flip(0))
    assert not kernel._draws_as_torch(found)


def test_second_derivatives_and_several_gradients_at_once():
    def penalty(function):
        x = torch.linspace(-1, 1, 40).requires_grad_()
        torch.manual_seed(0)
        (first,) = torch.autograd.grad(function(x * x, 0.3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        torch.manual_seed(0)
        out = function(x * x, 0.3)
        return first.detach(), second, torch.autograd.grad(out, x, torch.eye(40), is_grads_batched=True)[0]

    same(penalty(dropout_in_bits), penalty(F.dropout))


def test_under_transforms_it_is_torchs_own():
    x = torch.randn(4, 50)
    torch.manual_seed(0)
    found = torch.func.vmap(lambda t: dropout_in_bits(t, 0.3), randomness="different")(x)
    torch.manual_seed(0)
    assert torch.equal(found, torch.func.vmap(lambda t: F.dropout(t, 0.3), randomness="different")(x))


def test_another_default_device_is_not_drawn_on():
    x = torch.randn(1000, device="cpu")
    plain = run(dropout_in_bits, x, 0.2)
    kernel._scale_of.cache_clear()
    kernel.library.cache_clear()
    torch.set_default_device("meta")
    try:
        torch.manual_seed(3)
        torch.rand(3, device="cpu")
        found = dropout_in_bits(x, 0.2)
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, plain[0])


def test_threads_do_not_draw_the_same():
    kept = []
    workers = [threading.Thread(target=lambda: kept.append(dropout_in_bits(torch.ones(50_000), 0.5))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(not torch.equal(a, b) for i, a in enumerate(kept) for b in kept[:i])


# -- in graphs ----------------------------------------------------------------------------------------------

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) / 3
CALLS = {
    "of low": lambda s, x: F.dropout(x @ s.w, 0.5) @ s.w,
    "of full": lambda s, x: F.dropout(x.exp(), 0.25, True) @ s.w,
    "by name": lambda s, x: F.dropout(input=x @ s.w, p=0.1, training=True).relu(),
    "torch's": lambda s, x: torch.dropout(x @ s.w, 0.1, train=True).exp(),
    "two": lambda s, x: F.dropout(F.dropout(x @ s.w, 0.5) + x, 0.1) @ s.w,
}
OTHERS = {
    "in place": lambda s, x: F.dropout(x @ s.w, 0.5, True, inplace=True) @ s.w,
    "in evaluation": lambda s, x: F.dropout(x @ s.w, 0.5, False) @ s.w,
    "of all": lambda s, x: F.dropout(x @ s.w, 1.0) @ s.w,
    "of whole channels": lambda s, x: F.dropout1d(x @ s.w, 0.5, True),
    "of alpha": lambda s, x: F.alpha_dropout(x @ s.w, 0.5, True),
}


def passed(function, policy="bf16"):
    model = amp_graph.convert(Function(function, w=W.clone()), policy)
    torch.manual_seed(0)
    out = model(X)
    out.float().square().sum().backward()
    return [out.detach(), model.w.grad, torch.rand(3)], amp_graph.report(model).graphs[0].text


@pytest.mark.parametrize("name", CALLS)
def test_a_model_computes_the_same(name):
    found, text = passed(CALLS[name])
    plain, without = passed(CALLS[name], "bf16,skip=lower_dropout")
    assert "dropout_in_bits" in text
    assert "dropout_in_bits" not in without
    same(found, plain)


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_is_left_alone(name):
    assert "dropout_in_bits" not in passed(OTHERS[name])[1]


def test_graphs_for_compilers_are_left_alone():
    assert "dropout_in_bits" not in rewritten(capture_function(CALLS["of low"], X, w=W)).code


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(32, 512), nn.Linear(512, 32), nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(self.second(self.drop(self.first(x).relu())))


def test_a_bit_is_saved_for_each_number():
    """Torch saves noise of the size of what is dropped: of bf16 sixteen times as much."""
    x = torch.randn(64, 32)
    bytes_of = {}
    for policy in ("bf16", "bf16,skip=lower_dropout"):
        model = amp_graph.convert(Net(), policy)
        model(x).sum().backward()
        bytes_of[policy] = saved_bytes(lambda model=model: model(x), model)
    numbers = 64 * (512 + 32)
    with_bits, with_noise = bytes_of.values()
    assert with_noise - with_bits >= numbers * 2 - numbers // 8 - 100


def test_a_step_as_a_graph_draws_what_a_loop_does():
    model, x, y = Net(), torch.randn(64, 32), torch.randn(64, 32)
    loop = amp_graph.convert(copy.deepcopy(model), "bf16")
    optimizer = torch.optim.SGD(loop.parameters(), 0.1)
    torch.manual_seed(5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(F.mse_loss(loop(x), y))
        losses[-1].backward()
        optimizer.step()
    stepped = copy.deepcopy(model)
    step = amp_graph.TrainStep(stepped, F.mse_loss, torch.optim.SGD(stepped.parameters(), 0.1), policy="bf16")
    torch.manual_seed(5)
    assert torch.equal(torch.stack([step(x, y) for _ in range(3)]).detach(), torch.stack(losses).detach())
    assert "amp_graph.dropout_bits" in step.graph_text()
    assert "bernoulli" not in step.graph_text()
