"""The table of the passes that append the rest of a training step to its joint graph, in the order in which they run.

Before: ``pipeline_table.TABLE``, of what policies choose. After: ``EVERY``, that and ``STEP_TABLE``, whose passes
``step_passes.appended_passes`` builds from the parts of a step: no policy leaves one out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from amp_graph.passes.base import Pass, PassError
from amp_graph.passes.loss_scaling import (
    AverageOverRanks,
    CheckFiniteAndUnscale,
    ClipGradients,
    ScaleLoss,
    UpdateLossScale,
)
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.pipeline_row import BIT_EXACT, Condition, Grade, Phase, Row, Stage, approximate
from amp_graph.passes.pipeline_row import checked as checked_rows
from amp_graph.passes.pipeline_table import TABLE
from amp_graph.passes.step.add_gradients import AddGradients, ZeroSums
from amp_graph.passes.step.lay_out_gradients import LayOutGradients, UpcastGradients
from amp_graph.passes.step.low_copies import WriteLowCopies
from amp_graph.passes.step.outputs import ReturnOutputs
from amp_graph.passes.step.update_parameters import UpdateParameters
from amp_graph.passes.step.update_targets import AddUpdateTargets


def _of_step(word: str, otherwise: str) -> Condition:
    """Return a condition that an argument of ``TrainStep`` or its model decides: with a policy alone it is not met."""
    return Condition(word, otherwise, lambda options: False)


def _scales(options: PipelineOptions) -> bool:
    return options.dtype is torch.float16


SCALED = Condition("loss scale", "only with a loss scale, as fp16 has by default", _scales)
SCALED_OR_SPLIT = Condition(
    "loss scale or micro-batches", "only with a loss scale, as fp16 has by default, or with micro_batches", _scales
)
SPLIT = _of_step("micro-batches", "only with micro_batches")
RANKS = _of_step("ranks", "only with several ranks")
CLIPPED = _of_step("clip", "only with clip_norm or clip_value")
SCALED_OR_CLIPPED = Condition("loss scale or clip", "only with a loss scale, as fp16 has by default, or clips", _scales)
MASTERS = _of_step("update targets", "only with fp32 masters (O2), or parameters that other micro-batches alone read")
EAGERLY = Condition("eager", "needs a step that runs eagerly; a compiler fuses these casts", lambda o: o.eager)


def _row(cls: type[Pass], stage: Stage, grade: Grade, *needs: Condition, after: tuple[type[Pass], ...] = ()) -> Row:
    names = tuple(one.name for one in after)
    return Row(cls, stage, grade, (Phase.JOINT,), ("cpu", "cuda"), needs, after=names, skippable=False)


SCALING, STEP = Stage.LOSS_SCALING, Stage.STEP
STEP_TABLE = checked_rows((
    _row(ScaleLoss, SCALING, BIT_EXACT, SCALED_OR_SPLIT),
    _row(AddUpdateTargets, STEP, BIT_EXACT, MASTERS),
    _row(LayOutGradients, STEP, BIT_EXACT, after=(AddUpdateTargets,)),
    _row(AddGradients, STEP, BIT_EXACT, SPLIT, after=(ScaleLoss, LayOutGradients)),
    _row(AverageOverRanks, SCALING, approximate("the order of the sum is the network's"), RANKS, after=(AddGradients,)),
    _row(UpcastGradients, STEP, BIT_EXACT, EAGERLY, SCALED_OR_CLIPPED, after=(AverageOverRanks,)),
    _row(CheckFiniteAndUnscale, SCALING, approximate("bit-exact where the scale is a power of two"), SCALED,
         after=(ScaleLoss, AverageOverRanks, UpcastGradients)),
    _row(ClipGradients, SCALING, BIT_EXACT, CLIPPED, after=(CheckFiniteAndUnscale,)),
    _row(UpdateParameters, STEP, BIT_EXACT, after=(AddUpdateTargets, CheckFiniteAndUnscale, ClipGradients)),
    _row(UpdateLossScale, SCALING, BIT_EXACT, SCALED, after=(CheckFiniteAndUnscale,)),
    _row(WriteLowCopies, STEP, BIT_EXACT, after=(UpdateParameters,)),
    _row(ZeroSums, STEP, BIT_EXACT, SPLIT, after=(AddGradients, UpdateParameters)),
    _row(ReturnOutputs, STEP, BIT_EXACT, after=(AddGradients, CheckFiniteAndUnscale)),
))  # fmt: skip
EVERY: tuple[Row, ...] = (*TABLE, *STEP_TABLE)
_PLACES = {row.name: place for place, row in enumerate(STEP_TABLE)}


def in_order(passes: Sequence[Pass]) -> list[Pass]:
    """Return ``passes``; raise PassError where they are not in the order of the table, or one is not in it."""
    last = ""
    for one in passes:
        if one.name not in _PLACES:
            raise PassError(f"training step: {one.name!r} has no row in STEP_TABLE\n  fix:   give it one, in its place")
        if last and _PLACES[one.name] < _PLACES[last]:
            raise PassError(
                f"training step: the pass {one.name!r} is appended behind {last!r}\n"
                f"  legal: the order of STEP_TABLE, {one.name!r} before {last!r}\n"
                f"  fix:   change the order in appended_passes, or that of the rows"
            )
        last = one.name
    return list(passes)
