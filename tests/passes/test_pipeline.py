"""The table of passes: each mode selects from it what it did before it was a table."""

import dataclasses
import importlib
import itertools
import pkgutil
import sys
import textwrap

import expecttest
import pytest
import torch
from torch import nn

import amp_graph.passes
from amp_graph import Policy
from amp_graph.errors import PolicyError
from amp_graph.passes.base import Pass
from amp_graph.passes.pipeline_row import BIT_EXACT, Phase, Stage
from amp_graph.passes.pipeline_table import GROUPS, SKIPPABLE, TABLE, passes_named, pipeline, why_off
from amp_graph.passes.weights.frozen_weights import FrozenWeights
from amp_graph.step.step_table import EVERY, STEP_TABLE

ROWS = {row.name: row for row in TABLE}


def names(phase, policy="bf16", device="cpu", grad=True, **mode):
    with torch.set_grad_enabled(grad):
        return [one.name for one in pipeline(phase, Policy.parse(policy).pipeline_options(device, **mode))]


# -- which passes run, by mode ------------------------------------------------------------------------------


class TestSelection(expecttest.TestCase):
    """What runs in each mode, as it was when functions made the lists."""

    def test_golden(self):
        frozen = FrozenWeights(nn.Linear(1, 1), torch.bfloat16)
        shown = {
            "eager": names(Phase.CAPTURED, eager=True),
            "calls, training": names(Phase.CALLS),
            "calls, inference": names(Phase.CALLS, grad=False),
            "calls, frozen": names(Phase.CALLS, grad=False, frozen=frozen),
            "captured to be compiled": names(Phase.CAPTURED),
            "captured for a step": names(Phase.CAPTURED, in_step=True),
            "eager, for a step": names(Phase.CAPTURED, eager=True, in_step=True),
            "without the kernel of attention": names(Phase.CAPTURED, "bf16,skip=attention"),
            "compiled": names(Phase.COMPILED),
            "handover": names(Phase.HANDOVER),
            "inductor": names(Phase.INDUCTOR),
            "step": names(Phase.STEP),
            "portable": names(Phase.CAPTURED, portable=True),
            "emulation": names(Phase.CAPTURED, "fp16,emulate=cuda", eager=True),
            "autocast's lists": names(Phase.CAPTURED, "bf16,lists=autocast_cpu", eager=True),
            # What is not required is left out of a graph in which it fails.
            "required": sorted(row.name for row in EVERY if row.cls.required),
        }
        lines = [
            textwrap.fill(f"{mode}: {' '.join(found)}", 110, subsequent_indent="  ") for mode, found in shown.items()
        ]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
eager: identify-ops widen-halves remove-no-op-dropout einsum-to-matmul fuse-gelu fuse-rms-norm conv-to-linear
  fuse-attention decompose-composites plan-precision insert-casts eliminate-casts share-casts fp32-norm-
  gradients attention gru-state lstm-backward cudnn-rnn contiguous-linear-input channels-last lower-pointwise-
  conv depthwise global-avg-pool-gradient pad-shapes pad-channels fuse-batch-norm-relu fuse-cross-entropy max-
  pool-by-halves recompute-activations lower-linears
calls, training: batch-weight-casts reuse-embedding-gradients
calls, inference: batch-weight-casts
calls, frozen: freeze-weights batch-weight-casts fold-batch-norms prepack-weights
captured to be compiled: identify-ops widen-halves remove-no-op-dropout einsum-to-matmul fuse-gelu fuse-rms-
  norm conv-to-linear fuse-attention decompose-composites plan-precision insert-casts eliminate-casts share-
  casts fp32-norm-gradients attention gru-state lstm-backward cudnn-rnn contiguous-linear-input channels-last
  depthwise global-avg-pool-gradient pad-shapes pad-channels
captured for a step: identify-ops widen-halves remove-no-op-dropout einsum-to-matmul fuse-gelu fuse-rms-norm
  conv-to-linear fuse-attention decompose-composites plan-precision insert-casts eliminate-casts share-casts
  fp32-norm-gradients attention gru-state lstm-backward cudnn-rnn contiguous-linear-input channels-last lower-
  pointwise-conv depthwise global-avg-pool-gradient pad-shapes pad-channels fuse-batch-norm-relu
