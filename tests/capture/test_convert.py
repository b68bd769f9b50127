"""`convert` and `revert`: the same object before, during and after, and it computes in low precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import CaptureError
from tests.corpus import make
from tests.layers import layers

BF16 = torch.bfloat16


@layers(
    lambda width=16, out=4: dict(
        first=nn.Linear(width, 32),
        norm=nn.BatchNorm1d(32),
        second=nn.Linear(32, out),
        shift=nn.Buffer(torch.ones(out), persistent=False),
    )
)
def Net(self, x):
    return self.second(F.gelu(self.norm(self.first(x)))) + self.shift


# -- the same object ----------------------------------------------------------------------------------


def test_parameters_keys_and_dtypes_stay():
    model = Net()
    model.second.weight.requires_grad_(False)
    identities = {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    keys = list(model.state_dict())
    wanted = {n: (p.requires_grad, p.dtype) for n, p in model.named_parameters()}
    modules = [name for name, _ in model.named_modules()]
    amp_graph.convert(model)
    model(torch.randn(6, 16)).sum().backward()
    assert {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]} == identities
    assert list(model.state_dict()) == keys
    assert {n: (p.requires_grad, p.dtype) for n, p in model.named_parameters()} == wanted
    assert [name for name, _ in model.named_modules()] == modules
    assert model.second.weight.grad is None
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


def test_frozen_later_and_thawed_later():
    """`requires_grad` is the user's to change between calls."""
    model, x = amp_graph.convert(Net()), torch.randn(6, 16)
    model(x).sum().backward()
    model.first.requires_grad_(False)
    model.zero_grad()
    model(x).sum().backward()
    assert model.first.weight.grad is None
    assert model.second.weight.grad is not None
    model.first.requires_grad_(True)
    model(x).sum().backward()
    assert model.first.weight.grad is not None


def test_outputs_keep_their_captured_dtype_unless_told():
    x = torch.randn(6, 16)
    assert amp_graph.convert(Net(), "bf16")(x).dtype == torch.float32
    head = nn.Sequential(nn.Linear(16, 4))
    assert amp_graph.convert(head, "bf16,keep_outputs=false")(x).dtype == BF16


def test_weights_changed_from_outside_are_seen():
    """No stale copy of a weight is kept: the value at the call is the value used."""
    model, x = amp_graph.convert(nn.Linear(16, 4)), torch.randn(6, 16)
    model(x)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(3.0)
    assert torch.equal(model(x), torch.full((6, 4), 3.0))
    model.weight = nn.Parameter(torch.zeros(4, 16))
    model.bias = nn.Parameter(torch.full((4,), 5.0))
    assert torch.equal(model(x), torch.full((6, 4), 5.0))


# -- hooks --------------------------------------------------------------------------------------------


def test_hooks_fire_before_and_after_conversion():
    model, seen, x = Net(), [], torch.randn(6, 16)
    model.register_forward_pre_hook(lambda m, args: seen.append("root pre"))
    model.second.register_forward_hook(lambda m, args, out: seen.append("inner"))
    amp_graph.convert(model)
    model.register_forward_hook(lambda m, args, out: seen.append("root post"))
    model(x)
    assert seen == ["root pre", "inner", "root post"]
    model(x)
    assert seen == ["root pre", "inner", "root post"] * 2
    assert conversion_of(model).graphs


@pytest.mark.parametrize("where", ["", "second"])
def test_a_hook_registered_after_the_first_call_fires_until_it_is_removed(where):
    model, x = amp_graph.convert(Net().eval()), torch.randn(6, 16)
    plain = model(x)
    handle = model.get_submodule(where).register_forward_hook(lambda m, args, out: out * 0 + 7)
    assert torch.equal(model(x), torch.full((6, 4), 8.0 if where else 7.0))
    handle.remove()
    assert torch.equal(model(x), plain)


def test_backward_hooks_fire():
    model, seen, x = Net(), [], torch.randn(6, 16)
    model.first.weight.register_hook(lambda g: seen.append(("parameter", g.dtype)))
    amp_graph.convert(model)
    out = model(x)
    out.register_hook(lambda g: seen.append(("output", g.dtype)))
    out.sum().backward()
    assert seen == [("output", torch.float32), ("parameter", torch.float32)]


# -- revert -------------------------------------------------------------------------------------------


def test_revert_leaves_nothing_behind():
    model, x = Net().eval(), torch.randn(6, 16)
    before, attributes = model(x), set(vars(model))
    amp_graph.convert(model)
    assert not torch.equal(model(x), before)
    assert amp_graph.revert(model) is model
    assert torch.equal(model(x), before)
    assert set(vars(model)) == attributes
    with pytest.raises(CaptureError, match="not converted"):
        amp_graph.report(model)


def test_level_o0_runs_as_written():
    model, x = Net().eval(), torch.randn(6, 16)
    before = model(x)
    amp_graph.convert(model, "bf16-O0")
    assert torch.equal(model(x), before)
    assert not conversion_of(model).graphs


# -- what goes in and comes out -----------------------------------------------------------------------


def test_dataclass_outputs_keep_their_type():
    (model, args, _), (plain, *_) = make("output_dataclass"), make("output_dataclass")
    amp_graph.convert(model)
    for _ in range(2):
        assert type(model(*args)) is type(plain(*args))
    assert conversion_of(model).runs == 2


@pytest.mark.parametrize("name", ["input_written", "buffer_written"])
def test_writes_into_inputs_and_buffers_are_seen_by_the_caller(name):
    (model, args, _), (plain, others, _) = make(name), make(name)
    amp_graph.convert(model, "bf16")
    held = [*args, *model.buffers()]
    places = [t.data_ptr() for t in held]
    for _ in range(3):
        model(*args), plain(*others)
    assert [id(t) for t in (*args, *model.buffers())] == list(map(id, held))
    assert [t.data_ptr() for t in held] == places
    torch.testing.assert_close(held, [*others, *plain.buffers()], rtol=2e-2, atol=5e-2)
