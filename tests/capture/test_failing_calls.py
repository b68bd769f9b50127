"""A sample of ``python -m tests.failing_calls``: calls that fail inside of amp_graph are as plain ones, and say so."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.capture import ladder
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphWarning
from amp_graph.passes.graph.meta_keys import UNPLANNED
from tests.corpus import CASES, make
from tests.failing_calls import PASSES, PLACES, Draw, drawn, failing, faults_of
from tests.layers import layers
from tests.warned import without_warnings


@pytest.fixture(autouse=True)
def _not_strict(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_STRICT", "0")


@pytest.mark.sampled(25)
@pytest.mark.parametrize("seed", range(200))
def test_a_call_that_fails_inside_is_as_a_plain_one(seed):
    faults, _ = faults_of(draw := drawn(seed))
    assert not faults, draw


def rewritten(case, trains, place=""):
    """Return what the graphs of a case became while ``place`` failed."""
    model, args, kwargs = make(case)
    with failing(place, []) if place else nullcontext(), torch.set_grad_enabled(trains), without_warnings():
        amp_graph.convert(model, "bf16")(*args, **kwargs)
    return [graph.rewritten for graph in conversion_of(model).graphs]


SAMPLE = [("resnet_basic", True), ("lstm_lm", False)]  # which together give many passes something to do
OTHERS = [pytest.param(name, trains, marks=pytest.mark.slow) for name in sorted(CASES)[::6] for trains in (True, False)]


@pytest.mark.parametrize(("case", "trains"), [*SAMPLE, *OTHERS])
def test_whichever_pass_fails_half_way_calls_are_as_plain_ones(case, trains):
    """Of passes that change a graph, or have to run; each is left out alone, or else the plan is, and named."""
    done = [one for graph in rewritten(case, trains) for one in graph.passes]
    names = sorted({one.name for one in done if one.result.modified or dict(PASSES)[one.name].required})
    assert len(names) > 3
    for name in names:
        draw = Draw(case, f"pass {name}", "bf16", trains)
        assert not faults_of(draw)[0], name
        left = rewritten(case, trains, draw.place)
        plans, passes = [g.gm.meta.get(UNPLANNED, "") for g in left], [one.failure for g in left for one in g.passes]
        told = plans if dict(PASSES)[name].required else passes
        assert any(name in one for one in told), name


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("place", PLACES[2:4])
@pytest.mark.parametrize("case", ["resnet_basic", "vae_random"])
def test_what_the_first_run_wrote_and_drew_is_undone(case, place, trains):
    faults, reached = faults_of(Draw(case, place, "bf16", trains))
    assert reached
    assert not faults


@pytest.mark.parametrize("case", ["resnet_basic", "vae_random"])
def test_control_without_the_copies_that_would_be_seen(case, monkeypatch):
    class NotRestored(ladder.ModelState):
        def restore(self):
            """Leave everything as it is."""

    monkeypatch.setattr(ladder, "ModelState", NotRestored)
    assert faults_of(Draw(case, "behind call 1", "bf16", True))[0]


@layers(
    lambda: dict(part=amp_graph.convert(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), "bf16")), seed=0
)
def Halves(self, x):
    """Calls a converted part in a checkpoint, which stops its recomputation by an exception."""
    return checkpoint(self.part, x, use_reentrant=False)


def test_the_end_of_a_checkpoints_recomputation_is_no_failure(recwarn):
    model, x = Halves(), torch.randn(4, 8)
    for _ in range(3):
        model(x).square().sum().backward()
    assert not [w for w in recwarn if issubclass(w.category, AmpGraphWarning)]


def test_a_later_call_that_wrote_to_its_input_is_not_repeated():
    seen = []
    with failing("behind call 2", seen):
        model = amp_graph.convert(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "bf16")
        model(x := torch.randn(8, 4))
        before = int(model[1].num_batches_tracked)
        with pytest.raises(KeyError, match="made to fail"):
            model(x)
    assert int(model[1].num_batches_tracked) == before + 1


@pytest.mark.parametrize("place", ["", "before call 1"])
def test_without_memory_for_copies_a_first_call_runs_all_the_same(place, monkeypatch):
    def full(*given, **options):
        raise torch.OutOfMemoryError("no memory for copies")

    monkeypatch.setattr(ladder, "ModelState", full)
    assert not faults_of(Draw("resnet_basic", place or "pass eliminate-casts", "bf16", True))[0]
