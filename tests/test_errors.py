"""Every bad input is refused with what, where and the fix, and leaves the model exactly as it was."""

import linecache
import re

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphError, AmpGraphWarning, CaptureError, ListError, PolicyError
from tests.layers import forward_of, layers


@layers(lambda: dict(first=nn.Linear(16, 32), second=nn.Linear(32, 4)))
def Net(self, x):
    return self.second(torch.tanh(self.first(x)))


class Unchanged:
    """What a model was: state, attributes of it and of its parts, hooks, and what it computes."""

    def __init__(self, model, *inputs):
        self.model, self.inputs = model, inputs
        self.state = {k: (id(v), v.dtype, v.detach().clone()) for k, v in self._tensors()}
        self.attributes = [(name, set(vars(m))) for name, m in model.named_modules()]
        self.result = model(*inputs).detach().clone() if inputs else None

    def _tensors(self):
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    def check(self):
        now = self._tensors()
        assert [k for k, _ in now] == list(self.state)
        for k, v in now:
            kept, dtype, copied = self.state[k]
            assert (id(v), v.dtype) == (kept, dtype)
            assert v.is_meta or torch.equal(v, copied)
        assert [(name, set(vars(m))) for name, m in self.model.named_modules()] == self.attributes
        if self.inputs:
            assert torch.equal(self.model(*self.inputs), self.result)


def refused(model, *given, error=CaptureError, match, inputs=(), **options):
    """`convert` raises `error`; the message has its parts, and the model is as it was."""
    before = Unchanged(model, *inputs)
    with pytest.raises(error, match=match) as caught:
        amp_graph.convert(model, *given, **options)
    assert isinstance(caught.value, AmpGraphError)
    assert "fix:" in str(caught.value)
    before.check()


# -- not a model --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (Net, "the class Net is not a torch.nn.Module"),
        (lambda x: x, "a function is not a torch.nn.Module"),
        (None, "a NoneType is not"),
    ],
    ids=["class", "function", "none"],
)
def test_what_is_no_model(given, what):
    with pytest.raises(CaptureError, match=rf"{what}(?s:.*)legal: an instance of torch.nn.Module(?s:.*)fix:"):
        amp_graph.convert(given)


def test_a_scripted_module():
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):
        scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"(?s)scripted module.*amp_graph.convert of the original model"):
        amp_graph.convert(scripted)


def test_the_meta_device():
    with torch.device("meta"):
        model = Net()
    refused(model, match="(?s)4 tensors are on the meta device.*first.weight.*to_empty")


def test_half_precision_parameters():
    for dtype in (torch.float16, torch.bfloat16):
        told = r"(?s)4 are in half precision.*model\.float\(\)"
        refused(Net().to(dtype), match=told, inputs=(torch.randn(3, 16).to(dtype),))


def test_one_half_precision_parameter_is_named():
    model = Net()
    model.second.bfloat16()
    refused(model, match="2 are in half precision.*second.weight, second.bias")


def test_compiled_in_place():
    model, x = Net(), torch.randn(3, 16)
    model.compile(backend="eager")
    refused(model, match=r"compiled in place by model.compile\(\)", inputs=(x,))


def test_an_unknown_compiler():
    inputs = (torch.randn(3, 16),)
    refused(Net(), "bf16", match=r"unknown compile='inductr'(?s:.*)inductor", inputs=inputs, compile="inductr")


# -- a bad policy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "error", "match"),
    [
        ("bf61", PolicyError, "did you mean 'bf16'"),
        ("bf16,acuracy=fast", PolicyError, "did you mean 'accuracy'"),
        ("bf16,accuracy=best", PolicyError, "unknown accuracy value 'best'"),
        ("bf16,keep_fp32=(", PolicyError, "not a regular expression"),
        ("bf16-O4", PolicyError, "unknown word 'O4'"),
        ("bf16,lists=nowhere", ListError, "no list 'nowhere'"),
        ("bf16,lists=nowhere.toml", ListError, "nowhere.toml"),
        ("bf16,deny=aten.gellu", ListError, "aten.gellu"),
        ("bf16,deny=aten.gelu,allow=aten.gelu", ListError, "aten.gelu is asked for twice"),
        ("bf16,remove=aten.nothing", ListError, "aten.nothing"),
    ],
)
def test_a_policy_that_cannot_be(policy, error, match):
    refused(Net(), policy, error=error, match=match, inputs=(torch.randn(3, 16),))


