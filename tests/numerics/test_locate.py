"""The overflow locator names the planted line, in forward and in backward, and says when there is nothing to name."""

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import amp_graph
from amp_graph.errors import CaptureError, ScaleError
from tests.layers import forward_of, layers
from tests.numerics.planted import MODELS, classified

SCALE = 2.0**10
# Dynamo instantiates Function where it traces one, and hides torch's warning only where that is no error.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


PLANTED = [("forward", SCALE), ("backward", 2.0**17)]
QUICK = (("CNN", PLANTED[0]), ("GPT", PLANTED[1]))
EACH = [(name, planted) for name in MODELS for planted in PLANTED]


@pytest.mark.parametrize(
    ("name", "planted"), [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in EACH]
)
def test_the_planted_line_is_named_at_first_try(name, planted):
    direction, scale = planted
    model, batch = classified(name, direction)
    found = amp_graph.locate(model, batch, cross_entropy, policy="fp16", scale=scale, try_fix=False)
    assert found, found.text()
    assert (found.kind, found.direction, found.dtype, found.result) == ("overflow", direction, "f16", "inf")
    assert "# planted" in found.line, found.text()
    assert found.line.partition(":")[0].endswith("planted.py")
    assert found.module == "plant"
    assert 65504 < found.in_fp32 < math.inf
    assert all(math.isfinite(size) for _, _, size in found.operands)
    assert found.operands
    assert found.scale == scale
    assert found.how.startswith("the planned graph")
    assert ("the loss" in found.reached) == (direction == "forward")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_found_where_nothing_is_planted(name):
    model, batch = classified(name, "none")
    found = amp_graph.locate(model, batch, cross_entropy, policy="fp16", scale=SCALE)
    assert not found
    assert found.text().startswith("nothing found")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "scale"), PLANTED)
def test_the_suggested_policy_was_tried_and_trains(kind, scale):
    model, batch = classified("MLP", kind)
    found = amp_graph.locate(model, batch, cross_entropy, policy="fp16", scale=scale)
    policy = next(fix for fix in found.fix if "with it, loss and gradients are finite" in fix).split("'")[1]
    assert "\\" not in policy
    assert not amp_graph.locate(model, batch, cross_entropy, policy=policy, scale=scale)
    step = amp_graph.TrainStep(
        model, cross_entropy, torch.optim.SGD(model.parameters(), 1e-9), policy, loss_scale=scale
    )
    step(*batch)
    assert int(step.skipped_steps) == 0


def test_a_scale_that_is_too_large_is_told_from_a_gradient_that_is():
    model, batch = classified("MLP", "none")
    found = amp_graph.locate(model, batch, cross_entropy, policy="fp16", scale=2.0**24)
    assert found.direction == "backward"
    lower = float(found.fix[0].removeprefix("a loss scale of at most ").partition(":")[0])
    assert 1 <= lower < 2.0**24
    assert not amp_graph.locate(model, batch, cross_entropy, policy="fp16", scale=lower / 4)


def test_a_step_gives_its_loss_policy_and_scale():
    model, batch = classified("MLP", "backward")
    step = amp_graph.TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1), "fp16")
    found = amp_graph.locate(step, batch, try_fix=False)
    assert found.scale == 2.0**16
    assert "# planted" in found.line
    with pytest.raises(CaptureError, match="has its loss_fn and policy"):
        amp_graph.locate(step, batch, cross_entropy)


def test_the_batch_of_a_skipped_step_names_its_cause_and_the_step_has_changed_nothing():
    model, batch = classified("CNN", "forward")
    step = amp_graph.TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.01), "fp16")
    before = copy.deepcopy(dict(model.named_parameters()))
    step(*batch)
    row = amp_graph.scale_history(step).rows[-1]
    assert row == {"step": 1, "scale": 2.0**16, "skipped": True}
    found = amp_graph.locate(step, batch, scale=row["scale"])
    assert "# planted" in found.line
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_micro_batches_are_run_part_by_part():
    model, (x, y) = classified("MLP", "none")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = amp_graph.TrainStep(model, cross_entropy, optimizer, "fp16", micro_batches=2)
    x, y = torch.cat([x[:4], x[:4]]), torch.cat([y[:4], y[:4]])
    assert not amp_graph.locate(step, (x, y), scale=1.0)
    x[6, 2] = float("nan")  # in the second part
    found = amp_graph.locate(step, (x, y), scale=1.0)
    assert found.kind == "given"
    assert found.given.startswith("input batch[0]")


