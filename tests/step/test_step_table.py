"""The passes that make a step of a joint graph: a row each, in the order in which every kind of step appends them."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import amp_graph
from amp_graph.passes.base import PassError
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.pipeline_table import pipeline
from amp_graph.step import step_graph, step_table
from amp_graph.step.step_table import (
    CLIPPED,
    MASTERS,
    RANKS,
    SCALED,
    SCALED_OR_SPLIT,
    STEP_TABLE,
)

ROWS = {row.name: row for row in STEP_TABLE}


@contextlib.contextmanager
def two_ranks():
    """A process group of two ranks whose collectives return at once: this process is the first."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def appended(monkeypatch):
    """Run a step, and return the names of what was appended to its last graph."""
    graphs = []
    original = step_graph.appended_passes

    def seen(*given):
        made = original(*given)
        graphs.append([one.name for one in made[0]])
        return made

    monkeypatch.setattr(step_graph, "appended_passes", seen)

    def run(policy="bf16", optimizer=torch.optim.AdamW, batches=2, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        step = amp_graph.TrainStep(model, F.mse_loss, optimizer(model.parameters(), lr=0.01), policy, **options)
        for _ in range(batches):
            step(torch.randint(32, (4,)), torch.randn(4, 4))
        return graphs

    return run


KINDS = {
    "bf16": ({}, set()),
    "fp16, clip": (dict(policy="fp16", clip_norm=1.0), {SCALED, SCALED_OR_SPLIT, CLIPPED}),
    "masters": (dict(policy="bf16-O2", clip_value=0.1), {MASTERS, CLIPPED}),
    "micro-batches": (dict(micro_batches=2), {SCALED_OR_SPLIT}),
    "masters, fp16, micro-batches": (
        dict(policy="fp16-O2", micro_batches=2),
        {SCALED, SCALED_OR_SPLIT, MASTERS},
    ),
    "outside": (
        dict(optimizer=torch.optim.RMSprop, policy="fp16"),
        {SCALED, SCALED_OR_SPLIT},
    ),
    "SGD": (dict(optimizer=torch.optim.SGD), set()),
    "compiled": (dict(policy="fp16", compile="aot_eager"), {SCALED, SCALED_OR_SPLIT}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_appends_in_the_order_of_the_table_what_its_rows_say(kind, appended):
    options, holds = KINDS[kind]
    _says_what_is_appended(appended(**options), holds)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=str)
def test_so_does_a_step_over_two_ranks(options, appended):
    with two_ranks():
        graphs = appended("fp16", **options)
    _says_what_is_appended(graphs, {SCALED, SCALED_OR_SPLIT, RANKS})


def _says_what_is_appended(graphs, holds):
    assert all(names == [name for name in ROWS if name in names] for names in graphs)
    assert {name for names in graphs for name in names} == {name for name, row in ROWS.items() if {*row.needs} <= holds}


def test_no_policy_builds_or_skips_what_a_step_appends():
    options = amp_graph.Policy.parse("fp16").pipeline_options("cpu", in_step=True, eager=True)
    assert pipeline(Phase.JOINT, options) == []
    assert not any(row.skippable for row in STEP_TABLE)
    with pytest.raises(PassError, match=r"(?s)'scale-loss' is built from the parts of a training step.*ScaleLoss\("):
        ROWS["scale-loss"].built(options)
    assert [row.phases for row in step_table.EVERY[-len(STEP_TABLE) :]] == [(Phase.JOINT,)] * len(STEP_TABLE)
