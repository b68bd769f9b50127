"""Activations by tables: torch's bits, whatever number, layout and instructions; in every mode of autograd."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import amp_graph
from amp_graph.passes.backends.cpu.pointwise import lookup_activations, lookup_table
from amp_graph.passes.backends.cpu.pointwise.lookup_table import (
    FORMS,
    activated,
    activation_by_table,
    gradient_by_table,
)
from amp_graph.passes.native import jit_compiler
from amp_graph.passes.profitability import thresholds
from tests.measure import saved_bytes
from tests.passes.builds import INSTRUCTIONS, compile_for
from tests.passes.graphs import Function, capture_function, rewritten

BF16 = torch.bfloat16

pytestmark = pytest.mark.skipif(lookup_table.library() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def it_is_always_profitable(monkeypatch):
    monkeypatch.setattr(lookup_activations, "table_is_profitable", lambda device, form, elements: device == "cpu")


def every_number(extra=13):
    """All there are, and some more, so that the last vector is not full."""
    bits = torch.arange((1 << 16) + extra, dtype=torch.int32).to(torch.int16)
    return bits[torch.randperm(len(bits), generator=torch.Generator().manual_seed(0))].view(BF16)


def same(one, other):
    assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    assert torch.equal(one.isnan(), other.isnan())
    assert torch.equal(*(t.masked_fill(t.isnan(), 0).view(torch.int16) for t in (one, other)))


def near(one, other):
    """Within one rounding, or for what underflows on the way within the least of normal numbers."""
    assert torch.equal(one.isnan(), other.isnan())
    a, b = (t.nan_to_num().double() for t in (one, other))
    assert ((a - b).abs() <= b.abs() * 2**-7 + 2**-125).all()


@pytest.fixture(params=INSTRUCTIONS)
def any_instructions(request, monkeypatch):
    typed = lookup_table.library()
    if not compile_for(request.param, monkeypatch):
        return
    found = jit_compiler._loaded(lookup_table.SOURCE, ())
    found.look_up.argtypes, found.times_slope.argtypes = typed.look_up.argtypes, typed.times_slope.argtypes
    monkeypatch.setattr(lookup_table, "library", lambda: found)


by_vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch's GELU without vector instructions has other slopes below 3e-8: 181 of all numbers",
)


@pytest.mark.usefixtures("any_instructions")
@pytest.mark.parametrize("form", [pytest.param(form, marks=[by_vectors] * (form == "gelu")) for form in FORMS])
def test_every_number_has_torchs_bits(form):
    x = every_number()
    same(activation_by_table(x, form), FORMS[form][0](x))
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(BF16)
    (same if "gelu" in form else near)(gradient_by_table(grad, x, form), FORMS[form][1](grad, x))


@pytest.mark.parametrize("form", FORMS)
def test_slopes_are_near_those_of_fp64(form):
    x = every_number()
    x = x[x.isfinite() & (x.abs() < 80)]
    wide = x.double().requires_grad_()
    FORMS[form][0](wide).sum().backward()
    found = gradient_by_table(torch.ones_like(x), x, form).double()
    assert ((found - wide.grad).abs() <= wide.grad.abs() * 2**-8 + 2e-6).all()


def test_control_a_wrong_number_is_found_out(monkeypatch):
    table = lookup_table._values("gelu").clone()
    table.view(torch.int16)[0x3F80] += 1  # of 1: the next above
    monkeypatch.setattr(lookup_table, "_values", lambda form: table)
    x = every_number()
    with pytest.raises(AssertionError):
        same(activation_by_table(x, "gelu"), F.gelu(x))


LAYOUTS = {
    "rows": lambda t: t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(1, 3),
    "cut": lambda t: t[:, 1:, :, ::2],
    "expanded": lambda t: t[:1].expand(3, -1, -1, -1),
    "nothing": lambda t: t[:0],
}


@pytest.mark.parametrize("of_x", LAYOUTS)
@pytest.mark.parametrize("of_grad", ["rows", "transposed", "expanded"])
def test_any_layout(of_x, of_grad):
    torch.manual_seed(0)
    x = LAYOUTS[of_x](torch.randn(3, 6, 8, 10).to(BF16))
    grad = torch.randn(x.shape).to(BF16)
    if of_grad != "rows" and len(x):
        grad = grad.transpose(1, 3).contiguous().transpose(1, 3) if of_grad == "transposed" else grad[:1].expand_as(x)
    given = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2)]
    outs = activated(given[0], "gelu by tanh"), F.gelu(given[1], approximate="tanh")
    assert torch.equal(*outs)
    for out in outs:
        out.backward(grad)
    assert torch.equal(given[0].grad, given[1].grad)


@by_vectors
@pytest.mark.parametrize("threads", [2, 3])
def test_threads(threads, monkeypatch):
    monkeypatch.setattr(lookup_table, "threads_for", lambda count: threads)
    x = every_number()
    same(activation_by_table(x, "silu"), F.silu(x))
    same(gradient_by_table(torch.ones_like(x), x, "gelu"), FORMS["gelu"][1](torch.ones_like(x), x))


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives_and_several_gradients(form):
    x = torch.randn(64).to(BF16).requires_grad_()
    grad = torch.randn(64).to(BF16)

    def second(function):
        (first,) = torch.autograd.grad(function(x), x, grad, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    assert torch.equal(second(lambda x: activated(x, form)), second(FORMS[form][0]))
    many = torch.randn(3, 64).to(BF16)
    (together,) = torch.autograd.grad(activated(x, form), x, many, is_grads_batched=True)
    for one, g in zip(together, many, strict=True):
        near(one, FORMS[form][1](g, x.detach()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_transforms_and_what_has_no_memory():
    x = torch.randn(4, 64).to(BF16)
    assert torch.equal(torch.vmap(lambda row: activated(row, "gelu"))(x), F.gelu(x))
    assert activated(x.to("meta"), "silu").is_meta
    assert torch.equal(activation_by_table(x.float(), "gelu"), F.gelu(x.float())), "not bf16"
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        assert forward_ad.unpack_dual(activated(dual, "mish")).tangent is not None


def test_tables_are_the_cpus_whatever_device_is_the_default():
    for made in (lookup_table._values, lookup_table._slopes):
        made.cache_clear()
    x = every_number()
    with torch.device("meta"):
        found = activated(x.clone().requires_grad_(), "gelu")
        found.backward(torch.ones_like(found))
    same(found.detach(), F.gelu(x))


def test_without_a_compiler_it_is_torchs(monkeypatch):
    monkeypatch.setattr(lookup_table, "library", lambda: None)
    x = every_number()
    same(activation_by_table(x, "mish"), F.mish(x))


# -- the pass -----------------------------------------------------------------------------------------------------

W = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)) / 4
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
CALLS = {
    "gelu": lambda s, x: F.gelu(x @ s.w),
    "by tanh": lambda s, x: F.gelu(x @ s.w, approximate="tanh"),
    "silu": lambda s, x: F.silu(x @ s.w),
    "mish": lambda s, x: F.mish(x @ s.w),
    "read by a product": lambda s, x: F.gelu(x @ s.w) @ s.w,
    "read by one, by tanh": lambda s, x: F.gelu(x @ s.w, approximate="tanh") @ s.w,
    "of all three": lambda s, x: F.silu(F.gelu(F.mish(x @ s.w) @ s.w) @ s.w) @ s.w,
    "modules": lambda s, x: nn.Mish()(nn.GELU("tanh")(nn.SiLU()(x @ s.w))),
}
OTHERS = {
    "in place": lambda s, x: F.silu(x @ s.w, inplace=True),
    "fp32": lambda s, x: F.gelu(x * s.w[0]),
    "another": lambda s, x: F.elu(x @ s.w),
}


def passed(function, policy="bf16"):
    model = amp_graph.convert(Function(function, w=W.clone()), policy)
    out = model(X)
    out.float().square().sum().backward()
    return [out.detach(), model.w.grad], amp_graph.report(model).graphs[0].text


@pytest.mark.parametrize("recompute", ["most", "all"])
@pytest.mark.parametrize("name", CALLS)
def test_a_model_computes_the_same(name, recompute):
    found, text = passed(CALLS[name], f"bf16,recompute={recompute}")
    plain, without = passed(CALLS[name], f"bf16,recompute={recompute},skip=lookup_activations")
    assert text != without
    assert torch.equal(found[0], plain[0])
    assert (found[1] - plain[1]).norm() <= (0 if "gelu" in name or "tanh" in name else 2**-8) * plain[1].norm()


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_is_left_alone(name):
    assert passed(OTHERS[name])[1] == passed(OTHERS[name], "bf16,skip=lookup_activations")[1]


def test_graphs_for_compilers_are_left_alone():
    assert "by_table" not in rewritten(capture_function(CALLS["gelu"], X, w=W)).code


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.third(F.mish(self.second(F.gelu(self.first(x), approximate="tanh"))))


def test_what_is_looked_up_again_is_not_saved():
    function, x = (lambda s, x: F.gelu(x @ s.w, approximate="tanh") @ s.w), torch.randn(64, 256)
    saved = {}
    for policy in ("bf16,recompute=all", "bf16,recompute=all,skip=recompute_activations"):
        model = amp_graph.convert(Function(function, w=torch.randn(256, 256) / 16), policy)
        model(x)
        saved[policy] = saved_bytes(lambda model=model: model(x), model, weight_copies=False)
    assert saved["bf16,recompute=all"] == saved["bf16,recompute=all,skip=recompute_activations"] - 64 * 256 * 2


@pytest.mark.parametrize("recompute", ["most", "all"])
def test_a_step_has_the_bits_of_the_loop(recompute):
    torch.manual_seed(0)
    base, x = Net(), torch.randn(24, 32)
    policy = f"bf16,recompute={recompute}"
    loop, whole = amp_graph.convert(copy.deepcopy(base), policy), copy.deepcopy(base)
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1)
    step = amp_graph.TrainStep(whole, F.mse_loss, torch.optim.SGD(whole.parameters(), lr=0.1), policy)
    for turn in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(loop(x + turn), x)
        loss.backward()
        optimizer.step()
        assert torch.equal(step(x + turn, x), loss)
    for p, q in zip(whole.parameters(), loop.parameters(), strict=True):
        assert torch.equal(p, q)


def test_sizes_that_pay(monkeypatch):
    monkeypatch.setattr(thresholds, "cpu_has_bf16", lambda: True)
    for units in (True, False):
        monkeypatch.setattr(thresholds, "cpu_has_amx", lambda units=units: units)
        assert thresholds.table_is_profitable("cpu", "gelu", 1 << 20) is units
        assert thresholds.table_is_profitable("cpu", "mish", 1 << 20)
        assert not thresholds.table_is_profitable("cpu", "mish", 1 << 10)
        assert not thresholds.table_is_profitable("cuda", "mish", 1 << 20)
    monkeypatch.setattr(thresholds, "cpu_has_bf16", lambda: False)
    assert not thresholds.table_is_profitable("cpu", "mish", 1 << 20)
