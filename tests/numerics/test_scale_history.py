"""The history of a loss scale: what each step was scaled by, which were skipped, and its forms."""

import copy
import json
import pickle

import pytest
import torch
from torch.nn.functional import cross_entropy

import amp_graph
from amp_graph.errors import CaptureError
from amp_graph.report.report_notes import notes_of_scale
from amp_graph.scaling.scale_records import ScaleRecords
from tests.by_hand import descend
from tests.numerics.planted import classified


def trained(steps, bad=(), **options):
    """Train some steps, with infinite inputs in those that are in ``bad``."""
    model, (x, y) = classified("MLP", "none")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scale = amp_graph.LossScale(2.0**8, growth_interval=3, **options)
    step = amp_graph.TrainStep(model, cross_entropy, optimizer, "fp16", loss_scale=scale)
    for i in range(1, steps + 1):
        step(x * float("inf") if i in bad else x, y)
    return step


def test_each_step_has_the_scale_that_its_loss_was_multiplied_by():
    step = trained(8, bad=(2, 3, 7))
    rows = amp_graph.scale_history(step).rows
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["skipped"] for row in rows] == [i in (2, 3, 7) for i in range(1, 9)]
    assert [row["scale"] for row in rows] == [256, 256, 128, 64, 64, 64, 128, 64]
    assert amp_graph.metrics(step)["skipped_of_last_100"] == 3
    assert list(notes_of_scale(step)) == [
        "loss scale: 64 now, 3 steps skipped",
        "loss scale: the last step skipped is step 7 at 128",
    ]


def test_a_scaler_and_an_optimizer_have_a_history_too():
    model, (x, y) = classified("MLP", "none")
    scaler, optimizer = amp_graph.GradScaler(init_scale=4.0), torch.optim.SGD(model.parameters(), 0.01)
    ours = amp_graph.MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), 0.01), loss_scale="dynamic")
    for factor in (1.0, float("inf"), 1.0):
        descend(optimizer, cross_entropy(model(x), y) * factor, scaler)
    optimizer.zero_grad()
    ours.backward(cross_entropy(model(x), y))
    ours.step()
    found = [(row["scale"], row["skipped"]) for row in amp_graph.scale_history(scaler)]
    assert found == [(4, False), (4, True), (2, False)]
    assert [row["scale"] for row in amp_graph.scale_history(ours)] == [2.0**16]


def test_a_ring_gives_the_last_rows_that_were_noted_in_order():
    records = ScaleRecords(most=4)
    for i in range(11):
        dtype = torch.float64 if i < 2 else torch.float32  # the first step of a TrainStep has no device yet
        records.note([torch.tensor(float(i), dtype=dtype), None, None, torch.tensor(i // 3, dtype=torch.int32)])
        expected = [(n + 1, float(n), (n + 1) // 3 > n // 3) for n in range(i + 1)]
        assert records.rows((i + 1) // 3) == expected[-4:]
        assert int(records.skipped_before(3)) == max(i - 2, 0) // 3
    records.undo()
    assert records.count == 10


def test_a_step_that_raises_leaves_no_row():
    step = trained(2)
    with pytest.raises(Exception, match=r"shape|size|mat"):
        step(torch.randn(5, 7), torch.zeros(5, dtype=torch.long))
    assert len(amp_graph.scale_history(step)) == 2


def test_copies_start_again():
    step = trained(2)
    for copied in (copy.deepcopy(step), pickle.loads(pickle.dumps(step.loss_scale))):
        assert len(amp_graph.scale_history(copied)) == 0


def test_forms():
    found = amp_graph.scale_history(trained(5, bad=(4,)))
    assert found.rows[3] == {"step": 4, "scale": 512.0, "skipped": True}
    assert json.loads(json.dumps(found.to_dict()))["rows"] == list(found)
    assert str(found).splitlines() == [
        "loss scale: 5 steps, 1 of the last 5 skipped",
        "        1  256",
        "        4  512          skipped",
        "        5  256",
    ]


@pytest.mark.parametrize("wrong", [3, torch.nn.Linear(2, 2), torch.amp.GradScaler("cpu")])
def test_what_has_no_history_is_refused(wrong):
    with pytest.raises(CaptureError, match=f"a {type(wrong).__name__} has none"):
        amp_graph.scale_history(wrong)
