"""What watchers are told of a training, and what they find: places, operations, events and findings."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.storage import Memory
from amp_graph.run.call_site import NOWHERE as NOWHERE
from amp_graph.run.call_site import Place as Place
from amp_graph.run.call_site import Places as Places

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from amp_graph.audit.precision_table import Row
    from amp_graph.audit.speed.model_sketch import ModelCall, Sketch

LEVELS = ("note", "warning", "error")  # of findings, the least first
LOW = frozenset(("bfloat16", "float16"))  # dtypes by name, as calls have them
FULL = ("float32", "float64")
CONVERSION = "aten._to_copy.default"
_NAMES = {one: str(one).removeprefix("torch.") for one in vars(torch).values() if isinstance(one, torch.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16"."""
    return _NAMES[dtype]


def name_of(operator: str) -> str:
    """Return "addmm" of "aten.addmm.default", and "addmm" of its in-place form."""
    return operator.split(".")[1].rstrip("_") if "." in operator else operator


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operator; ``tree_leaves`` takes several times as long."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [t for value in values if value is not None for t in tensors_in(value)]


class Call(NamedTuple):
    """An operation of a looked-at step; equal ones are counted together.

    ``operator``: ``aten.addmm.default``. ``module``: the path of the innermost module that runs, "" outside of any;
    in backward, that of the forward operation. ``place``: the user's line, in backward that of the forward operation.
    ``phase``: "forward", "backward", "update" (inside of an optimizer's step). ``inputs``: the floating dtypes of
    tensors that are read, in order, and ``output`` of the first that is returned: "bfloat16", "" for none. ``region``:
    the innermost open autocast region, as an index of ``Audit.regions``; -1 for none. ``cast``: of a conversion between
    floating dtypes, who made it: "user" or "autocast"; "" for anything else. ``library``: the function of a library in
    which a conversion stands that ``place`` calls; "" for one of the user's own, and for autocast's.
    """

    operator: str
    module: str
    place: Place
    phase: str
    inputs: tuple[str, ...]
    output: str
    region: int = -1
    cast: str = ""
    library: str = ""


@dataclass
class Totals:
    """The sums over equal calls: how many, their FLOPs, and bytes read and written."""

    calls: int = 0
    flops: int = 0
    bytes: int = 0


@dataclass
class Region:
    """A use of ``torch.autocast`` at one place; entered in every step. ``outer``: the region around it, or -1.

    ``enabled``: whether autocast is on in it. ``asked``: whether it was made to be on: torch disables one for a device
    that is not there. ``made``: where; nowhere for one that torch makes for itself, as in checkpoints.
    """

    place: Place
    device: str
    dtype: str
    enabled: bool
    outer: int
    entered: int = field(default=0, compare=False)
    looked_at: int = field(default=0, compare=False)  # entered in looked-at steps
    made: Place = field(default=NOWHERE, compare=False)
    asked: bool = True


