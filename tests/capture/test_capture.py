"""Capture: every call of a converted model runs converted, however often it is captured, or says that not."""

import copy
import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphWarning, CaptureError
from tests.corpus import CASES, make
from tests.layers import layers
from tests.measure import PRODUCTS, DtypeLog, products
from tests.warned import warnings_are_errors

BF16 = torch.bfloat16
RECURRENT = {"amp_graph.lstm_forward", "amp_graph.gru_forward", "aten.mkldnn_rnn_layer", "aten.lstm", "aten.gru"}
RECURRENT |= {"aten._thnn_fused_lstm_cell"}


@layers(lambda width=16, out=4: dict(first=nn.Linear(width, 32), drop=nn.Dropout(0.1), second=nn.Linear(32, out)))
def Net(self, x):
    return self.second(self.drop(F.gelu(self.first(x))))


def assert_runs_low(model, *args, dtype=BF16, names=PRODUCTS, **kwargs):
    """Two calls, of which the first may capture: both run a captured graph, in low precision."""
    before = conversion_of(model).runs
    model(*args, **kwargs)
    assert conversion_of(model).runs > before
    assert not amp_graph.report(model).skipped
    found = products(model, *args, names=names, **kwargs)
    assert found
    assert set(found) == {dtype}
    assert conversion_of(model).runs - before >= 2


def count(model):
    return len(conversion_of(model).graphs)


# -- when it captures ---------------------------------------------------------------------------------


def test_modes_are_captured_apart_and_remembered():
    model, x = amp_graph.convert(Net()), torch.randn(3, 16)
    assert_runs_low(model, x)
    with torch.no_grad():
        assert_runs_low(model, x)
    with torch.inference_mode():
        assert_runs_low(model, x)
        assert model(x).is_inference()
    assert_runs_low(model.eval(), x)
    seen = count(model)
    for training in (True, False, True):
        model.train(training)
        assert_runs_low(model, x)
    assert count(model) == seen
    found = amp_graph.report(model).graphs
    assert {(g.training, g.grad) for g in found} >= {(True, True), (True, False), (False, True)}


def test_forward_itself_is_converted():
    model, x = amp_graph.convert(Net().eval()), torch.randn(3, 16)
    assert set(products(model.forward, x)) == {BF16}
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)


def test_generate_of_transformers():
    model, _, kwargs = make("gpt2")
    given = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    plain = model.eval().generate(kwargs["input_ids"], **given)
    amp_graph.convert(model, "bf16")
    assert torch.equal(model.generate(kwargs["input_ids"], **given), plain)
    assert conversion_of(model).runs == 2


@layers(lambda: dict(table=nn.Embedding(9, 16), head=nn.Linear(16, 4)))
def Gather(self, ids, scale=1):
    return self.head(self.table(ids)) * scale


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_other_shapes_and_integer_dtypes(dtype):
    model = amp_graph.convert(Gather())
    for length in (3, 5, 7):
        ids = torch.arange(length) % 9
        assert_runs_low(model, ids)
        assert_runs_low(model, ids.to(dtype))
        assert_runs_low(model, ids, 2)
        assert_runs_low(model, ids, scale=0.5)


def test_float64_and_half_inputs_are_captured_as_they_come():
    @layers(lambda: dict(fc=nn.Linear(8, 4)))
    def Scale(self, x, y):
        return self.fc(x) * y

    model, x = amp_graph.convert(Scale()), torch.randn(3, 8)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        out = model(x, torch.ones(3, 4, dtype=dtype))
        assert out.dtype == torch.promote_types(torch.float32, dtype)


# -- no limit turns a later call into fp32 ------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, False])
def test_twenty_shapes_of_one_model(dynamic):
    model = amp_graph.convert(Net(), dynamic=dynamic, max_graphs=20)
    for rows in range(2, 22):
        assert_runs_low(model, torch.randn(rows, 16))
    assert conversion_of(model).runs == 40
    assert count(model) == (20 if dynamic is False else 2)


def test_twenty_switches_of_one_model_with_many_flags():
    """Each layer's mode is a guard of its own: twenty different states."""
    model, x = (
        amp_graph.convert(nn.Sequential(*[nn.Dropout(0.1) for _ in range(5)], nn.Linear(16, 4)), max_graphs=20),
        torch.randn(3, 16),
    )
    for state in range(20):
        for bit, layer in enumerate(list(model)[:5]):
            layer.train(bool(state >> bit & 1))
        assert_runs_low(model, x)
    assert count(model) == 20