@pytest.mark.parametrize("name", ["a", "a-b", "a+b", "0"])
def test_a_fix_that_names_a_module_was_tried(name):
    inner = nn.ModuleDict({name: Loud()})
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Called(inner, name)), nn.Linear(8, 4))
    batch = torch.ones(3, 8), torch.zeros(3, dtype=torch.long)
    found = amp_graph.locate(model, batch, cross_entropy, policy="fp16", scale=8.0)
    policy = next(fix for fix in found.fix if "with it, loss and gradients are finite" in fix).split("'")[1]
    assert not amp_graph.locate(model, batch, cross_entropy, policy=policy, scale=8.0)


@forward_of(nn.Module)
def Loud(self, x):
    return x * 6e4 * 6e4 / 6e4 / 6e4


@layers(lambda inner, name: dict(inner=inner, name=name))
def Called(self, x):
    return self.inner[self.name](x)


def test_a_converted_model_gives_its_policy_and_stays_converted():
    model, batch = classified("MLP", "forward")
    model = amp_graph.convert(model, "fp16")
    model(batch[0])
    graphs = len(amp_graph.report(model).graphs)
    found = amp_graph.locate(model, batch, cross_entropy, try_fix=False)
    assert "# planted" in found.line
    assert found.policy == "fp16-O1"
    assert len(amp_graph.report(model).graphs) == graphs


def test_dropout_is_drawn_as_in_the_step():
    @layers(lambda: dict(fc=nn.Linear(8, 8)))
    def Rare(self, x):
        h = nn.functional.dropout(torch.ones_like(x), 0.5)
        return self.fc(h * h[:, :1] * 3e4)

    model, batch, seen = Rare(), (torch.randn(1, 8), torch.zeros(1, dtype=torch.long)), set()
    for seed in range(5):
        torch.manual_seed(seed)
        found = amp_graph.locate(model, batch, cross_entropy, policy="fp16", try_fix=False)
        assert torch.initial_seed() == seed
        drawn = nn.functional.dropout(torch.ones(1, 8), 0.5)  # the state is as before the call
        assert bool(found) == bool((drawn * drawn[:, :1] * 3e4).max() > 65504), seed
        seen.add(bool(found))
    assert seen == {True, False}


# -- what is not of the precision ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("given", ["input batch[0]", "target batch[1]", "parameter last.bias", "buffer shift"])
def test_what_is_given_and_not_finite_is_named(given, value):
    model, (x, _) = classified("MLP", "none")
    model.register_buffer("shift", torch.zeros(x.shape[-1]))
    y, plain = torch.zeros(len(x), 4), model.forward
    model.forward = lambda x: plain(x + model.shift)
    places = dict(zip(("input", "target", "parameter", "buffer"), (x, y, model.last.bias, model.shift), strict=True))
    places[given.split()[0]].detach().view(-1)[1] = value
    found = amp_graph.locate(model, (x, y), nn.functional.mse_loss, policy="fp16")
    assert (found.kind, found.given) == ("given", given)
    assert "before the model was called" in found.text()


def test_a_loss_that_is_not_finite_in_fp32_is_named_so():
    def loss(out, y):
        return (out - out).sum().log()  # not of the precision

    model, batch = classified("MLP", "none")
    found = amp_graph.locate(model, batch, loss, policy="fp16")
    assert found.kind == "not finite in fp32"
    assert "# not of the precision" in found.line
    assert "# not of the precision" in found.fp32_line
    assert "no precision and no scale will help" in found.fix[0]


