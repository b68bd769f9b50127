"""The options that decide which passes run and how they are built: a policy and a mode as one frozen value.

Before: ``Policy.parse("bf16").pipeline_options("cpu", eager=True)``. After: ``pipeline(Phase.CAPTURED, options)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from amp_graph.lists import OpList

if TYPE_CHECKING:  # only types of fields: creating a policy does not load the passes
    from amp_graph.passes.calibration.calibration import Calibration
    from amp_graph.passes.precision.measure_sensitivity import Measured
    from amp_graph.passes.weights.cast_cache import WeightCopies


@dataclass(frozen=True)
class PipelineOptions:
    """The options of a pipeline; ``Policy.pipeline_options`` makes them.

    lists: which operation may run in which precision. dtype: the low precision.
    device: where the graph runs. planned_for: the device to plan for, which a policy may name.
    emulates: what the device planned for would compute is emulated on the CPU.
    skip: the names of passes to skip, each with the word of the policy that names it.
    eager: the graph runs eagerly, not through a compiler, which does the work of some passes itself.
    inductor: the user's options for Inductor if the graph runs through it; else None.
    in_step: the graph becomes part of the graph of a whole training step. Our image kernels are traced into that for
    any compiler, as Inductor's batch norms and 1x1 convolutions are slower.
    training: gradients are recorded.
    portable: other programs will load the graph: ATen operators and plain casts only.
    measured: the measured influence of roundings in graphs like this one, for an error budget.
    calibration: the measured ranges of values. keep_ops: keys of operations that stay in full precision.
    copies: the cached low-precision copies of weights; None if there are none.
    user: the owner of the memory that compiled graphs keep.
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
    emulates: bool = False
    skip: Mapping[str, str] = field(default_factory=dict)
    eager: bool = False
    inductor: Mapping[str, Any] | None = None
    in_step: bool = False
    training: bool = True
    portable: bool = False
    measured: tuple[Measured, ...] = ()
    calibration: Calibration | None = None
    keep_ops: tuple[str, ...] = ()
    copies: WeightCopies | None = None
    user: object = None