def test_one_conversion_does_not_disturb_another():
    first, second, x = Net(), Net(), torch.randn(3, 16)
    amp_graph.convert(first, "bf16")
    amp_graph.convert(second, "fp16,accuracy=fast")
    for _ in range(2):
        assert_runs_low(first, x)
        assert_runs_low(second, x, dtype=torch.float16)
    assert set(products(Net(), x)) == {torch.float32}
    amp_graph.revert(first)
    assert set(products(first, x)) == {torch.float32}
    assert_runs_low(second, x, dtype=torch.float16)


# -- roots that Dynamo skips --------------------------------------------------------------------------


@pytest.mark.parametrize("root", [nn.Linear(16, 4), nn.Sequential(nn.Linear(16, 4)), nn.Bilinear(16, 16, 3)])
def test_roots_of_torch_nn(root):
    x = torch.randn(3, 16)
    given = (x, x) if isinstance(root, nn.Bilinear) else (x,)
    root = amp_graph.convert(copy.deepcopy(root))
    before = conversion_of(root).runs
    root(*given)
    assert conversion_of(root).runs == before + 1
    if not isinstance(root, nn.Bilinear):
        assert_runs_low(root, *given)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN, nn.GRU])
def test_recurrent_roots(kind):
    model, x = kind(8, 8, batch_first=True), torch.randn(2, 5, 8)
    plain = model(x)[0]
    amp_graph.convert(model, "bf16")
    with warnings_are_errors():
        out = model(x)[0]
    assert conversion_of(model).runs == 1
    torch.testing.assert_close(out, plain, rtol=0.05, atol=0.02)
    assert set(products(model, x, names=PRODUCTS | RECURRENT)) == {BF16}


# -- what is not captured -----------------------------------------------------------------------------


@layers(lambda: dict(fc=nn.Linear(8, 8)))
def Breaks(self, x):
    x = self.fc(x)
    torch._dynamo.graph_break()  # the line to be named
    return self.fc(x)


def test_a_graph_break_is_reported_with_the_users_line():
    model = amp_graph.convert(Breaks())
    model(torch.randn(2, 8))
    first, second = amp_graph.report(model).graphs
    assert first.break_reason
    assert __file__ in first.break_line
    assert "graph_break()" in first.break_line
    assert not second.break_line
    with open(__file__) as source:
        line = next(i for i, text in enumerate(source, 1) if "the line to be named" in text)
    assert f":{line}, in Breaks" in first.break_line
    assert_runs_low(model, torch.randn(2, 8))


@layers(lambda: dict(fc=nn.Linear(8, 4)))
@torch._dynamo.disable
def Hidden(self, x):
    return self.fc(x)


def test_nothing_captured_is_a_warning_with_the_cause():
    model, x = amp_graph.convert(Hidden()), torch.randn(2, 8)
    line = inspect.unwrap(Hidden.forward).__code__.co_firstlineno
    told = (
        rf"Hidden: nothing was captured.* in fp32.* under torch.autocast.+: (?s:.*){re.escape(__file__)}:{line}(?s:.*)"
    )
    fix = "fix:   remove the torch.compiler.disable, or convert the modules that it calls$"
    with pytest.warns(AmpGraphWarning, match=told + fix):
        out = model(x)
    assert torch.equal(out, F.linear(x, model.fc.weight, model.fc.bias))
    with torch.autocast("cpu", BF16):
        low = F.linear(x, model.fc.weight, model.fc.bias)
    for _ in range(9):  # capture is tried again meanwhile
        assert model(x).dtype == torch.float32
    assert torch.equal(model(x), low.float())
    assert any("nothing was captured" in note for note in amp_graph.report(model).notes)
    with warnings_are_errors():
        model(x)  # said once


def test_nothing_captured_runs_in_fp32_where_autocast_does_not_know_the_policy():
    model, x = amp_graph.convert(Hidden(), "bf16,deny=gelu"), torch.randn(2, 8)
    with pytest.warns(AmpGraphWarning, match=r"Hidden: nothing was captured, so this call ran in fp32: .+"):
        out = model(x)
    assert torch.equal(out, F.linear(x, model.fc.weight, model.fc.bias))
    assert torch.equal(out, model(x))


# -- other people's context ---------------------------------------------------------------------------


def test_called_under_autocast_the_plan_decides():
    model, x = Net().eval(), torch.randn(3, 16)
    amp_graph.convert(model, "fp16")
    alone = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_runs_low(model, x, dtype=torch.float16)
        assert torch.equal(model(x), alone)
        assert torch.is_autocast_enabled("cpu")
    assert any("torch.autocast" in note for note in amp_graph.report(model).notes)


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast_inside_is_obeyed(enabled):
    name = "autocast_enabled_inside" if enabled else "autocast_disabled_inside"
    model, args, kwargs = make(name)
    amp_graph.convert(model, "fp16")
    model(*args, **kwargs)
    found = products(model, *args, **kwargs)
    inside = torch.bfloat16 if enabled else torch.float32
    assert found == [torch.float16] * 2 + [inside] * 2 + [torch.float16] * 2