eager, for a step: identify-ops widen-halves remove-no-op-dropout einsum-to-matmul fuse-gelu fuse-rms-norm
  conv-to-linear fuse-attention decompose-composites plan-precision insert-casts eliminate-casts share-casts
  fp32-norm-gradients attention gru-state lstm-backward cudnn-rnn contiguous-linear-input channels-last lower-
  pointwise-conv depthwise global-avg-pool-gradient pad-shapes pad-channels fuse-batch-norm-relu fuse-cross-
  entropy max-pool-by-halves recompute-activations lower-linears
without the kernel of attention: identify-ops widen-halves remove-no-op-dropout einsum-to-matmul fuse-gelu
  fuse-rms-norm conv-to-linear decompose-composites plan-precision insert-casts eliminate-casts share-casts
  fp32-norm-gradients gru-state lstm-backward cudnn-rnn contiguous-linear-input channels-last depthwise
  global-avg-pool-gradient pad-shapes pad-channels
compiled: reuse-embedding-gradients
handover: lower-rnn
inductor: lower-weight-gradients
step: lower-weight-gradients logits-gradient-in-place row-gradients
portable: identify-ops widen-halves remove-no-op-dropout einsum-to-matmul fuse-gelu fuse-rms-norm conv-to-
  linear fuse-attention decompose-composites plan-precision insert-casts eliminate-casts share-casts use-
  portable-ops uniform-operands check-portable
emulation: identify-ops widen-halves remove-no-op-dropout einsum-to-matmul fuse-gelu fuse-rms-norm conv-to-
  linear fuse-attention decompose-composites plan-precision insert-casts eliminate-casts share-casts emulate-
  cuda
autocast's lists: identify-ops widen-halves remove-no-op-dropout decompose-composites plan-precision insert-
  casts eliminate-casts share-casts fp32-norm-gradients
