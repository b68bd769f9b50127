"""The table of the passes that append the rest of a training step to its joint graph, in the order in which they run.

Before: ``pipeline_table.TABLE``, of what policies choose. After: ``EVERY``, that and ``STEP_TABLE``, whose passes
``appended_passes`` builds from the parts of a step: no policy leaves one out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.base import Pass
from amp_graph.passes.loss_scaling import (
    AverageOverRanks,
    CheckFiniteAndUnscale,
    ClipGradients,
    ScaleLoss,
    UpdateLossScale,
)
from amp_graph.passes.loss_scaling.append import StateInput
from amp_graph.passes.loss_scaling.scale_loss import COUNTS, SCALE
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.pipeline_row import BIT_EXACT, Condition, Phase, Row, Stage, approximate
from amp_graph.passes.pipeline_table import TABLE
from amp_graph.passes.sharding.round_lookups import RoundLookups
from amp_graph.passes.sharding.scatter_gradients import AgreeOnShards, ScatterGradients
from amp_graph.passes.sharding.shard_parameters import Shard, ShardParameters
from amp_graph.passes.step.lay_out_gradients import LayOutGradients
from amp_graph.passes.step.update_parameters import (
    AddUpdateTargets,
    GroupInputs,
    ReturnOutputs,
    UpdateParameters,
    WriteLowCopies,
)
from amp_graph.step.step_parts import StepParts


def _of_step(word: str, otherwise: str) -> Condition:
    """Return a condition that an argument of ``TrainStep`` or its model decides: with a policy alone it is not met."""
    return Condition(word, otherwise, lambda options: False)


def _scales(options: PipelineOptions) -> bool:
    return options.dtype is torch.float16


SCALED = Condition("loss scale", "only with a loss scale, as fp16 has by default", _scales)
SCALED_OR_SPLIT = Condition(
    "loss scale or micro-batches", "only with a loss scale, as fp16 has by default, or with micro_batches", _scales
)
RANKS = _of_step("ranks", "only with several ranks")
SHARDED = _of_step("sharded parameters", "only with parameters that fully_shard has sharded")
CLIPPED = _of_step("clip", "only with clip_norm or clip_value")
MASTERS = _of_step("update targets", "only with fp32 masters (O2)")


def _row(cls: type[Pass], stage: Stage, grade: str, *needs: Condition) -> Row:
    return Row(cls, stage, grade, (Phase.JOINT,), ("cpu", "cuda"), needs, skippable=False)


NETWORK = approximate("the order of the sum is the network's")
SCALING, STEP = Stage.LOSS_SCALING, Stage.STEP
STEP_TABLE = (
    _row(ScaleLoss, SCALING, BIT_EXACT, SCALED_OR_SPLIT),
    _row(AddUpdateTargets, STEP, BIT_EXACT, MASTERS),
    _row(RoundLookups, STEP, approximate("what embeddings return is rounded once"), SHARDED),
    _row(ShardParameters, STEP, BIT_EXACT, SHARDED),
    _row(ScatterGradients, STEP, NETWORK, SHARDED),
    _row(LayOutGradients, STEP, BIT_EXACT),
    _row(AverageOverRanks, SCALING, NETWORK, RANKS),
    _row(CheckFiniteAndUnscale, SCALING, approximate("bit-exact where the scale is a power of two"), SCALED),
    _row(AgreeOnShards, STEP, NETWORK, SHARDED),
    _row(ClipGradients, SCALING, BIT_EXACT, CLIPPED),
    _row(UpdateParameters, STEP, BIT_EXACT),
    _row(UpdateLossScale, SCALING, BIT_EXACT, SCALED),
    _row(WriteLowCopies, STEP, BIT_EXACT),
    _row(ReturnOutputs, STEP, BIT_EXACT),
)  # fmt: skip
EVERY: tuple[Row, ...] = (*TABLE, *STEP_TABLE)


def appended_passes(parts: StepParts, outputs: int, inputs: Mapping[int, str]) -> tuple[list[Pass], dict[str, Tensor]]:
    """Return the passes that complete a joint graph to a whole step, and the tensors of the inputs that they add.

    outputs: how many outputs the captured forward has. inputs: the joint graph's inputs by their numbers; the copies of
    weights follow the captured graph's own.
    """
    work, scaled, splits = _Appended(parts, inputs), parts.of.loss_scale is not None, parts.of.micro_batches > 1
    masters = work.masters()
    found = [
        *([ScaleLoss(parts.of.micro_batches, scaled)] if scaled or (splits and parts.forward) else []),
        *([AddUpdateTargets(masters)] if masters else []),
        *work.sharding(),
        parts.layout(),
        *(work.update() if parts.trained and not parts.adds else []),
        ReturnOutputs(outputs, parts.outside or parts.adds),
    ]
    return found, work.tensors


def names_of_trained(parts: StepParts) -> dict[int, str]:
    """Return a unique name for each trained number."""
    often = Counter(parts.names[i] for i in parts.trained)
    return {i: name if often[name := parts.names[i]] == 1 else f"{name} ({i})" for i in parts.trained}


@dataclass
class _Appended:
    """Builds the passes; ``tensors`` collects the inputs that they add."""

    parts: StepParts
    inputs: Mapping[int, str]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names, self.state = names_of_trained(self.parts), self.parts.of.state
        targets = {i: self.state.target_of(self.parts.args[i]) for i in self.names}
        self.full = {i: full for i, full in targets.items() if full is not self.parts.args[i]}  # masters
        own = {i: self._shard(self.parts.args[i]) for i in self.names}
        self.shards = {self.names[i]: shard for i, shard in own.items() if shard is not None}
        if self.parts.of.loss_scale is not None:
            self.tensors.update(zip((SCALE, *COUNTS), self.parts.of.loss_scale.state, strict=True))

    def sharding(self) -> list[Pass]:
        """Return the passes that gather sharded parameters, and reduce the gradients that backward has of them."""
        parts = self.parts
        found = {self.inputs[i]: shard for i, a in enumerate(parts.args) if (shard := self._shard(a)) is not None}
        units = parts.of.sharded.units
        tables = {self.inputs[i]: dtype for i, dtype in parts.tables.items() if self.inputs[i] in found}
        rounded = [RoundLookups(tables)] if tables else []
        reduced = [ScatterGradients(units, self.shards)] if self.shards and parts.forward is not None else []
        return [*rounded, ShardParameters(units, found), *reduced] if found else []

    def _shard(self, given: Any) -> Shard | None:
        """Return the shard of an input, if it is sharded."""
        unit = self.parts.of.sharded.unit_of(given)
        return None if unit is None else (unit, self.parts.of.sharded.local(given))

    def masters(self) -> dict[str, StateInput]:
        """Return the inputs of masters, by the names of their parameters."""
        found = {}
        for n, (i, full) in enumerate(self.full.items()):
            found[self.names[i]] = self._input(f"master_weight_{n}", full, f"master of {self.parts.names[i]}")
        return found

    def update(self) -> list[Pass]:
        """Return the passes that average, unscale, clip, update, adjust the scale and write low-precision copies."""
        of, ranks, scale = self.parts.of, self.parts.of.ranks, self.parts.of.loss_scale
        without, absent = frozenset(self.shards), frozenset(self.names[i] for i in self.parts.absent)
        averaged = [] if ranks is None else [AverageOverRanks(ranks.group, ranks.size, ranks.dtype, without, absent)]
        moved = [UpdateLossScale(*scale.options())] if scale is not None else []
        copies = {} if self.parts.outside else self._copies()
        clips = of.clip_norm, of.clip_value
        clipped = any(limit is not None for limit in clips)
        agrees = scale is not None or of.clip_norm is not None
        return [
            *averaged,
            *([CheckFiniteAndUnscale()] if scale is not None else []),
            *([AgreeOnShards(of.sharded.units[0], without)] if without and agrees else []),
            *([ClipGradients(*clips, self._norm())] if clipped else []),
            UpdateParameters(self._groups()),
            *moved,
            WriteLowCopies(copies, of.compile != "eager"),
        ]

    def _norm(self) -> StateInput | None:
        """Return the input that gets the norm of the gradients."""
        if self.parts.of.clip_norm is None:
            return None
        device = self.parts.args[self.parts.trained[0]].device
        return self._input("gradient_norm", self.state.norm_on(device), "norm of the gradients")

    def _groups(self) -> tuple[GroupInputs, ...]:
        """Return the inputs of each parameter group."""
        parts, found = self.parts, []
        numbers = {id(parts.of.sharded.parameter(parts.args[i])): i for i in parts.trained}
        for n, update in enumerate(parts.updates):
            own = [numbers[id(p)] for p in update.params]
            states = [
                [
                    self._input(f"state_{n}_{k}_{kind}", parts.of.sharded.local(t), f"{kind} of {parts.names[i]}")
                    for k, (i, t) in enumerate(zip(own, tensors, strict=True))
                ]
                for kind, tensors in zip(update.names, update.states, strict=True)
            ]
            apply = update.apply if parts.of.compile == "eager" else update.apply_pointwise
            rate_input = self._input(f"learning_rate_{n}", self.state.rate_of(update.group), "learning rate")
            found.append(GroupInputs(apply, [self.names[i] for i in own], rate_input, states, elementwise=True))
        return tuple(found)

    def _copies(self) -> dict[str, list[str]]:
        """Return the inputs to round from each parameter, by its name: its copies, and itself if it has a master."""
        parts = self.parts
        found = {self.names[i]: [self.inputs[i]] for i in self.full}
        for n, (i, _) in enumerate(parts.copies, len(parts.args)):
            if i in self.names:
                found.setdefault(self.names[i], []).append(self.inputs[n])
        return found

    def _input(self, name: str, tensor: Tensor, shown: str) -> StateInput:
        self.tensors[name] = tensor
        return StateInput(name, tensor, shown)
