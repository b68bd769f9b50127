"""Lists the passes that append the rest of a training step to its joint graph, and the inputs that they add.

Before: ``StepParts``. After: ``[ScaleLoss(), ..., UpdateLossScale(), WriteLowCopies()]``, and a tensor by input's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

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
from amp_graph.passes.loss_scaling.scale_loss import SCALE
from amp_graph.passes.loss_scaling.update_scale import COUNTS
from amp_graph.passes.step.add_gradients import AddGradients, ZeroSums, add_in_place
from amp_graph.passes.step.lay_out_gradients import LayOutGradients, UpcastGradients
from amp_graph.passes.step.low_copies import WriteLowCopies
from amp_graph.passes.step.outputs import ReturnOutputs
from amp_graph.passes.step.update_parameters import GroupInputs, UpdateParameters
from amp_graph.passes.step.update_targets import AddUpdateTargets
from amp_graph.step.step_parts import StepParts
from amp_graph.step.step_table import in_order


def appended_passes(parts: StepParts, outputs: int, inputs: Mapping[int, str]) -> tuple[list[Pass], dict[str, Tensor]]:
    """Return the passes that complete a joint graph to a whole step, and the tensors of the inputs that they add.

    The order is that of ``STEP_TABLE``; PassError where it is not.
    outputs: how many outputs the captured forward has. inputs: the joint graph's inputs by their numbers; the copies of
    weights follow the captured graph's own.
    """
    work = _Appended(parts, inputs)
    options, scaled = parts.options, parts.scale is not None
    gradients: list[Pass] = [
        *([ScaleLoss(options.micro_batches, scaled)] if scaled or options.micro_batches > 1 else []),
        *(AddUpdateTargets(found) for found in (work.absent(), work.masters()) if found),
        LayOutGradients(parts.keeps()),
    ]
    sums = work.sums()
    updates = options.last and bool(parts.trained)
    returned = ReturnOutputs(outputs, options.outside and options.last)
    found = [
        *gradients,
        *([work.add_gradients(sums)] if sums else []),
        *(work.update() if updates else []),
        *([ZeroSums(tuple(sums.values()))] if updates and sums else []),
        returned,
    ]
    return in_order(found), work.tensors


def names_of_trained(parts: StepParts) -> dict[int, str]:
    """Return a unique name for each trained number."""
    names = {i: parts.name_of(i) for i in parts.trained}
    often = Counter(names.values())
    return {i: name if often[name] == 1 else f"{name} ({i})" for i, name in names.items()}


@dataclass
class _Appended:
    """Builds the passes; ``tensors`` collects the inputs that they add."""

    parts: StepParts
    inputs: Mapping[int, str]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = names_of_trained(self.parts)
        if self.parts.scale is not None:
            self.tensors.update(zip((SCALE, *COUNTS), self.parts.scale.state, strict=True))

    def absent(self) -> dict[str, StateInput]:
        """Return the inputs of parameters that the graph does not read."""
        of = self.parts.absent
        return {self.names[i]: self._input(_absent(i), p, self.parts.name_of(i)) for i, p in of.items()}

    def masters(self) -> dict[str, StateInput]:
        """Return the inputs of masters, by the names of their parameters."""
        found = {}
        for n, (i, full) in enumerate(self.parts.masters.items()):
            found[self.names[i]] = self._input(f"master_weight_{n}", full, f"master of {self.parts.name_of(i)}")
        return found

    def sums(self) -> dict[str, StateInput]:
        """Return the inputs of summed gradients, in the order of ``trained``."""
        if not self.parts.accumulators:
            return {}
        pairs = zip(self.parts.trained, self.parts.accumulators, strict=True)
        named = [(i, f"gradient_sum_{n}", total) for n, (i, total) in enumerate(pairs)]
        return {self.names[i]: self._input(name, t, f"gradient of {self.parts.name_of(i)}") for i, name, t in named}

    def add_gradients(self, sums: Mapping[str, StateInput]) -> AddGradients:
        """Return the pass that adds gradients to ``sums``."""
        options = self.parts.options
        into = "new" if options.last and self.parts.ranks is not None else "sums"
        return AddGradients(sums, add_in_place, into, options.last, options.outside and into == "sums")

    def update(self) -> list[Pass]:
        """Return the passes that average, unscale, clip, update, adjust the scale and write low-precision copies."""
        parts, options = self.parts, self.parts.options
        ranks = parts.ranks
        averaged = [] if ranks is None else [AverageOverRanks(ranks.group, ranks.size, ranks.dtype)]
        moved = [UpdateLossScale(*parts.scale.options())] if parts.scale is not None else []
        copies = {} if options.outside else self._copies()
        clips = options.clip_norm, options.clip_value
        clipped = any(limit is not None for limit in clips)
        return [
            *averaged,
            *([UpcastGradients()] if (parts.scale is not None or clipped) and not options.pointwise else []),
            *([CheckFiniteAndUnscale()] if parts.scale is not None else []),
            *([ClipGradients(*clips, self._norm())] if clipped else []),
            UpdateParameters(self._groups()),
            *moved,
            WriteLowCopies(copies, options.pointwise),
        ]

    def _norm(self) -> StateInput | None:
        """Return the input that gets the norm of the gradients."""
        norm = self.parts.norm
        return None if norm is None else self._input("gradient_norm", norm, "norm of the gradients")

    def _groups(self) -> tuple[GroupInputs, ...]:
        """Return the inputs of each parameter group."""
        parts, found = self.parts, []
        numbers = {id(parts.tensor_of(i)): i for i in parts.trained}
        for n, (update, rate) in enumerate(zip(parts.updates, parts.learning_rates, strict=True)):
            own = [numbers[id(p)] for p in update.params]
            states = [
                [
                    self._input(f"state_{n}_{k}_{kind}", t, f"{kind} of {parts.name_of(i)}")
                    for k, (i, t) in enumerate(zip(own, tensors, strict=True))
                ]
                for kind, tensors in zip(update.state_names(), update.states, strict=True)
            ]
            apply = update.apply_pointwise if parts.options.pointwise else update.apply
            rate_input = self._input(f"learning_rate_{n}", rate, "learning rate")
            found.append(GroupInputs(apply, [self.names[i] for i in own], rate_input, states, elementwise=True))
        return tuple(found)

    def _copies(self) -> dict[str, list[str]]:
        """Return the inputs to round from each parameter, by its name: its copies, and itself if it has a master."""
        parts = self.parts
        found = {self.names[i]: [_absent(i) if i in parts.absent else self.inputs[i]] for i in parts.masters}
        for n, (i, _) in enumerate(parts.copies, len(parts.args)):
            if i in self.names:
                found.setdefault(self.names[i], []).append(self.inputs[n])
        return found

    def _input(self, name: str, tensor: Tensor, shown: str) -> StateInput:
        self.tensors[name] = tensor
        return StateInput(name, tensor, shown)


def _absent(number: int) -> str:
    return f"unread_weight_{-number}"