required: add-update-targets agree-on-shards average-over-ranks check-finite-and-unscale check-portable clip-
  gradients emulate-cuda fp32-norm-gradients identify-ops insert-casts lay-out-gradients plan-precision
  return-outputs scale-loss scatter-gradients shard-parameters uniform-operands update-loss-scale update-
  parameters use-portable-ops widen-halves write-low-copies""",
        )


def test_gradients_and_devices_do_not_change_which_passes_see_a_captured_graph():
    for mode in (dict(eager=True), {}):
        for device, grad in itertools.product(("cpu", "cuda"), (True, False)):
            assert names(Phase.CAPTURED, device=device, grad=grad, **mode) == names(Phase.CAPTURED, **mode)


def test_options_reach_the_passes():
    policy = Policy.parse("fp16,accuracy=fast,device=cuda,keep_outputs=false,keep_fp32=head,recompute=all")
    made = {one.name: one for one in pipeline(Phase.CAPTURED, policy.pipeline_options("cpu", eager=True, in_step=True))}
    o = made["plan-precision"].options
    assert (o.dtype, o.accuracy, o.keep_fp32, o.keep_outputs) == (torch.float16, "fast", "head", False)
    assert (o.planner, o.in_step, o.planned_for, o.recompute) == ("mincut", True, "cuda", "all")
    assert all(one.options is o for one in made.values() if hasattr(one, "options"))
    assert {"pad-shapes", "fuse-attention", "recompute-activations", "lower-linears"} <= made.keys()


# -- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.name)
def test_a_row_agrees_with_its_pass(row):
    told = " ".join((row.cls.__doc__ or "").split()).lower().replace("*", "")
    assert row.law.endswith(".")
    assert len(row.law) < 250
    if row.grade == BIT_EXACT:
        assert "bit-exact" in told
    elif row.grade.startswith("approximate"):
        assert len(row.grade) > len("approximate ()")
    else:
        assert "rounding-equal" in told
    assert not (row.cls.required and row.skippable) or row.name == "fp32-norm-gradients"
    assert set(row.devices) <= {"cpu", "cuda"}
    assert row.phases


def test_the_backend_is_what_stands_in_its_room():
    assert all(row.backend == (row.stage is Stage.BACKEND) for row in EVERY)
    in_rooms = [row for row in EVERY if row.cls.__module__.count(".") > 2]
    for row in in_rooms:  # amp_graph.passes.backends.cpu.norm.fuse_add_norm
        assert row.backend == row.cls.__module__.startswith("amp_graph.passes.backends."), row.name


@pytest.mark.parametrize("table", [TABLE, STEP_TABLE])
def test_a_pass_has_one_row_and_joins_passes_that_are_there(table):
    assert len({row.name for row in table}) == len(table)
    assert {name for row in table for name in row.joins} <= {row.name for row in table}


def test_every_pass_has_a_row():
    for module in pkgutil.walk_packages(amp_graph.passes.__path__, "amp_graph.passes."):
        importlib.import_module(module.name)

    def below(cls):
        return {cls, *(one for sub in cls.__subclasses__() for one in below(sub))}

    bases = ("Pass", "NodePass", "JointPass")
    named = {c for c in below(Pass) if c.__module__.startswith("amp_graph.") and c.__name__ not in bases}
    ours = {cls for cls in named if getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls}
    assert ours == {row.cls for row in EVERY}
    assert len(EVERY) == len(ours)


def test_a_pass_has_options_and_no_state():
    """A pass that writes to itself would remember one graph in the next."""
    for row in EVERY:
        assert dataclasses.is_dataclass(row.cls), row.name
        assert row.cls.__dataclass_params__.frozen, row.name


# -- skip= --------------------------------------------------------------------------------------------------


def test_skipping_the_backend_leaves_the_core():
    frozen = FrozenWeights(nn.Linear(1, 1), torch.bfloat16)
    for phase, grad in itertools.product(Phase, (True, False)):
        mode = dict(grad=grad, eager=True, frozen=None if grad else frozen)
        left, all_of_them = names(phase, "bf16,skip=backend", **mode), names(phase, **mode)
        assert left == [n for n in all_of_them if not ROWS[n].backend and n != "fuse-attention"]


def test_groups_are_the_stages_and_no_pass_has_the_name_of_one():
    assert sorted(GROUPS) == ["backend", "casts", "layout", "memory", "recognize", "weights"]
    assert not {*GROUPS} & {one.word for one in TABLE}
    assert {"gru-state", "fold-batch-norms", "lower-weight-gradients"} <= {*GROUPS["backend"]}
    assert "insert-casts" not in GROUPS["casts"]
    assert "freeze-weights" not in GROUPS["weights"]


@pytest.mark.parametrize("word", [*SKIPPABLE, *GROUPS])
def test_each_word_leaves_out_what_it_names(word):
    policy = Policy.parse(f"bf16,skip={word}")
    assert Policy.parse(str(policy)) == policy
    options = policy.pipeline_options("cpu", eager=True, frozen=FrozenWeights(nn.Linear(1, 1), torch.bfloat16))
    assert {*options.skip} == {*passes_named([word])}
    for name in options.skip:
        assert why_off(ROWS[name], options) == f"skip={word} in the policy"
    assert all(not {one.name for one in pipeline(phase, options)} & {*options.skip} for phase in Phase)


@pytest.mark.parametrize(
    ("word", "near"),
    [("atention", "'attention'"), ("backends", "'backend'"), ("fuse-glu", "'fuse_gelu'"), ("insert_casts", "'")],
)
def test_an_unknown_word_is_one_error_with_the_nearest_ones(word, near):
    what = "this pass is not optional" if word == "insert_casts" else "no such pass"
    with pytest.raises(PolicyError, match=rf"(?s){what}.*legal: .*passes.md.*backend.*fix: ") as error:
        Policy.parse(f"bf16,skip={word}")
    assert near in str(error.value)
    assert len(str(error.value)) < 400
