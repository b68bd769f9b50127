"""A comparison names the operation that spoils a result first, beside autocast's error and fp32's."""

import copy
import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.errors import AmpGraphError
from amp_graph.numerics.differences import Against
from tests.layers import layers
from tests.numerics.planted import COARSE, MODELS, made

SLOW = ("CNN", "GPT", "LSTM", "BERT")
EACH = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS]


@torch.library.custom_op("amp_graph_tests::only_fp32", mutates_args=())
def only_fp32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise RuntimeError("only float32")
    return x * 2.0


only_fp32.register_fake(torch.empty_like)
only_fp32.register_autograd(lambda ctx, grad: grad * 2.0)
FIRST = {"coarse": {COARSE}, "forward": {"plant:mul.1"}, "backward": {"plant:mul.1"}}


def compared(name, kind, policy, **kwargs):
    model, batches, loss_fn = made(name, kind, count=2)
    return amp_graph.compare(model, batches, loss_fn, policy=policy, **kwargs)


@pytest.mark.parametrize(("kind", "policy"), [("coarse", "bf16"), ("forward", "fp16"), ("backward", "fp16")])
@pytest.mark.parametrize("name", EACH)
def test_what_spoils_the_result_is_first(name, kind, policy):
    found = compared(name, kind, policy)
    first, second = found.operations[:2]
    assert first.key in FIRST[kind]
    assert first.introduced > 10 * second.introduced
    assert found.rows()[0]["by"] == first.key
    assert "planted.py" in first.where
    assert found.reference == "fp64"
    assert all(one.fp32 < 1e-4 for one in found.operations if one.fp32 is not None)


@pytest.mark.parametrize("name", EACH)
def test_without_a_fault_errors_are_those_of_autocast(name):
    found = compared(name, "none", "bf16")
    for one in found.operations:
        if one.autocast is not None and one.autocast > 1e-3:
            assert one.error < 1.5 * one.autocast
    assert found.operations[0].introduced < 0.05


def test_errors_are_those_of_the_models_own_runs():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    found = {one.key: one for one in amp_graph.compare(model, [(x, y)], F.mse_loss, policy="bf16").operations}
    exact = copy.deepcopy(model).double()(x.double()).detach()
    own = amp_graph.convert(copy.deepcopy(model), "bf16")(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(x).detach()
    last = found["2:linear"]
    assert last.error == pytest.approx(float((own - exact).norm() / exact.norm()), rel=0.3)
    assert last.autocast == pytest.approx(float((theirs - exact).norm() / exact.norm()), rel=1e-3)
    assert last.fp32 == pytest.approx(float((model(x).detach() - exact).norm() / exact.norm()), rel=1e-3)


def test_the_loss_of_autocasts_run_is_computed_under_autocast():
    seen = []

    def loss_fn(out, y):
        seen.append(torch.is_autocast_enabled("cpu"))
        return F.mse_loss(out, y)

    batch = (torch.randn(8, 16), torch.randn(8, 4))
    found = amp_graph.compare(nn.Linear(16, 4), [batch], loss_fn, policy="bf16")
    assert sorted(seen) == [False, False, False, True]
    assert found.operations[0].autocast is not None


def test_dropout_is_no_error():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))
    batches = [torch.randn(6, 8) for _ in range(2)]
    found = amp_graph.compare(model, batches, policy="bf16")
    assert max(one.error for one in found.operations if one.error is not None) < 0.05


def test_an_operation_without_fp64_makes_fp32_the_reference():
    @layers(lambda: dict(fc=nn.Linear(4, 4)))
    def Own(self, x):
        return torch.ops.amp_graph_tests.only_fp32(self.fc(x))

    found = amp_graph.compare(Own(), [(torch.randn(3, 4), torch.randn(3, 4))] * 2, F.mse_loss, policy="bf16")
    assert found.reference == "fp32, as fp64 failed: only float32"
    assert found.autocast_failed == "only float32"
    assert found.operations[0].key == "fc:linear"
    assert 0 < found.operations[0].error < 0.01
    assert found.operations[0].fp32 == 0.0


def test_an_operation_in_place_is_blamed_for_its_own_error():
    @layers(lambda: dict(first=nn.Linear(8, 8), last=nn.Linear(8, 4)))
    def Own(self, x):
        h = self.first(x)
        h.mul_(600.0).mul_(600.0)
        h /= 600.0
        h /= 600.0
        return self.last(h)

    found = amp_graph.compare(Own(), [(torch.randn(4, 8), torch.randn(4, 4))], F.mse_loss, policy="fp16")
    assert found.operations[0].key == ":mul_.1"
    assert found.operations[0].introduced == float("inf") > found.operations[1].introduced


def test_the_file_is_json_with_a_schema_and_the_text_starts_with_the_worst(tmp_path):
    found = compared("MLP", "forward", "fp16")
    found.save(tmp_path / "errors.json")
    data = json.loads((tmp_path / "errors.json").read_text(), parse_constant=pytest.fail)
    assert (data["schema"], data["version"]) == ("amp_graph.comparison", 1)
    assert data["layers"][0]["introduced"] == "inf"
    assert [row["layer"] for row in data["layers"]] == [row["layer"] for row in found.rows()]
    lines = found.text().splitlines()
    assert found.loss_scale != 1
    assert lines[0].endswith(f", gradients with a loss scale of {found.loss_scale:g}")
    assert "loss scale" not in dataclasses.replace(found, loss_scale=1.0).text()
    assert lines[3].startswith("plant ")
    assert "introduced by" in lines[2]
    with pytest.raises(AmpGraphError, match="cannot write"):
        found.save(tmp_path / "none" / "errors.json")


