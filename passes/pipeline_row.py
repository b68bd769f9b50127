"""What a row of the table of passes says: stage, phase, conditions, exactness.

``Row(RemoveNoOpDropout, Stage.RECOGNIZE, BIT_EXACT, needs=(OPAQUE,))``.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass

from amp_graph.passes.base import Pass, PassError
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.torch_compat.inductor import pads_matmuls


class Stage(str, enum.Enum):
    """The subject of a pass, which is the folder that it is in."""

    GRAPH = "graph"
    RECOGNIZE = "recognize"
    PRECISION = "precision"
    CASTS = "casts"
    EMULATION = "emulation"
    LAYOUT = "layout"
    MEMORY = "memory"
    WEIGHTS = "weights"
    BACKEND = "backend"
    LOSS_SCALING = "loss_scaling"
    STEP = "step"


class Phase(str, enum.Enum):
    """The graph that a pass runs over."""

    CAPTURED = "captured"  # the graph that was captured, with torch-level calls
    CALLS = "calls"  # the same, afterwards, where it runs eagerly in calls of its model
    COMPILED = "compiled"  # the same, afterwards, where Inductor will compile it
    HANDOVER = "handover"  # the rewritten graph, just before any compiler takes it apart
    INDUCTOR = "inductor"  # the flat graphs inside Inductor, forward and backward
    STEP = "step"  # the joint graph of forward and backward of a training step that runs eagerly
    JOINT = "joint"  # the joint graph of any training step, to which these append the rest


# How exact a rewrite is.
BIT_EXACT = "bit-exact"  # results and gradients have the same bits
ROUNDING_EQUAL = "rounding-equal"  # as many roundings as before, of sums that may be in another order


def approximate(bound: str) -> str:
    """Return the grade of a rewrite that rounds other values, or another number of times."""
    return f"approximate ({bound})"


@dataclass(frozen=True)
class Condition:
    """What must hold for a pass to be in a pipeline: a word for tables, and the reason given where it does not hold."""

    word: str
    otherwise: str
    holds: Callable[[PipelineOptions], bool]


OPAQUE = Condition(
    "opaque lists",
    "the lists reproduce torch.autocast, operation by operation",
    lambda options: options.lists.unlisted == "opaque",
)
EAGER = Condition(
    "eager", "needs a graph that runs eagerly; a compiler does this itself", lambda options: options.eager
)
EAGER_OR_STEP = Condition(
    "eager or step",
    "needs a graph that runs eagerly, or a part of a training step",
    lambda options: options.eager or options.in_step,
)
PADS_MATMULS = Condition(
    "not where Inductor pads",
    "Inductor pads matmuls itself (torch._inductor.config.shape_padding), after timing both",
    lambda options: options.inductor is None or not pads_matmuls(options.inductor),
)
TRAINING = Condition("training", "needs gradients", lambda options: options.training)
FROZEN = Condition(
    "frozen", "needs a frozen model: amp_graph.freeze(model)", lambda options: options.frozen is not None
)
PORTABLE = Condition(
    "portable", "only in a portable graph, which other programs load", lambda options: options.portable
)
NOT_PORTABLE = Condition(
    "not portable", "inserts functions of ours, which a portable graph must not have", lambda o: not o.portable
)
SUMS = Condition("not portable inference", "a portable graph without gradients", lambda o: o.training or not o.portable)
EMULATES = Condition("emulation", "needs emulate=cuda in the policy", lambda options: options.emulates)
NOT_EMULATING = Condition(
    "not emulation", "emulate=cuda in the policy: the CPU's own kernels do not run", lambda o: not o.emulates
)
# Stages whose passes insert only what torch has; of the others none is in a portable graph.
PORTABLE_STAGES = (Stage.GRAPH, Stage.RECOGNIZE, Stage.PRECISION, Stage.CASTS)
# Stages whose passes are for speed or memory of the device that runs the graph: of none while another is emulated.
OF_THE_CPU = (Stage.LAYOUT, Stage.MEMORY, Stage.WEIGHTS, Stage.BACKEND)


@dataclass(frozen=True)
class Row:
    """One pass in the table of all passes.

    cls: the pass; its name and its law come from there. stage: its subject. grade: how exact it is.
    phases: the graphs that it runs over; in ``JOINT``, ``amp_graph.step.step_table.appended_passes`` builds it.
    devices: those for which it changes anything; it asks by itself, of each node.
    needs: what must hold for it to be in a pipeline. joins: names of passes without which it is left out.
    skippable: whether ``skip=`` may name it; the others make the plan and its casts, are parts of a training step, or
    have an option of their own.
    worth: what it is needed for besides speed and memory, which ``benchmarks/ablation.py`` measures.
    """

    cls: type[Pass]
    stage: Stage
    grade: str
    phases: tuple[Phase, ...] = (Phase.CAPTURED,)
    devices: tuple[str, ...] = ("cpu", "cuda")
    needs: tuple[Condition, ...] = ()
    joins: tuple[str, ...] = ()
    skippable: bool = True
    worth: str | None = None

    @property
    def name(self) -> str:
        """The name of the pass."""
        return self.cls.name

    @property
    def word(self) -> str:
        """The name of the pass as policies have it."""
        return self.name.replace("-", "_")

    @property
    def law(self) -> str:
        """What the pass does, as the first sentence of its docstring says."""
        first = (self.cls.__doc__ or "").strip().split("\n\n")[0]
        return " ".join(re.split(r"(?<=\.)\s", first, maxsplit=1)[0].split())

    @property
    def backend(self) -> bool:
        """Whether only one device, or one compiler, needs the pass; every graph is right without it."""
        return self.stage is Stage.BACKEND

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """What must hold for the pass to be in a pipeline: by its row, and by its stage."""
        portable = () if self.stage in PORTABLE_STAGES else (NOT_PORTABLE,)
        return (*self.needs, *portable, *((NOT_EMULATING,) if self.stage in OF_THE_CPU else ()))

    @property
    def by_step(self) -> bool:
        """Whether a training step builds the pass from its parts, and no pipeline from its options."""
        return self.phases == (Phase.JOINT,)

    def built(self, options: PipelineOptions) -> Pass:
        """Return the pass, with ``options`` if it has that field; PassError for one that a training step builds."""
        if self.by_step:
            raise PassError(
                f"pipeline: the pass {self.name!r} is built from the parts of a training step, not from a policy\n"
                f"  fix:   {self.cls.__name__}(...).run(gm), or amp_graph.TrainStep"
            )
        make: Callable[..., Pass] = self.cls
        return make(options) if "options" in getattr(make, "__dataclass_fields__", ()) else make()
