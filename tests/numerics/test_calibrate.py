"""A calibration finds what fp16 cannot hold, keeps exactly that in fp32, and says so; its file is read as promised."""

import collections
import copy
import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphWarning, CalibrationError
from amp_graph.passes.calibration.calibration import CLAMPED, Calibration
from amp_graph.passes.calibration.calibration_file import NodeRange
from amp_graph.passes.calibration.node_keys import node_keys
from amp_graph.passes.calibration.ranges import range_of
from amp_graph.passes.graph.identify_ops import IdentifyOps
from amp_graph.passes.graph.meta_keys import MARK
from tests.layers import forward_of, layers, linear_of
from tests.numerics.planted import KEPT, MODELS, SILENT, Plant, made
from tests.passes.graphs import capture_function

SLOW = ("GPT", "LSTM", "BERT")
EACH = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS]


def trained(model, batches, loss_fn, policy, scale, steps=6, lr=0.002):
    """Train a copy in a plain loop with a fixed loss scale; return losses, and whether gradients were finite."""
    model = copy.deepcopy(model)
    if policy:
        amp_graph.convert(model, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses, finite = [], True
    for i in range(steps):
        x, y = batches[i % len(batches)]
        loss = loss_fn(model(x), y)
        (loss * scale).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(scale)
                finite = finite and bool(p.grad.isfinite().all())
                p.grad.clamp_(-1.0, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, finite, model


def planned_full(model):
    """Return the reasons of operations that the calibration keeps, by name, and the classes of those that are low."""
    (graph,) = conversion_of(model).graphs
    marks = {n: n.meta[MARK] for n in graph.rewritten.gm.graph.nodes if MARK in n.meta}
    return [m for m in marks.values() if "run.json" in m.reason], [m for m in marks.values() if m.precision == "low"]


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings(SILENT)
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("name", EACH)
def test_exactly_what_is_out_of_range_stays_full_and_fp16_trains(name, kind, tmp_path):
    model, batches, loss_fn = made(name, kind)
    found = amp_graph.calibrate(model, batches, loss_fn)
    assert set(found.out_of_range("float16")) == KEPT[kind]
    assert all("> 65504 in " in why and why.endswith(" of 3 batches") for why in found.out_of_range().values())
    assert found.out_of_range("bfloat16") == {}
    scale = found.loss_scale().scale
    found.save(tmp_path / "run.json")
    expected, _, _ = trained(model, batches, loss_fn, None, 1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not know.*")
        losses, finite, converted = trained(model, batches, loss_fn, f"fp16,calibration={tmp_path}/run.json", scale)
    assert finite
    assert losses == pytest.approx(expected, rel=0.02)
    kept, low = planned_full(converted)
    assert len(kept) == len(KEPT[kind])
    assert len(low) >= 2
    _, finite, _ = trained(model, batches, loss_fn, "fp16", scale, steps=1)
    assert not finite, "the control: without the calibration, gradients are infinite"


def test_a_model_within_range_keeps_nothing():
    assert amp_graph.calibrate(*made("CNN", "none")).out_of_range() == {}


def test_the_record_is_that_of_eager():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    batches = [(torch.randn(4, 8), torch.randn(4, 2)) for _ in range(2)]
    found = amp_graph.calibrate(model, batches, F.mse_loss)
    values, gradients = [], []
    for x, y in batches:
        hidden = model[0](x)
        hidden.retain_grad()
        F.mse_loss(model[2](model[1](hidden)), y).backward()
        values.append(hidden.detach())
        gradients.append(hidden.grad)
    one = found.values["0:linear"]
    assert one.value.largest == torch.stack(values).abs().max()
    assert one.value.least == torch.stack(values).abs().min()
    assert one.gradient.largest == pytest.approx(float(torch.stack(gradients).abs().max()))
    assert one.gradient.zeros == sum(int((g == 0).sum()) for g in gradients)
    assert one.value.elements == 2 * 4 * 16
    assert found.batches == one.value.batches == 2


def test_masks_are_no_overflow():
    x = torch.tensor([1.0, -float("inf"), torch.finfo(torch.float32).min, float("nan"), 0.0, -3.0])
    found = range_of([x])
    assert (found.largest, found.least, found.masked, found.zeros, found.elements) == (3.0, 1.0, 3, 1, 3)
    assert found.mask == torch.finfo(torch.float32).max
    assert range_of([x[:2]]).mask == range_of([x[4:]]).mask == 0.0


@forward_of(nn.Module)
def Masked(self, q, k, v, mask):
    """Attention whose mask is an addend of a product."""
    return torch.baddbmm(mask, q, k.mT).softmax(-1) @ v


@pytest.mark.parametrize(
    ("policy", "number", "counted"),
    [("bf16", torch.finfo(torch.float32).min, True), ("bf16", -1e31, False), ("fp16", -1e31, True)],
)
def test_masks_that_a_cast_makes_infinite_are_counted_and_cured(policy, number, counted, tmp_path):
    """A text that sees nothing: casts of ours clamp its mask; what torch.autocast would cast stays in fp32."""
    given = [torch.randn(2, 6, 8) for _ in range(3)]
    mask = torch.full((2, 6, 6), number)
    mask[1] = 0.0
    want = Masked()(*given, mask)
    dtype, file = "bfloat16" if policy == "bf16" else "float16", tmp_path / "run.json"

    def is_right(policy):
        return bool((amp_graph.convert(Masked(), policy)(*given, mask) - want).abs().max() < 0.05)

    for lists in (policy, f"{policy},lists=autocast_cpu"):
        found = amp_graph.calibrate(Masked(), [(*given, mask)], policy=lists)
        found.save(file)
        assert (CLAMPED in found.text(dtype)) is counted
        assert Calibration.load(file).masks(dtype) == found.masks(dtype)
        assert is_right(f"{lists},calibration={file}")
        assert is_right(lists) or (counted and lists != policy), "control: a mask that is not counted is harmless"
    assert is_right(lists) is not counted, "control: without a calibration it is not right"


def gradients_of(*tensors):
    return {
        str(i): NodeRange(range_of([torch.ones(1)]), gradient=range_of([t]), gives=range_of([t]).peak)
        for i, t in enumerate(tensors)
    }


def test_the_loss_scale_is_the_largest_without_overflow():
    found = Calibration(gradients_of(torch.tensor([3.0, 1e-4]), torch.tensor([1e-3])))
    assert found.loss_scale().scale == 2.0**14  # 3 * 2**14 = 49152; twice that overflows
    assert found.loss_scale().underflow == 0.0
    assert found.out_of_range() == {}
    assert [row["loss scale"] for row in found.rows()] == [2.0**14, 2.0**25]
    assert found.loss_scale("bfloat16").scale == 2.0**24
    assert Calibration(gradients_of(torch.zeros(3))).loss_scale().scale == 1.0


def test_what_becomes_zero_beside_a_large_gradient_is_told():
    small = [torch.full((100,), 1e-8) for _ in range(9)]
    advised = Calibration(gradients_of(torch.tensor([6e4]), *small), gradients=True).loss_scale()
    assert (advised.scale, advised.underflow) == (1.0, 0.9)
    assert Calibration(gradients_of(torch.tensor([7e4]), *small)).loss_scale().scale == 2.0**24, "it stays in fp32"


def test_a_wrapped_model_is_measured_as_the_model():
    model, batches, loss_fn = made("MLP")
    wrapped = nn.DataParallel(model)
    assert amp_graph.calibrate(wrapped, batches, loss_fn) == amp_graph.calibrate(model, batches, loss_fn)


# -- files and merging ------------------------------------------------------------------------------------------


def test_batches_of_two_processes_merge_to_one_run(tmp_path):
    model, batches, loss_fn = made("MLP", count=4)
    parts = [amp_graph.calibrate(model, batches[i : i + 2], loss_fn) for i in (0, 2)]
    for i, part in enumerate(parts):
        part.save(tmp_path / f"{i}.json")
    merged = amp_graph.Calibration.load(tmp_path / "0.json").merge(amp_graph.Calibration.load(tmp_path / "1.json"))
    whole = amp_graph.calibrate(model, batches, loss_fn)
    assert merged == whole
    assert merged.out_of_range()["plant:div"].endswith("> 65504 in 4 of 4 batches")
    with pytest.raises(CalibrationError, match="no operation in common"):
        whole.merge(amp_graph.calibrate(nn.Sequential(nn.Tanh(), nn.Linear(2, 2)), [torch.ones(1, 2)]))


def test_a_file_has_a_schema_and_a_version_and_a_newer_one_is_refused(tmp_path):
    model, batches, loss_fn = made("MLP", count=1)
    path = tmp_path / "run.json"
    found = amp_graph.calibrate(model, batches, loss_fn)
    found.save(path)
    data = json.loads(path.read_text())
    assert (data["schema"], data["version"], data["model"]) == ("amp_graph.calibration", 1, "MLP")
    assert amp_graph.Calibration.load(path) == found
    path.write_text(json.dumps(data | {"version": 2}))
    with pytest.raises(CalibrationError, match="version 2 of the file"):
        amp_graph.convert(copy.deepcopy(model), f"fp16,calibration={path}")
    with pytest.raises(CalibrationError, match="cannot be read"):
        amp_graph.convert(copy.deepcopy(model), f"fp16,calibration={path}.none")


@pytest.mark.filterwarnings(SILENT)
def test_a_file_of_another_graph_says_which_operations_differ(tmp_path):
    model, batches, loss_fn = made("MLP", count=1)
    amp_graph.calibrate(model, batches, loss_fn).save(tmp_path / "run.json")
    other = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    amp_graph.convert(other, f"fp16,calibration={tmp_path}/run.json")
    with pytest.warns(AmpGraphWarning, match=r"made of MLP, does not know 2 of 2 .*: 0:linear, 1:linear; they"):
        out = other(batches[0][0])
    assert out.isfinite().all()


@layers(lambda: dict(layer=nn.Sequential(nn.Linear(8, 8))))
def _BreaksBetween(self, x):
    x = torch.relu(self.layer(x))
    torch._dynamo.graph_break()
    return torch.tanh(x)


UNMATCHED = "matches no operation that was captured"


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("key", ["layer.0:aten.nosuch", "layer.0:relu", "layer.0:linear.1"])
def test_a_key_of_no_operation_of_its_module_is_told(whole, key):
    model = nn.Sequential(collections.OrderedDict(layer=nn.Sequential(nn.Linear(8, 8))))
    policy, batch = f"bf16,keep_ops={key}|layer.0:linear", (torch.randn(4, 8), torch.randn(4, 8))
    if whole:
        model = amp_graph.TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.01), policy)
    else:
        amp_graph.convert(model, policy)
    with pytest.warns(AmpGraphWarning, match=UNMATCHED) as told:
        model(*batch[: 1 + whole])
    assert [f"keep_ops={key} {UNMATCHED}" in str(one.message) for one in told] == [True]
    assert "fix:   keep_ops=layer.0:linear" in str(told[0].message)
    assert [note for note in amp_graph.report(model).notes if UNMATCHED in note] == [
        f"keep_ops={key} {UNMATCHED}, so it keeps nothing in fp32"
    ]


@pytest.mark.filterwarnings("error:.*keep_ops")
@pytest.mark.parametrize(("key", "count"), [(":relu|:tanh", 0), ("layer:linear", 1)])
def test_keys_are_looked_for_in_all_graphs_of_a_call(key, count):
    """Of two graphs of one module each has one of the operations; a container has none of its own."""
    model = amp_graph.convert(_BreaksBetween(), f"bf16,keep_ops={key}")
    for _ in range(2):
        model(torch.randn(4, 8))
    report = amp_graph.report(model)
    assert len(report.graphs) == 2
    assert sum(UNMATCHED in note for note in report.notes) == count


def test_keys_do_not_depend_on_what_surrounds_an_operation():
    def alone(s, x):
        return torch.relu(x + 1.0) + x

    keys = []
    for function in (alone, lambda s, x: alone(s, torch.tanh(x)).exp()):
        gm, _ = capture_function(function, torch.randn(4)).through([IdentifyOps()])
        keys.append([*node_keys(gm).values()])
    assert keys[0] == [":add", ":relu", ":add.1"]
    assert [k for k in keys[1] if "add" in k or "relu" in k] == keys[0]


@layers(lambda: dict(fc=linear_of(600.0 * torch.eye(8))))
def Twice(self, x):
    """A module that is called twice; only the second call is out of range."""
    return self.fc(self.fc(x)) / 600.0 / 600.0


@pytest.mark.filterwarnings(SILENT)
def test_calls_of_one_module_are_told_apart_also_by_a_step(tmp_path):
    model, x = Twice(), torch.rand(4, 8) + 0.5
    found = amp_graph.calibrate(model, [(x, x)], F.mse_loss)
    assert set(found.out_of_range()) == {"fc:linear.1", ":div"}
    found.save(tmp_path / "run.json")
    policy = f"fp16,calibration={tmp_path}/run.json"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not know.*")
        step = amp_graph.TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.0), policy)
        assert float(step(x, x)) == pytest.approx(0.0, abs=1e-5)


