"""Sums of products on CUDA are in fp32 in what was converted, in its backward as well, and nowhere else.

The settings exist without a GPU, too, where nothing reads them: graphs here look at them while they run.
"""

import math
import threading

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture import dynamo_backend
from amp_graph.capture.fp32_accumulation import HELD, accumulating_in_fp32
from amp_graph.passes.torch_compat.devices import set_sums_of_products, sums_of_products
from tests.layers import function_of

OWN = ((True, True), (True, True), True)  # what a process may have set for itself


def settings():
    matmul = torch.backends.cuda.matmul
    reductions = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    return *reductions, matmul.allow_fp16_accumulation


@pytest.fixture(autouse=True)
def _own_settings():
    before = sums_of_products()
    set_sums_of_products(OWN)
    yield
    found = sums_of_products()
    set_sums_of_products(before)
    assert found == OWN


class Looks(torch.autograd.Function):
    """Notes the settings in forward and backward."""

    @staticmethod
    def forward(ctx, x, seen):
        seen.append(settings())
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(settings())
        return grad * 2, None


def held(seen):
    return accumulating_in_fp32(lambda x: (Looks.apply(x, seen), 3))


def test_a_view_of_what_was_written_to_may_be_returned():
    """A hook on one, put there before its ``grad_fn`` is read, ends the process."""

    def written(x):
        whole = x * 2
        part = whole[:2]
        whole.exp_()
        return part

    x = torch.ones(3, requires_grad=True)
    accumulating_in_fp32(written)(x).sum().backward()
    assert x.grad.tolist() == pytest.approx([2 * math.e**2, 2 * math.e**2, 0.0])
    assert settings() == (True, True, True)


def test_forward_and_backward_run_with_sums_in_fp32():
    seen = []
    x = torch.ones(3, requires_grad=True)
    out, number = held(seen)(x)
    assert number == 3
    assert settings() == (True, True, True)
    out.sum().backward()
    assert seen == [(False, False, False)] * 2
    assert x.grad.tolist() == [2, 2, 2]


def test_control_without_it_they_do_not():
    seen = []
    Looks.apply(torch.ones(3, requires_grad=True), seen).sum().backward()
    assert seen == [(True, True, True)] * 2


def test_two_graphs_in_one_backward():
    seen = []
    x = torch.ones(3, requires_grad=True)
    (a, _), (b, _) = held(seen)(x), held(seen)(x)
    torch.autograd.grad((a * b).sum(), x)
    assert seen == [(False, False, False)] * 4


def test_without_gradients_nothing_is_hooked():
    seen = []
    with torch.no_grad():
        out, _ = held(seen)(torch.ones(3, requires_grad=True))
    assert seen == [(False, False, False)]
    assert out._backward_hooks is None


def test_a_call_that_raises_gives_the_settings_back():
    def fails(x):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        accumulating_in_fp32(fails)(torch.ones(3))
    assert settings() == (True, True, True)


def test_a_backward_that_raises_gives_them_back_at_the_next_call():
    def fails(grad, x):
        raise ValueError("no")

    out = accumulating_in_fp32(function_of(lambda x: x * 2, fails).apply)(torch.ones(3, requires_grad=True))
    with pytest.raises(ValueError, match="no"):
        out.sum().backward()
    held([])(torch.ones(3))
    assert settings() == (True, True, True)


def test_calls_of_several_threads_that_overlap():
    inside, leave = threading.Barrier(2), threading.Event()

    def waits(x):
        inside.wait()
        leave.wait()
        return x

    thread = threading.Thread(target=accumulating_in_fp32(waits), args=(torch.ones(1),))
    thread.start()
    inside.wait()
    seen = []
    held(seen)(torch.ones(1))
    assert settings() == (False, False, False)  # of the call that is under way
    leave.set()
    thread.join()
    assert seen == [(False, False, False)]
    assert settings() == (True, True, True)


@pytest.mark.parametrize(
    ("policy", "device", "holds"),
    [
        ("bf16", "cuda", True),
        ("fp16,accuracy=fast", "cuda", True),
        ("bf16", "cpu", False),
        ("fp16,lists=autocast_cuda", "cuda", False),
        ("bf16-O0", "cuda", False),
    ],
)
def test_for_which_graphs(policy, device, holds):
    def run(x):
        return x

    found = dynamo_backend.with_sums_in_fp32(run, amp_graph.Policy.parse(policy), device)
    assert (found is not run) == holds


@pytest.mark.parametrize("compile", ["eager", "aot_eager"])
def test_converted_models_and_steps_are_held(compile, monkeypatch):
    monkeypatch.setattr(dynamo_backend, "device_of", lambda gm: "cuda")
    monkeypatch.setattr("amp_graph.step.trace_step.device_of", lambda gm: "cuda")
    entered = []
    monkeypatch.setattr(type(HELD), "begin", lambda self, user: entered.append("begin"))
    monkeypatch.setattr(type(HELD), "end", lambda self, user: entered.append("end"))
    monkeypatch.setattr(type(HELD), "in_backward", lambda self, grad: entered.append("backward"))
    out = amp_graph.convert(nn.Linear(4, 4), "bf16", compile=compile)(torch.ones(2, 4))
    assert entered == ["begin", "end"]
    out.sum().backward()
    assert entered[2:] == ["backward"]
    other = nn.Linear(4, 4)
    step = amp_graph.TrainStep(
        other, lambda out: out.square().mean(), torch.optim.SGD(other.parameters()), "bf16", compile=compile
    )
    step(torch.ones(2, 4))
    assert entered[3:] == ["begin", "end"]


def test_sums_that_may_have_no_parts_still_may_not():
    found = []
    set_sums_of_products(((False, False), (True, True), False))
    accumulating_in_fp32(lambda: found.append(sums_of_products()))()
    assert found == [((False, False), (False, True), False)]
    set_sums_of_products(OWN)