# -- twice --------------------------------------------------------------------------------------------


def test_converted_again_with_the_same_policy_is_nothing():
    model = amp_graph.convert(Net(), "bf16")
    found = conversion_of(model)
    assert amp_graph.convert(model, amp_graph.Policy("bf16")) is model
    assert conversion_of(model) is found


@pytest.mark.parametrize(("policy", "options"), [("fp16", {}), ("bf16", {"compile": "aot_eager"})])
def test_converted_again_otherwise_names_revert(policy, options):
    model, x = amp_graph.convert(Net(), "bf16"), torch.randn(3, 16)
    told = r"(?s)already converted.*policy='bf16-O1'.*amp_graph\.revert\(model\)"
    refused(model, policy, match=told, inputs=(x,), **options)
    assert conversion_of(model).policy == amp_graph.Policy("bf16")


def test_revert_and_report_of_what_is_not_converted():
    for verb in (amp_graph.revert, amp_graph.report):
        with pytest.raises(CaptureError, match=r"(?s)is not converted.*amp_graph\.convert\(model\)"):
            verb(Net())


# -- nothing to do ------------------------------------------------------------------------------------


def test_no_tensors_at_all():
    @forward_of(nn.Module)
    def Constant(self, x):
        return x

    model, x = amp_graph.convert(Constant()), torch.randn(2)
    with pytest.warns(amp_graph.errors.AmpGraphWarning, match="nothing was captured"):
        assert model(x) is x


# -- forward fails ------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


@layers(lambda kind: dict(fc=nn.Linear(16, 4), kind=kind, raising=True))
def Raises(self, x):
    y = self.fc(x)
    if self.raising:
        raise self.kind("because of reasons", 3)
    return y


@pytest.mark.parametrize("kind", [OwnError, ValueError, RuntimeError, KeyError, NotImplementedError, StopIteration])
def test_the_users_own_exception_is_theirs(kind):
    model, x = amp_graph.convert(Raises(kind)), torch.randn(3, 16)
    for _ in range(2):
        with pytest.raises(kind) as caught:
            model(x)
        assert type(caught.value) is kind
        assert caught.value.args == ("because of reasons", 3)


@pytest.mark.parametrize("given", [(torch.randn(3, 15),), ()], ids=["another shape", "no argument"])
@pytest.mark.parametrize("converted_first", [False, True])
def test_an_error_of_the_call_reads_as_it_does_in_eager(converted_first, given):
    model = Net()
    with pytest.raises((RuntimeError, TypeError)) as eager:
        model(*given)
    amp_graph.convert(model)
    if converted_first:
        model(torch.randn(3, 16))
    before = Unchanged(model)
    with pytest.raises(type(eager.value), match=f"^{re.escape(str(eager.value))}$") as ours:
        model(*given)
    assert type(ours.value) is type(eager.value)
    before.check()
    assert model(torch.randn(3, 16)).shape == (3, 4)
    assert conversion_of(model).runs >= 1


def test_a_part_that_is_converted_already():
    model = torch.nn.Sequential(amp_graph.convert(Net()), torch.nn.Linear(4, 4))
    refused(model, match=r"(?s)already converted: 0.*get_submodule\('0'\)")


# -- warnings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Net(), nn.DataParallel(Net())], ids=["model", "inside of a wrapper"])
def test_a_warning_is_of_the_users_line_and_not_of_ours(model):
    with pytest.warns(AmpGraphWarning, match="matches no module") as said:
        amp_graph.convert(model, "bf16,keep_fp32=third")  # this line
    assert said[0].filename == __file__
    assert linecache.getline(__file__, said[0].lineno).endswith("# this line\n")