@pytest.mark.parametrize(("size", "first"), [(1e30, "module 0"), (1e15, "aten.mse_loss.default")])
def test_without_a_line_of_the_user_a_module_or_an_operator_is_named(size, first):
    """The code of torch's modules is none of the user's, nor is ours that calls them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Flatten())
    with torch.no_grad():
        model[0].weight.fill_(size)
    batch = (torch.full((3, 8), size), torch.zeros(3, 8))
    found = amp_graph.locate(model, batch, nn.MSELoss(), policy="fp16", try_fix=False)
    assert found.kind == "not finite in fp32"
    assert (found.line, found.fp32_line) == ("", first)


def test_an_infinity_that_a_mask_fills_in_is_no_fault():
    @layers(lambda rows: dict(fc=nn.Linear(8, 8), rows=rows))
    def Masked(self, x):
        scores = self.fc(x)
        mask = torch.zeros_like(scores, dtype=torch.bool)
        mask[: self.rows, 2:] = True
        mask[0, : 8 * self.rows - 8] = True
        return torch.softmax(scores.masked_fill(mask, float("-inf")), -1)  # softmax

    batch = (torch.randn(3, 8), torch.zeros(3, dtype=torch.long))
    assert not amp_graph.locate(Masked(1), batch, cross_entropy, policy="fp16")
    whole = amp_graph.locate(Masked(2), batch, cross_entropy, policy="fp16")  # a row is masked wholly
    assert whole.kind == "not finite in fp32"
    assert whole.result == "nan"
    assert "# softmax" in whole.line


@layers(
    lambda way: dict(
        way=way,
        layer=nn.Linear(8, 8),
        mask=nn.Buffer(torch.tensor([[torch.finfo(torch.float32).min] * 4, *[[0.0] * 4] * 3])),
    )
)
def Attends(self, x):
    """Attention with a mask whose first row sees nothing; ``way``: how the mask is added."""
    q = self.layer(x)
    if self.way == "called":
        return nn.functional.scaled_dot_product_attention(q, q, q, self.mask)[:, 0]
    mask = self.mask.half().clamp(min=-6e4) if self.way == "in the code" else self.mask
    scores = q @ q.mT
    return ((torch.add(scores, mask) if self.way == "in the code" else scores.add_(mask)).softmax(-1) @ q)[:, 0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["fp16,lists=autocast_cpu", "bf16,lists=autocast_cuda", "fp16", "bf16,emulate=cuda"])
@pytest.mark.parametrize("way", ["called", "in place", "in the code"])
def test_a_mask_that_becomes_infinite_is_found_though_a_softmax_ends_it(way, policy):
    batch = torch.randn(2, 4, 8), torch.tensor([0, 1])
    found = amp_graph.locate(Attends(way), batch, cross_entropy, policy=policy, try_fix=True)
    assert bool(found) == ("lists" in policy or way == "in the code"), found.text()
    if way == "in the code":
        assert "the code itself casts" in found.text()
    elif found:
        assert (found.kind, found.direction, found.in_fp32 > 3e38) == ("overflow", "forward", True)
        assert "with it, loss and gradients are finite" in found.fix[0]


def test_a_weight_that_is_too_large_is_named_with_its_reader():
    model, batch = classified("MLP", "none")
    with torch.no_grad():
        model.last.weight[0, 0] = 1e6
    found = amp_graph.locate(model, batch, cross_entropy, policy="fp16", try_fix=False)
    assert (found.cast_of, found.module, found.in_fp32) == ("last.weight", "last", 1e6)


def two_layers(**values):
    return dict(first=nn.Linear(8, 8), second=nn.Linear(8, 4), **values)


@layers(two_layers)
def Checkpointed(self, x):
    def inner(x):
        return (torch.relu(self.first(x)) + 1) * 1e5  # inside of a checkpoint

    return self.second(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False))


@layers(two_layers)
def Halved(self, x):
    h = self.first(x).half()
    h *= 3e4
    h.mul_(10.0)  # of the code's own
    return self.second(h.float())


def test_the_body_of_a_checkpoint_is_run_node_by_node():
    batch = (torch.randn(3, 8), torch.zeros(3, dtype=torch.long))
    found = amp_graph.locate(Checkpointed(), batch, cross_entropy, policy="fp16", try_fix=False)
    assert "# inside of a checkpoint" in found.line
    model = Checkpointed()
    with torch.no_grad():
        model.first.weight[0, 0] = 1e6
    found = amp_graph.locate(model, batch, cross_entropy, policy="fp16", try_fix=False)
    assert (found.cast_of, found.module) == ("first.weight", "first")


def test_an_overflow_that_the_code_makes_itself_is_said_to_be_its_own():
    batch = (torch.ones(3, 8), torch.zeros(3, dtype=torch.long))
    found = amp_graph.locate(Halved(), batch, cross_entropy, policy="fp16")
    assert (found.kind, found.operator) == ("overflow", "aten.mul_.Tensor")
    assert "# of the code's own" in found.line
    assert found.fix[0].startswith("the code itself casts to f16")
    assert found.operands[0][2] < 65504, "before it was written"


@layers(two_layers)
def Uncaptured(self, x):
    """Its second product casts fp32 values, or is scaled itself."""
    torch._dynamo.graph_break()
    wide = self.first(x).float() * 0 + (1e5 if self.casts else 1.0)  # wide
    return self.second(wide) if self.casts else self.second(wide) * 1e5  # behind


@pytest.mark.parametrize("casts", [True, False])
def test_where_code_is_not_captured_a_cast_has_the_line_that_computed_its_value(casts):
    batch = (torch.randn(3, 8), torch.zeros(3, dtype=torch.long))
    model = Uncaptured(casts=casts)
    found = amp_graph.locate(model, batch, cross_entropy, policy="fp16", try_fix=False)
    assert found.how.startswith("the code")
    assert "it is not one graph" in found.how
    assert found.keep[0] == ("second" if casts else "")
    assert (found.kind, found.direction) == ("overflow", "forward"), found.text()
    assert found.cast_of == ("a value" if casts else "")
    assert ("# wide" if casts else "# behind") in found.line


def test_parameters_held_in_low_precision_do_not_pass_for_an_overflow_of_fp32():
    model = amp_graph.convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), "fp16-O2")
    with torch.no_grad():
        model[0].weight.fill_(6e4)
    found = amp_graph.locate(model, (torch.ones(3, 8), torch.zeros(3, dtype=torch.long)), cross_entropy)
    assert (found.kind, found.module, found.policy) == ("overflow", "0", "fp16-O2")
    assert model[0].weight.dtype == torch.float16


def test_a_model_with_its_loss_inside_takes_a_dict():
    @layers(lambda: dict(net=classified("MLP", "forward")[0]))
    def Whole(self, x, labels):
        return {"loss": cross_entropy(self.net(x), labels)}

    x, y = classified("MLP", "none")[1]
    found = amp_graph.locate(Whole(), {"x": x, "labels": y}, policy="fp16", try_fix=False)
    assert "# planted" in found.line
    assert found.module == "net.plant"
    x[0, 0] = math.nan
    assert amp_graph.locate(Whole(), {"x": x, "labels": y}, policy="fp16").given == "input batch[0]['x']"


# -- results and arguments ------------------------------------------------------------------------------------


def test_a_result_is_text_and_json():
    model, batch = classified("MLP", "forward")
    found = amp_graph.locate(model, batch, cross_entropy, policy="fp16", try_fix=False)
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert read["found"] is True
    assert read["line"] == found.line
    assert str(found) == found.text()
    assert "f16 ends at 65504" in found.text()
    assert found.cause.endswith("in fp32, f16 ends at 65504")
    assert read["cause"] == found.cause


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"model": "a model"}, CaptureError, "a str is not a torch.nn.Module"),
        ({"batch": ()}, CaptureError, "the batch has no tensor"),
        ({"loss_fn": nn.CrossEntropyLoss}, CaptureError, "returns no loss"),
        ({"scale": 0}, ScaleError, "scale=0"),
        ({"scale": "large"}, ScaleError, "scale='large'"),
        ({"loss_fn": lambda out, y: out}, CaptureError, "the loss is"),
    ],
)
def test_bad_arguments_are_refused_with_a_fix(change, error, told):
    model, batch = classified("MLP", "none")
    given = {"model": model, "batch": batch, "loss_fn": cross_entropy, "policy": "fp16"} | change
    with pytest.raises(error, match=told) as raised:
        amp_graph.locate(given.pop("model"), given.pop("batch"), given.pop("loss_fn"), **given)
    assert "fix:" in str(raised.value)
