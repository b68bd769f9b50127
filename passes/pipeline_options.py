"""The options that decide which passes run and what they do: a policy and a mode as one frozen value.

Before: ``Policy.parse("bf16").pipeline_options("cpu", eager=True)``. After: ``pipeline(Phase.CAPTURED, options)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_graph.lists import OpList
from amp_graph.passes.calibration.calibration import Calibration


@dataclass(frozen=True)
class PipelineOptions:
    """The options of all passes; ``Policy.pipeline_options`` makes them.

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
    measured: the ``Measured`` influence of roundings in graphs like this one, for an error budget.
    calibration: the measured ranges of values. keep_ops: keys of operations that stay in full precision.
    frozen: the ``FrozenWeights`` of a frozen model; None of one that is not frozen.
    user: for whom memory is kept, as long as it lives.
    """

    lists: OpList
    dtype: torch.dtype
    device: str = "cpu"
    planned_for: str = "cpu"
    accuracy: str | float = "autocast"
    keep_fp32: str = ""
    keep_outputs: bool = True
    planner: str = "mincut"
    leaves: str = "false"
    recompute: str = "some"
    emulates: bool = False
    skip: Mapping[str, str] = field(default_factory=dict)
    eager: bool = False
    inductor: Mapping[str, Any] | None = None
    in_step: bool = False
    training: bool = True
    portable: bool = False
    measured: tuple[Any, ...] = ()
    calibration: Calibration | None = None
    keep_ops: tuple[str, ...] = ()
    frozen: Any = None
    user: object = None

    @property
    def folds_norms(self) -> bool:
        """Whether batch norms in evaluation will be folded into the convolutions before them."""
        return self.frozen is not None and not self.emulates and "fold-batch-norms" not in self.skip