def test_a_converted_part_of_an_unconverted_model():
    model, x = nn.Sequential(nn.Linear(16, 16), Net()), torch.randn(3, 16)
    amp_graph.convert(model[1])
    model(x)
    assert products(model, x) == [torch.float32, BF16, BF16]
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("outer", ["whole", "function"])
def test_inside_a_users_own_compile(outer):
    model, x = amp_graph.convert(Net().eval()), torch.randn(3, 16)
    alone = model(x)
    runs = conversion_of(model).runs
    wrapped = torch.compile(model if outer == "whole" else lambda x: model(x) * 2, backend="eager")
    for _ in range(2):
        out = wrapped(x)
    assert torch.equal(out, alone if outer == "whole" else alone * 2)
    assert conversion_of(model).runs == runs + 2
    assert set(products(wrapped, x)) == {BF16}


def test_a_forward_wrapped_by_another_library_is_captured_and_given_back():
    model, x = Net().eval(), torch.randn(3, 16)
    plain, own = model(x), model.forward
    wrapper = model.forward = lambda x: own(x) * 2
    amp_graph.convert(model)
    assert set(products(model, x)) == {BF16}
    assert amp_graph.revert(model).forward is wrapper
    assert torch.equal(model(x), plain * 2)


def test_revert_refuses_where_another_wrapper_came_later():
    model = amp_graph.convert(Net())
    model.forward = lambda x: x
    with pytest.raises(CaptureError, match="replaced after") as caught:
        amp_graph.revert(model)
    assert "fix:" in str(caught.value)
    assert conversion_of(model)


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_a_custom_function_runs_as_written_and_keeps_its_backward():
    model, args, _ = make("custom_function")
    amp_graph.convert(model, "bf16")
    CASES["custom_function"].loss(model(*args)).backward()
    assert model.scale.grad.isfinite()
    assert model.scale.grad != 0
    with DtypeLog() as log:
        model(*args)
    assert [(n, t[0]) for n, t in log.entries if n in {"aten.round", "aten.div"}] == [
        ("aten.round", torch.float32),
        ("aten.div", torch.float32),
    ]
    assert products(model, *args)[-1] == BF16


@pytest.mark.parametrize("name", ["cond", "checkpoint_reentrant"])
def test_higher_order_operators(name):
    case = CASES[name]
    model, args, kwargs = make(case)
    plain, *_ = make(case)
    case.loss(plain(*args, **kwargs)).backward()
    amp_graph.convert(model, "bf16")
    case.loss(model(*args, **kwargs)).backward()
    assert "bf16" in amp_graph.report(model).text(None)
    for (label, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None, label
        torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=0.02, msg=lambda m, label=label: f"{label}: {m}")


class Products(TorchDispatchMode):
    """What a user's own mode is: Dynamo captures nothing under it."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addmm.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "dtype"), [("bf16", BF16), ("bf16,deny=gelu", torch.float32)])
def test_under_a_dispatch_mode_a_call_is_not_captured_and_does_no_harm_for_later(policy, dtype):
    model, x = amp_graph.convert(Net(), policy), torch.randn(3, 16)
    with pytest.warns(AmpGraphWarning, match="Products, a dispatch mode"), Products() as cold:
        assert model(x).dtype == torch.float32
    assert cold.dtypes == [dtype] * 2
    assert_runs_low(model, x)
    with Products() as warm:
        assert model(x).dtype == torch.float32
    assert warm.dtypes == [dtype] * 2
    assert_runs_low(model, x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("policy", "dtype"), [("bf16", BF16), ("bf16,deny=gelu", torch.float32)])
def test_a_nested_tensor_whose_strides_no_guard_can_read_is_not_captured_and_does_no_harm(policy, dtype):
    model, x = amp_graph.convert(nn.Linear(16, 4), policy), torch.randn(3, 16)
    ragged = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    model(x)
    with pytest.warns(AmpGraphWarning, match="Dynamo's guards cannot check.*strides"):
        found = model(ragged)
    with torch.device("meta"):
        assert torch.empty(1).is_meta, "torch functions are off"
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == BF16):
        expected = F.linear(ragged, model.weight, model.bias)
    assert all(torch.equal(one, other.float()) for one, other in zip(found.unbind(), expected.unbind(), strict=True))
    assert_runs_low(model, x)


def test_flops_of_a_converted_model_can_be_counted():
    model, x = amp_graph.convert(Net()), torch.randn(3, 16)
    model(x)
    with FlopCounterMode(display=False) as counted, pytest.warns(AmpGraphWarning, match="FlopCounterMode"):
        model(x)
    assert counted.get_total_flops() == 2 * 3 * (16 * 32 + 32 * 4)
    assert_runs_low(model, x)