def test_control_without_the_local_error_another_operation_is_first(monkeypatch):
    monkeypatch.setattr(Against, "local", lambda self, node, result, exact: None)
    assert compared("MLP", "coarse", "bf16").operations[0].introduced == 0.0


@layers(lambda writes: dict(writes=writes, first=nn.Linear(6, 6), last=nn.Linear(6, 3), seen=nn.Buffer(torch.ones(6))))
def WritesBeforeABreak(self, x):
    """A graph that writes to what the next one reads."""
    self.writes(self, x)
    torch._dynamo.graph_break()
    h = self.first(x * self.seen)
    torch._dynamo.graph_break()
    h[:, :3].mul_(1.7)
    torch._dynamo.graph_break()
    return self.last(torch.tanh(h))


def written_weight(model, x):
    with torch.no_grad():
        model.first.weight.mul_(0.9)


@pytest.mark.parametrize(
    "writes", [written_weight, lambda model, x: model.seen.mul_(0.7), lambda model, x: x[1:].mul_(1.5)]
)
def test_what_one_graph_writes_the_next_one_reads_in_every_precision(writes):
    """fp64 would otherwise read what the caller's tensors were before, and tell of an error of 10 %."""
    model = WritesBeforeABreak(writes)
    found = amp_graph.compare(model, [(torch.randn(4, 6), torch.randn(4, 3))], F.mse_loss)
    assert max(max(one.fp32, one.gradient_fp32 or 0.0) for one in found.operations) < 1e-5
    assert {one.key for one in found.operations} >= {"first:linear", "last:linear"}


@layers(lambda: dict(first=nn.Linear(8, 8), last=nn.Linear(8, 4)))
def Checkpointed(self, x):
    return self.last(checkpoint(lambda h: torch.tanh(self.first(h)), x, use_reentrant=False))


def test_a_checkpointed_layer_is_compared_with_autocast_as_well():
    model, x, y = Checkpointed(), torch.randn(5, 8), torch.randn(5, 4)
    found = {one.key: one for one in amp_graph.compare(model, [(x, y)], F.mse_loss, policy="bf16").operations}
    one = found["first:linear"]
    assert 1e-4 < one.error <= 1.05 * one.autocast < 0.02
    assert 1e-4 < one.gradient_error <= 1.05 * one.gradient_autocast < 0.02


@layers(lambda: dict(linear=nn.Linear(8, 8)))
def Block(self, x):
    return torch.tanh(self.linear(x))


@layers(lambda: dict(block=Block(), last=nn.Linear(8, 4)))
def Again(self, x):
    """One layer is captured once, and runs three times in a call, each time behind a graph break."""
    for _ in range(3):
        x = self.block(x)
        torch._dynamo.graph_break()
    return self.last(x)


def test_each_run_of_a_graph_is_compared_with_its_own_reference():
    model, x, y = Again(), torch.randn(5, 8), torch.randn(5, 4)
    found = amp_graph.compare(model, [(x, y)], F.mse_loss, policy="bf16")
    assert found.autocast_failed == ""
    linear = next(one for one in found.operations if one.key == "block.linear:linear")
    assert linear.fp32 < 1e-6 > linear.gradient_fp32
    assert 1e-4 < linear.error <= 1.05 * linear.autocast < 0.02


def test_code_that_no_graph_holds_runs_in_fp32_in_every_call():
    """A converted model runs all calls but the first under autocast, as no graph reads ``last``."""
    seen = []

    class BetweenGraphs(Again):
        def forward(self, x):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(x)

    model, batches = BetweenGraphs(), [torch.randn(5, 8) for _ in range(2)]
    assert amp_graph.compare(model, batches, policy="bf16").batches == 2
    assert seen == [False] * 8
    seen.clear()
    amp_graph.convert(model, "bf16")
    for batch in batches:
        model(batch)
    assert seen == [False, True]


SEVERAL = {
    "chunk": lambda x: x.chunk(2, -1),
    "split": lambda x: x.split([3, 5], -1),
    "equal split": lambda x: x.split(4, -1),
    "unbind": lambda x: x.unbind(-1)[:2],
    "max": lambda x: (x.max(-1).values, x),
    "a tuple of sizes": lambda x: x.tensor_split(2, -1),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_gradients_of_several_results_are_each_compared_with_their_own(name):
    @layers(lambda: dict(up=nn.Linear(8, 8)))
    def Parts(self, x):
        one, other = SEVERAL[name](self.up(x))
        return one.tanh().sum() + 3 * other.sigmoid().sum()

    found = amp_graph.compare(Parts(), [(torch.randn(16, 8),)], lambda out: out, policy="bf16")
    for one in found.operations:
        assert (one.gradient_fp32 or 0.0) < 1e-5, one
        assert (one.gradient_error or 0.0) < 0.05, one