@dataclass
class Training:
    """What is known of the training that all watchers may read.

    ``steps``: how many have ended. ``looked_at``: the numbers of those whose operations were seen, from 1;
    ``evaluated``: how many had ended when a call of a model in evaluation was seen, 0 if none was. ``regions``: all
    uses of ``torch.autocast``; ``open``: indices of those that are open now, the innermost last. ``calls``: the
    operations of the looked-at steps. ``models``: the modules that were given or called outermost, with what their
    paths begin with; ``optimizers``: those that stepped; no strong reference to either. ``weights``: whether an
    optimizer trains a parameter or a buffer of the models, by its memory, in looked-at steps. ``updates``: how many
    steps of optimizers ran. ``saved``: bytes that the last looked-at step kept for backward, by module and dtype.
    ``gradients``: dtype and bytes of those of the last looked-at
    update, by the ``id`` of the parameter. ``group``: a number of the call of torch that dispatched the last operation,
    with its casts. ``records``: whether gradients were on then.
    ``model_calls``: one call of each model; ``sketches``: of those that are trained, by ``id``, or why there is none.
    ``stored``: what modules with parameters keep, ``outside``: bytes by dtype of what optimizers update and no model
    has, masters, as apex and Megatron keep them; both as at the end of the last looked-at step.
    ``unseen``: what was not looked at, and why. ``off``: disabled scalers that were given losses, in words, each with
    the one to make. ``scaled``: where losses are multiplied by a scale. ``places``: finds the user's line of a call.
    """

    steps: int = 0
    looked_at: list[int] = field(default_factory=list)
    evaluated: int = 0
    regions: list[Region] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    calls: dict[Call, Totals] = field(default_factory=dict)
    models: weakref.WeakKeyDictionary[torch.nn.Module, str] = field(default_factory=weakref.WeakKeyDictionary)
    optimizers: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    weights: Memory[bool] = field(default_factory=Memory)
    updates: int = 0
    saved: Counter[tuple[str, str]] = field(default_factory=Counter)
    gradients: dict[int, tuple[str, int]] = field(default_factory=dict)
    group: int = 0
    records: bool = True
    model_calls: weakref.WeakKeyDictionary[torch.nn.Module, ModelCall] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    sketches: dict[int, Sketch | str] = field(default_factory=dict)
    stored: dict[str, Row] = field(default_factory=dict)
    outside: Counter[str] = field(default_factory=Counter)
    unseen: dict[str, None] = field(default_factory=dict)
    off: dict[str, str] = field(default_factory=dict)
    scaled: set[Place] = field(default_factory=set)
    places: Places = field(default_factory=Places)

    @property
    def looks(self) -> int:
        """How many steps were looked at, by which sums over them are divided; at least 1."""
        return max(1, len(self.looked_at))

    def add_model(self, model: torch.nn.Module) -> None:
        """Add a model: paths in the first with parameters are its own, in others they begin with their class."""
        taken, name = set(self.models.values()), type(model).__name__
        first = "" not in taken and next(model.parameters(), None) is not None
        names = (f"{name}_{n}" if n else name for n in itertools.count())
        self.models.setdefault(model, "" if first else next(n for n in names if n not in taken))

    def module_names(self, model: torch.nn.Module) -> dict[int, str]:
        """Return the paths of a model and its modules, by ``id``."""
        return {id(part): self._path(model, name) for name, part in model.named_modules()}

    def parameter_names(self) -> dict[int, str]:
        """Return the names of the parameters of all models, by ``id``."""
        return {id(p): self._path(model, name) for model in list(self.models) for name, p in model.named_parameters()}

    def list_weights(self) -> None:
        """List the memory of all models as it is now."""
        updated = {id(p) for one in list(self.optimizers) for group in one.param_groups for p in group["params"]}
        self.weights = Memory()
        for model in list(self.models):
            for t in (*model.parameters(), *model.buffers()):
                is_trained = t.requires_grad and (not updated or id(t) in updated)
                self.weights.keep(t, is_trained)

    def outwards(self, number: int) -> Iterator[Region]:
        """Yield the region of a number, and those around it, from the innermost to the outermost."""
        while number >= 0:
            yield self.regions[number]
            number = self.regions[number].outer

    def _path(self, model: torch.nn.Module, name: str) -> str:
        return ".".join(filter(None, (self.models[model], name)))


class Event(NamedTuple):
    """A call of one of the functions that ``events`` hears; ``result`` is that of the call, None before it.

    ``name``: "autocast.enter", "scaler.step", see ``events.HEARD``; "disabled scaler.step" of a scaler that is off.
    ``arguments``: by parameter name, "self" included.
    ``is_after``: whether the call has returned; an event comes before and after each call. ``step``: how many steps
    have ended. "model.call" is that of an outermost module, in looked-at steps alone.
    """

    name: str
    arguments: Mapping[str, Any]
    place: Place
    is_after: bool
    step: int
    result: Any = None


@dataclass(frozen=True)
class Finding:
    """A fault: its stable ``code``, see ``codes.toml``, its level, the user's line, what was seen, and the fix.

    ``text``: one or two sentences with the numbers. ``evidence``: the numbers as data. ``also``: other
    modules or operations that have it.
    """

    code: str
    level: str
    place: Place
    text: str
    fix: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    also: Sequence[str] = ()


@dataclass
class Tally:
    """The calls that had one fault at one place: the first, the modules of all, and what of them adds up, by name."""

    call: Call
    counts: Counter[str] = field(default_factory=Counter)
    modules: dict[str, None] = field(default_factory=dict)
    largest: float = 0.0

    def add(self, call: Call, largest: float = 0.0, **counts: int) -> None:
        """Add one more call, ``largest`` the largest of its values."""
        self.modules[call.module] = None
        self.counts.update(counts)
        self.largest = max(self.largest, largest)


@dataclass(eq=False)
class Watcher:
    """Is told of a training, and finds faults in it; this one sees nothing. It must change no tensor, and keep none.

    Methods run under ``no_grad``, outside of autocast and of all modes, and must not draw random numbers; what they
    raise ends this watcher, and is told in the report. ``training`` is kept up to date by others.
    """

    training: Training

    def heard(self, event: Event) -> None:
        """Take an event; in every step."""

    def began(self) -> None:
        """Begin a looked-at step."""

    def ran(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Take an operation of a looked-at step, after it ran: what it wrote to in place is changed already."""

    def before(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take an operation of a looked-at step that writes to its inputs, before it runs."""

    def updating(self, optimizer: Optimizer) -> None:
        """Take an optimizer before a looked-at update."""

    def updated(self, optimizer: Optimizer) -> None:
        """Take an optimizer after a looked-at update."""

    def findings(self) -> Iterator[Finding]:
        """Yield what was found so far."""
        return iter(())
