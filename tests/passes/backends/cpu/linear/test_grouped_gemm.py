"""Products of groups of rows: as fp64 says, whatever groups there are; models of experts train in low precision."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.linear import grouped_gemm as module
from amp_graph.passes.backends.cpu.linear.grouped_gemm import gradient_by_groups, grouped_product, rows_by_groups
from tests.passes.graphs import Function

pytest.importorskip("transformers.integrations.moe")  # registers the operator
BF16 = torch.bfloat16
ENDS = {
    "all have rows": (3, 40, 64),
    "some have none": (0, 50, 50, 64),
    "rows behind the last": (5, 20),
    "one has all": (64,),
    "none has any": (0, 0, 0),
}


@pytest.fixture(autouse=True)
def it_is_always_profitable(monkeypatch):
    monkeypatch.setattr(
        module, "grouped_product_is_profitable", lambda device, dtype: device == "cpu" and dtype == BF16
    )


def operands(ends, depth=48, columns=80, turned=False):
    torch.manual_seed(0)
    weight = torch.randn(len(ends), *((columns, depth) if turned else (depth, columns)))
    return torch.randn(64, depth).to(BF16), weight.to(BF16), torch.tensor(ends, dtype=torch.int32)


def exact(x, weight, ends, turned):
    made, start = x.new_zeros(len(x), weight.shape[1 if turned else 2]), 0
    for one, end in zip(weight, ends, strict=True):
        made[start:end] = x[start:end] @ (one.t() if turned else one)
        start = end
    return made


def near(found, wanted, bits=8):
    return (found.double() - wanted).norm() <= 2.0**-bits * wanted.norm()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("size", [(48, 80), (300, 511)])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_values_and_gradients_are_those_of_fp64(ends, size, turned):
    x, weight, offs = operands(ends, *size, turned)
    wide = [t.double().requires_grad_() for t in (x, weight)]
    wanted = exact(*wide, ends, turned)
    grad = torch.randn(wanted.shape).to(BF16)
    wanted.backward(grad.double())
    low = [t.requires_grad_() for t in (x, weight)]
    found = grouped_product(*low, offs, turned)
    found.backward(grad)
    assert near(found, wanted)
    for one, other in zip(low, wide, strict=True):
        assert one.grad.dtype == BF16
        assert near(one.grad, other.grad)
    if any(ends):
        assert not near(grouped_product(*low, offs.roll(1).sort().values - 1, turned), wanted), "other groups"


@pytest.mark.parametrize("turned", [False, True])
def test_a_gradient_in_fp32_is_rounded_once_at_most(turned):
    x, _, offs = operands(ENDS["some have none"])
    grad = torch.randn(64, 80).to(BF16)
    a, b = (grad, x) if turned else (x, grad)
    found = gradient_by_groups(a, b, offs, 4, wide=True)
    assert found.dtype == torch.float32
    assert near(found[1], a[:50].double().t() @ b[:50].double())
    assert not found[[0, 2]].any()


def test_what_lies_in_other_ways():
    x, weight, offs = operands(ENDS["all have rows"])
    wanted = rows_by_groups(x, weight, offs, False)
    wider = torch.empty(64, 100, dtype=BF16)
    wider[:, ::2][:, :48] = x
    assert torch.equal(rows_by_groups(wider[:, ::2][:, :48], weight, offs, False), wanted)
    assert torch.equal(rows_by_groups(x, weight.mT.contiguous().mT, offs, False), wanted)
    assert torch.equal(rows_by_groups(x, weight.mT.contiguous(), offs, True), wanted)
    assert torch.equal(rows_by_groups(x, weight, offs.long(), False), wanted)


def test_second_derivatives_and_several_gradients():
    x, weight, offs = operands(ENDS["rows behind the last"])
    wanted = exact(*(t.double().requires_grad_() for t in (x, weight)), ENDS["rows behind the last"], False)

    def twice(function, x, weight):
        (grad,) = torch.autograd.grad(function(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), weight)[0]

    wide = [t.double().requires_grad_() for t in (x, weight)]
    of_exact = twice(lambda x, w: exact(x, w, ENDS["rows behind the last"], False), *wide)
    assert near(
        twice(lambda x, w: grouped_product(x, w, offs, False), x.requires_grad_(), weight.requires_grad_()), of_exact, 5
    )
    many = torch.randn(3, *wanted.shape).to(BF16)
    together = torch.autograd.grad(grouped_product(x, weight, offs, False), weight, many, is_grads_batched=True)[0]
    for one, grad in zip(together, many, strict=True):
        (alone,) = torch.autograd.grad(grouped_product(x, weight, offs, False), weight, grad)
        assert near(one, alone.double())


class Experts(nn.Module):
    """As HF's: the rows of each expert one behind the other, weights [experts, outputs, inputs]."""

    def __init__(self, fixed=None):
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *size) / 6) for size in ((64, 32), (32, 64)))
        self.fixed = fixed

    def forward(self, x):
        chosen = self.router(x).argmax(-1) if self.fixed is None else self.fixed
        order = torch.argsort(chosen, stable=True)
        ends = F.one_hot(chosen, 4).sum(0).cumsum(0).to(torch.int32)
        by_groups = torch.ops.transformers.grouped_mm_fallback
        rows = F.relu(by_groups(x[order], self.up.transpose(-2, -1), offs=ends))
        made = by_groups(rows, self.down.transpose(-2, -1), offs=ends)
        return torch.zeros_like(made).index_add(0, order, made)


