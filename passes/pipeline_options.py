"""What decides which passes run and how each is built: a policy and a mode as one frozen value.

Before: ``Policy.parse("bf16").pipeline_options("cpu", eager=True)``. After: ``pipeline(Phase.CAPTURED, options)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from amp_graph.lists import OpList

if TYPE_CHECKING:  # types of fields alone: policies are made without loading the passes
    from amp_graph.passes.precision.measure_sensitivity import Measured
    from amp_graph.passes.weights.cast_cache import WeightCopies


@dataclass(frozen=True)
class PipelineOptions:
    """The options of a pipeline; ``Policy.pipeline_options`` makes them.

    lists: which operation may run in which precision. dtype: the low precision.
    device: where the graph runs. planned_for: the device to plan for, which a policy may name.
    skip: the names of passes to leave out, each with the word of the policy that does so.
    eager: the graph runs as it is, not through a compiler, which does by itself what some passes do.
    in_step: the graph becomes a part of the graph of a whole training step. Our kernels for images are traced into
    that whoever compiles it, as Inductor's batch norms and 1x1 convolutions are slower.
    training: gradients are recorded.
    measured: what roundings do in graphs like this one, for an error budget.
    copies: the low-precision copies of weights that outlive the call; None where there are none.
    user: who owns the memory that compiled graphs keep.
    """

    lists: OpList
    dtype: torch.dtype
    device: str
    planned_for: str
    accuracy: str | float = "autocast"
    keep_fp32: str = ""
    keep_outputs: bool = True
    planner: str = "mincut"
    leaves: str = "false"
    recompute: str = "some"
    weight_copies: bool = True
    keep_memory: bool = False
    skip: Mapping[str, str] = field(default_factory=dict)
    eager: bool = False
    in_step: bool = False
    training: bool = True
    measured: tuple[Measured, ...] = ()
    copies: WeightCopies | None = None
    user: object = None