@layers(lambda: dict(first=nn.Linear(8, 8), last=nn.Linear(8, 8)))
def Branching(self, x):
    h = torch.cond(x.sum() > 1e9, lambda h: (self.first(h),), lambda h: (self.first(h) * 2.0,), (x,))[0]
    return self.last(h) * 2.0


@pytest.mark.filterwarnings(SILENT)
def test_operations_of_a_branch_that_never_ran_are_planned_without_a_record_and_said_so(tmp_path):
    model, x = Branching(), torch.randn(4, 8)
    amp_graph.calibrate(model, [(x, x)], F.mse_loss).save(tmp_path / "run.json")
    expected = model(x)
    amp_graph.convert(model, f"bf16,calibration={tmp_path}/run.json")
    with pytest.warns(
        AmpGraphWarning, match="does not know 1 of 1 .*: first:cond/0/linear; they(.*\n)*.*run all branches"
    ) as told:
        out = model(x)
    assert [one.category for one in told].count(AmpGraphWarning) == 1
    assert torch.allclose(out, expected, atol=0.05)


def test_batches_of_other_sizes_and_dicts_are_legal():
    @layers(lambda: dict(fc=nn.Linear(4, 2), plant=Plant("forward", 2)))
    def Own(self, x, labels=None):
        out = self.plant(self.fc(x))
        return {"out": out, "loss": F.mse_loss(out, labels)}

    batches = [({"x": torch.randn(n, 4), "labels": torch.randn(n, 2)},) for n in (3, 5, 2)]
    found = amp_graph.calibrate(Own(), batches)
    assert found.gradients
    assert found.batches == 3
    assert {"plant:mul.1", "plant:div"} <= set(found.out_of_range())
