"""``amp-graph passes``: what is on is what runs, and what is off says why."""

import re

import pytest
import torch

from amp_graph import Policy
from amp_graph.cli.command_passes import Mode, states
from amp_graph.cli.main import main
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.pipeline_table import GROUPS, pipeline
from amp_graph.step.step_table import EVERY

MODES = [Mode(), Mode(gradients=False), Mode(step=True), *(Mode(step, "inductor") for step in (False, True))]


@pytest.fixture
def amp(capsys):
    def run(*words):
        status = main(["passes", *words])
        return (status, *capsys.readouterr())

    return run


def why(policy, name, device="cpu", mode=None):
    """Return why a pass is off; "" where it is on."""
    (state,) = (s for s in states(Policy.parse(policy), device, mode or Mode()) if s.row.name == name)
    assert bool(state.why) == (state.phase is None)
    return state.why


@pytest.mark.parametrize("policy", ["bf16", "fp16,skip=backend"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_what_is_on_is_what_runs(policy, device, mode):
    """Passes for another device are built as well, and find nothing in the graph."""
    read, eager = Policy.parse(policy), mode.compile == "eager"
    with torch.set_grad_enabled(mode.gradients):
        inductor = {} if mode.compile == "inductor" else None
        options = read.pipeline_options(device, eager=eager, inductor=inductor, in_step=mode.step)
        phases = [Phase.CAPTURED, *([Phase.CALLS] if eager and not mode.step else [])]
        phases += [Phase.STEP] if eager and mode.step else []
        phases += [] if eager else [Phase.HANDOVER, Phase.INDUCTOR, *([Phase.COMPILED] if device == "cpu" else [])]
        runs = {one.name for phase in phases for one in pipeline(phase, options)}
    found = states(read, device, mode)
    assert [state.row for state in found] == [*EVERY]
    assert {s.row.name for s in found if s.phase and not s.row.by_step} == {n for n in runs if device in devices_of(n)}


def devices_of(name):
    return next(row.devices for row in EVERY if row.name == name)


@pytest.mark.parametrize(
    ("policy", "name", "device", "mode", "reason"),
    [
        ("bf16", "attention", "cuda", Mode(), "device cuda: for cpu only"),
        ("bf16", "pad-shapes", "cpu", Mode(), "device cpu: for cuda only"),
        ("bf16,device=cuda", "pad-shapes", "cpu", Mode(), ""),
        ("bf16", "pad-shapes", "cuda", Mode(), ""),
        ("bf16", "pad-shapes", "cuda", Mode(compile="inductor"), "Inductor pads matmuls itself (torch._inductor"),
        ("bf16", "pad-channels", "cuda", Mode(compile="inductor"), ""),
        ("bf16,skip=attention", "fuse-attention", "cpu", Mode(), "skip=attention in the policy"),
        ("bf16,skip=backend", "gru-state", "cpu", Mode(), "skip=backend in the policy"),
        ("bf16,lists=autocast_cpu", "fuse-gelu", "cpu", Mode(), "reproduce torch.autocast"),
        ("bf16", "fuse-cross-entropy", "cpu", Mode(compile="inductor"), "needs a graph that runs eagerly"),
        ("bf16", "fold-batch-norms", "cpu", Mode(), "needs a frozen model"),
        ("bf16", "reuse-embedding-gradients", "cpu", Mode(gradients=False), "needs gradients"),
        ("bf16", "freeze-weights", "cpu", Mode(gradients=False), "needs a frozen model"),
        ("bf16", "lower-weight-gradients", "cpu", Mode(), "needs a compiler, or a training step that runs eagerly"),
        ("bf16", "batch-weight-casts", "cuda", Mode(step=True), "a training step casts its weights"),
        ("O0", "insert-casts", "cpu", Mode(), "level O0"),
        ("fp16", "scale-loss", "cpu", Mode(), "only in a training step"),
        ("fp16", "scale-loss", "cpu", Mode(step=True), ""),
        ("fp16", "update-loss-scale", "cuda", Mode(step=True, compile="inductor"), ""),
        ("bf16", "check-finite-and-unscale", "cpu", Mode(step=True), "only with a loss scale"),
        ("fp16-O0", "update-loss-scale", "cpu", Mode(step=True), "only with a loss scale"),
        ("O0", "update-parameters", "cpu", Mode(step=True), ""),
        ("bf16", "average-over-ranks", "cpu", Mode(step=True), "only with several ranks"),
        ("bf16", "clip-gradients", "cpu", Mode(step=True), "only with clip_norm or clip_value"),
        ("bf16", "add-gradients", "cpu", Mode(step=True), "only with micro_batches"),
    ],
)
def test_a_pass_that_is_off_says_why(policy, name, device, mode, reason):
    found = why(policy, name, device, mode)
    assert reason in found
    assert bool(reason) == bool(found)


def test_the_text_is_the_table_in_order(amp):
    status, out, err = amp("--policy", "bf16,skip=attention", "--device", "cpu")
    assert (status, err) == (0, "")
    head, columns, *lines = out.splitlines()
    assert re.fullmatch(r"# policy bf16-O1,skip=attention, cpu, training, eager: \d+ of \d+ passes are on", head)
    assert columns.split() == ["pass", "stage", "phase", "exactness", "state", "law"]
    assert [line.split()[0] for line in lines[: len(EVERY)]] == [row.name for row in EVERY]
    assert re.search(r"^attention +backend +captured +rounding-equal +off: skip=attention in the policy +R", out, re.M)
    assert re.search(r"^insert-casts +casts +captured +approximate +on \(not optional\) +Inserts", out, re.M)
    assert f"backend ({len(GROUPS['backend'])})" in lines[-1]


def test_words_that_do_not_go_together_are_refused(amp):
    assert amp("--step", "--no-grad")[0] == 2
    status, out, err = amp("--policy", "bf16,skip=atention")
    assert (status, out) == (1, "")
    assert "did you mean 'attention'" in err
