"""Gathers in low precision what the graphs of a sharded model read in low precision alone.

Before: ``fully_shard`` gathers fp32, and the converted model casts after it. After: weights that only low operations
read are cast on the shard and gathered in bf16, in the same collective as the fp32 norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from torch.nn import Module

from amp_graph.model_state import CONVERSION
from amp_graph.passes.calibration.node_keys import few
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import CAST
from amp_graph.passes.torch_compat.fully_sharded import (
    add_question,
    agreed,
    answer,
    ask,
    drop_question,
    gather_in,
    gathered_parameter,
    groups_of,
    has_run,
    is_asked,
    is_at_rest,
    is_plain,
    is_resharded,
    records_of,
    root_of,
    shard_group,
)
from amp_graph.passes.torch_compat.modules import behind_checkpoint
from amp_graph.policy_words import word_of
from amp_graph.rewrite import Rewritten

if TYPE_CHECKING:
    from amp_graph.capture.conversion import Conversion

GATHERS = "_amp_graph_gathers"  # the attribute of an outermost unit that has its ``LowGathers``
NO_GRAPH = "no graph reads it"
NOT_AGREED = "the ranks do not agree on it, or not yet"
AS_WRITTEN = "code that runs without a graph may read it in fp32"
STAYS = "stays gathered after its forward (reshard_after_forward=False), where other code may read it in fp32"
PARTLY = "code outside of converted parts may read it in fp32"
OTHERS = "its tensors have gathers of their own, or are not sharded"


class LowGathers:
    """The units of one outermost unit of ``fully_shard``, and what all their ranks agree to gather low.

    FSDP gathers before a forward is called, so the first call has all in fp32. The ranks agree before the second, and
    again before each call of the outermost unit behind a gather in which a rank has asked for it: each gather brings a
    number of each rank. What they agree on waits while a graph of autograd reads what was gathered.
    """

    def __init__(self, root: Module) -> None:
        """Agree before each call of ``root``, the outermost unit."""
        self.units: list[Unit] = []
        self.in_graphs = False  # whether a forward since the last backward recorded gradients
        root.register_forward_pre_hook(self._before_gathers, prepend=True)  # before FSDP's

    def _before_gathers(self, *_: Any) -> None:
        if not any(has_run(unit.group) for unit in self.units):
            self.in_graphs = False
        together: dict[Any, list[Unit]] = {}
        for unit in self.units:
            together.setdefault(shard_group(unit.group), []).append(unit)
        for units in together.values():
            if any(unit.is_asked() for unit in units):
                self.agree(units)
        self.in_graphs |= torch.is_grad_enabled()

    def agree(self, units: Sequence[Unit]) -> None:
        """Gather low what all ranks read low, in units of the same ranks: a collective."""
        places = [(unit, name) for unit in units for name in unit.records]
        is_free = all(is_at_rest(unit.group, in_graphs=self.in_graphs) for unit in units)
        *flags, is_free = agreed(units[0].group, [*(name in unit.wanted for unit, name in places), is_free])
        for unit in units if is_free else ():
            unit.gather({name for (of, name), flag in zip(places, flags, strict=True) if of is unit and flag})
            if unit.is_stopped:
                self.units.remove(unit)


class Unit:
    """What one collective of ``fully_shard`` gathers, and how the graphs of the converted ``parts`` read it."""

    def __init__(self, group: Any, dtype: torch.dtype) -> None:
        """Gather all in fp32; ``dtype``: the low one of the parts."""
        self.group, self.dtype = group, dtype
        self.records = {name: one for name, one in records_of(group).items() if one.orig_dtype == torch.float32}
        self.parts: list[Conversion] = []
        self.low: set[str] = set()  # what a graph reads so alone
        self.full: dict[str, str] = {}  # what is read in fp32, and why
        self.gathered: set[str] = set()  # in low precision, now
        self.is_stopped = False
        self._question: Any = None
        self._agreed: set[str] = set()  # what this rank wanted when the ranks last agreed

    @property
    def wanted(self) -> set[str]:
        """What this rank would gather low."""
        return set() if self.is_stopped else self.low - set(self.full)

    def stop(self) -> None:
        """Gather all in fp32 again; on all ranks at once, as a collective."""
        gathers: LowGathers = root_of(self.group.modules[0]).__dict__[GATHERS]
        if self in gathers.units:
            self.is_stopped = True
            gathers.agree([self])

    def is_asked(self) -> bool:
        """Say whether the ranks are to agree: they have not yet, or one of them reads other parameters low by now."""
        return self._question is None or self.is_stopped or is_asked(self._question)

    def gather(self, names: set[str]) -> None:
        """Gather these parameters in low precision from now on, and the others in fp32; on all ranks."""
        self._agreed = self.wanted
        if self._question is None:
            self._question = add_question(self.group)
        answer(self._question)
        if self.is_stopped:
            drop_question(self.group, self._question)
        for name in names ^ self.gathered:
            gather_in(self.records[name], self.dtype if name in names else None)
        if names != self.gathered:
            self.gathered = names
            for part in self.parts:
                part.captured.graphs.clear()  # for other dtypes; they do not run again

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Take off gradients that wait for their reduction: Dynamo knows none of another dtype (torch 2.13)."""
        low = [gathered_parameter(self.records[name]) for name in self.gathered]
        waiting = [(one, one.grad) for one in low if one is not None and one.grad is not None]
        for one, _ in waiting:
            one.grad = None
        try:
            yield
        finally:
            for one, grad in waiting:
                one.grad = grad

    def why(self, name: str) -> str:
        """Return why a parameter is gathered in its dtype."""
        if name in self.gathered:
            return f"{word_of(self.dtype)}, as all graphs of all ranks read it so"
        if name not in self.records:
            return "its own dtype"
        return self.full.get(name) or (NOT_AGREED if name in self.low else NO_GRAPH)

    def learn(self, rewritten: Rewritten, inputs: Sequence[Any]) -> None:
        """Note how a graph reads the parameters among its ``inputs``."""
        names = {id(gathered_parameter(record)): name for name, record in self.records.items()}
        pairs = zip(rewritten.gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
        read = {names[id(given)]: _reads_low(node, self.dtype) for node, given in pairs if id(given) in names}
        self.low.update(name for name, is_low in read.items() if is_low)
        late = [name for name, is_low in read.items() if not is_low]
        self.full = dict.fromkeys(late, "a graph reads it in fp32") | self.full
        self._tell(late)

    def read_as_written(self) -> None:
        """Note that code ran which no graph shows: it may read any parameter in fp32."""
        late = [name for name in self.records if name not in self.full]
        self.full.update(dict.fromkeys(late, AS_WRITTEN))
        self._tell(late)

    def _tell(self, full: Iterable[str]) -> None:
        """Ask the other ranks to agree anew if need be, and warn of what is rounded until then."""
        if self._question is not None:
            ask(self._question, self.wanted != self._agreed)
        if late := [name for name in full if name in self.gathered]:
            self.parts[0].diagnostics.warn(
                f"{few(late)} is read in fp32 from this call on, and was gathered in {word_of(self.dtype)}, as all "
                "graphs before read it so: this call reads values that are off by up to "
                f"{torch.finfo(self.dtype).eps / 2:.2%}, and so does the next one if no backward follows; later ones "
                "read fp32",
            )


def follow(part: Conversion, holder: Module) -> Unit | None:
    """Return the unit whose parameters ``part`` alone reads, and have it gathered as the graphs of ``part`` read it.

    ``holder``: the module of ``part``, or what wraps it, to which ``fully_shard`` may have been applied. None if there
    is no such unit; called in the first call of ``part``, which all ranks make at once.
    """
    groups = groups_of(holder)
    if len(groups) != 1 or why_full(groups[0]):
        return None
    root = root_of(holder)
    if GATHERS not in root.__dict__:
        root.__dict__[GATHERS] = LowGathers(root)
    gathers: LowGathers = root.__dict__[GATHERS]
    unit = unit_of(groups[0])
    if unit is None:
        unit = Unit(groups[0], part.policy.torch_dtype(groups[0].device.type))
        gathers.units.append(unit)
    unit.parts.append(part)
    gathers.in_graphs |= torch.is_grad_enabled()  # in this call, the first
    return unit


def unit_of(group: Any) -> Unit | None:
    """Return the unit that follows how the parameters of ``group`` are read; None if there is none."""
    gathers: LowGathers | None = root_of(group.modules[0]).__dict__.get(GATHERS)
    return None if gathers is None else next((unit for unit in gathers.units if unit.group is group), None)


def why_full(group: Any) -> str:
    """Return why all of a group is gathered in its own dtype, whatever graphs read; "" if it need not be."""
    if (dtype := group.mp_policy.param_dtype) is not None:
        return f"its MixedPrecisionPolicy asks for param_dtype={dtype}"
    if not is_plain(group):
        return OTHERS
    if not is_resharded(group):
        return STAYS
    return "" if all(map(_is_converted, group.modules)) else PARTLY


def _is_converted(module: Module) -> bool:
    found: Conversion | None = behind_checkpoint(module).__dict__.get(CONVERSION)
    return found is not None and not found.parts and found.policy.level == "O1" and found.compile == "eager"


def _reads_low(node: Node, dtype: torch.dtype) -> bool:
    """Say whether all that reads a parameter reads it in ``dtype``."""
    if value(node).dtype == dtype:  # gathered so; who wants fp32 upcasts it
        return not any(user.op == "call_method" and user.target == "float" for user in node.users)
    return bool(node.users) and all(CAST in user.meta and value(user).dtype == dtype for user in node.users)