def by_linears(model, x, chosen):
    return torch.stack([F.relu(row @ model.up[e].t()) @ model.down[e].t() for row, e in zip(x, chosen, strict=True)])


def calls(model):
    nodes = [n for graph in conversion_of(model).graphs for n in graph.rewritten.gm.graph.nodes]
    return [n for n in nodes if n.target is grouped_product]


def test_experts_train_in_low_precision():
    torch.manual_seed(0)
    chosen = torch.randint(4, (96,))
    model, x = Experts(chosen), torch.randn(96, 32)
    wide = copy.deepcopy(model).double()
    wanted = by_linears(wide, x.double(), chosen)
    wanted.square().sum().backward()
    amp_graph.convert(model)
    for _ in range(2):
        model.zero_grad()
        out = model(x)
        out.square().sum().backward()
    assert [call.args[3] for call in calls(model)] == [True, True]
    assert near(out, wanted, 6)
    for name in ("up", "down"):
        assert getattr(model, name).grad.dtype == torch.float32
        assert near(getattr(model, name).grad, getattr(wide, name).grad, 5)


def test_other_groups_are_no_other_graph():
    torch.manual_seed(0)
    model = amp_graph.convert(Experts())
    for _ in range(4):
        model(torch.randn(96, 32)).sum().backward()
    assert len(conversion_of(model).graphs) == 1


def test_a_step_has_the_bits_of_the_loop():
    torch.manual_seed(0)
    base, x = Experts(), torch.randn(96, 32)
    loop, whole = amp_graph.convert(copy.deepcopy(base)), copy.deepcopy(base)
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1)
    step = amp_graph.TrainStep(whole, F.mse_loss, torch.optim.SGD(whole.parameters(), lr=0.1), "bf16")
    for turn in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(loop(x + turn), x)
        loss.backward()
        optimizer.step()
        assert torch.equal(step(x + turn, x), loss)


def test_torchs_own_operator_in_bf16():
    """Which takes bf16 alone where it is captured."""

    def function(s, x):
        ends = torch.arange(1, 5, dtype=torch.int32) * 24
        return torch._grouped_mm(x.bfloat16(), s.w.bfloat16().transpose(-2, -1), offs=ends)

    torch.manual_seed(0)
    model, x = Function(function, w=torch.randn(4, 64, 32)), torch.randn(96, 32)
    wanted = exact(x.to(BF16).double(), model.w.to(BF16).double(), (24, 48, 72, 96), True)
    amp_graph.convert(model)
    found = model(x)
    found.float().sum().backward()
    assert len(calls(model)) == 1
    assert near(found, wanted)


def test_where_it_does_not_pay_torchs_own_stays(monkeypatch):
    monkeypatch.setattr(module, "grouped_product_is_profitable", lambda device, dtype: False)
    model = amp_graph.convert(Experts())
    model(torch.randn(96, 32)).sum().backward()
    assert not calls(model)


def test_models_of_the_library():
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    model, ids = transformers.MixtralForCausalLM(config), torch.randint(64, (2, 12))
    amp_graph.convert(model)
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(calls(model)) == 4
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
