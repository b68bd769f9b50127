"""AMP3xx: updates of parameters and of optimizer states that round to nothing in their dtype.

Before: ``1.0 - 1e-4`` in bfloat16, which is 1.0. After: "82 % of the updates of 14 parameters round to nothing".

What an update would be is found by an optimizer of the same class over a copy of one parameter after the other in
float32, with copies of its gradient and state: that holds for all of torch's. Of others, an element counts as
lost whose gradient is not 0 and that the update left as it was.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.audit.codes import finding
from amp_graph.audit.records import Finding, Place, Watcher, dtype_name
from amp_graph.audit.samples import local, sample
from amp_graph.lists.errors import Attempt
from amp_graph.numerics.exact_runs import in_full
from amp_graph.passes.graph.node_info import HALVES

MANY, STILL, FEW = 0.1, 0.9, 0.01  # shares of lost updates: a warning, a parameter that stands still, a note
MOST = 1 << 16  # elements of a parameter that are looked at, where an optimizer treats each by itself
COMPARED = 1 << 12  # elements of a parameter before and after a step
ELEMENTWISE = frozenset(
    ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
)
# Words in the names of options and states of optimizers that round otherwise, or keep what they could not add.
KEEPS = ("stochastic", "kahan", "compensation", "master")
STEPS = 4  # of a histogram of factors, in each octave
OCTAVES = 32


@dataclass
class Lost:
    """How many elements change, and how many of these changes round to nothing, over looked-at steps.

    ``factors``: how many lost changes there are by the logarithm of the factor with which they would not be lost.
    """

    changes: int = 0
    lost: int = 0
    factors: list[int] = field(default_factory=lambda: [0] * (STEPS * OCTAVES))

    @property
    def share(self) -> float:
        """The part of the changes that is lost."""
        return self.lost / self.changes if self.changes else 0.0

    def add(self, counts: Sequence[int], weight: float = 1.0) -> None:
        """Add the counts of one step: changes, lost ones, and these by factors; each is of ``weight`` elements."""
        changes, lost, *factors = (round(weight * count) for count in counts)
        self.changes, self.lost = self.changes + changes, self.lost + lost
        self.factors = [a + b for a, b in zip(self.factors, factors or [0] * len(self.factors), strict=True)]

    def factor(self) -> float:
        """Return by how much larger changes would save half of the lost ones; 0 if that is not known."""
        seen, half = 0, sum(self.factors) / 2
        for number, count in enumerate(self.factors):
            seen += count
            if seen >= half > 0:
                return float(2.0 ** ((number + 1) / STEPS))
        return 0.0


def lost_changes(old: Tensor, new: Tensor) -> Tensor:
    """Return the counts that ``Lost.add`` takes of a change of ``old``, in low precision, to ``new``, in float32."""
    change = new - old.float()
    moves = change != 0
    lost = moves & (new.to(old.dtype) == old)
    size, start = change[lost].abs(), old[lost]
    # The neighbours of what is lost: of larger magnitude where it grows, else of smaller.
    step = torch.where(((change[lost] > 0) == (start > 0)) | (start == 0), 1, -1).to(torch.int16)
    needed = ((start.view(torch.int16) + step).view(start.dtype).float() - start.float()).abs() / 2
    octave = (needed / size).log2().mul_(STEPS).long().clamp_(0, STEPS * OCTAVES - 1)
    return torch.cat((torch.stack((moves.sum(), lost.sum())), torch.bincount(octave, minlength=STEPS * OCTAVES)))


# -- a step of one parameter in float32 -----------------------------------------------------------------------


Changes = dict[str, tuple[Tensor, Tensor]]  # sampled elements of the parameter, "", and its states, before and after


def keeps_more(optimizer: Optimizer, group: Mapping[str, Any], p: Tensor) -> bool:
    """Say whether an optimizer keeps what rounding takes away: masters in its state, or a rounding of another kind."""
    state, options = optimizer.state.get(p, {}), {**vars(optimizer), **group}
    on = [*state, *(name for name, value in options.items() if value is not None and value is not False)]
    masters = (local(t) for t in state.values() if isinstance(t, Tensor))
    return any(word in name for word in KEEPS for name in on) or any(_is_master(t, local(p.detach())) for t in masters)


def stepped_alone(optimizer: Optimizer, group: Mapping[str, Any], p: Tensor) -> Changes:
    """Return what a step would do to ``p``, and to its state, in float32.

    Raises ValueError for an optimizer of others: its step may draw numbers, print, or change more than its parameters.
    """
    step: Any = inspect.unwrap(type(optimizer).step)  # without hooks, which would see a copy
    parts = step, getattr(type(optimizer), "_init_group", step)
    if any(not part.__module__.startswith("torch.optim.") for part in parts):
        raise ValueError(f"the step of {type(optimizer).__name__} is not torch's")
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "step")}
    own |= {name: OrderedDict() for name in own if name.endswith("_hooks")}
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}

    def part(t: Tensor) -> Tensor:
        t = local(t)
        return sample(t, MOST) if type(optimizer).__name__ in ELEMENTWISE and t.shape == local(p).shape else t

    def widened(value: Any) -> Any:
        return in_full(part(value)) if isinstance(value, Tensor) else copy.deepcopy(value)

    before = {name: part(value) for name, value in optimizer.state.get(p, {}).items() if isinstance(value, Tensor)}
    alone = object.__new__(type(optimizer))
    alone.__dict__.update(own)
    copied = widened(p.detach())
    copied.grad = widened(p.grad)
    alone.param_groups = [{**{name: widened(value) for name, value in options.items()}, "params": [copied]}]
    alone.state = defaultdict(dict, {copied: {n: widened(value) for n, value in optimizer.state.get(p, {}).items()}})
    step(alone)
    return {"": (part(p.detach()), copied), **{name: (old, alone.state[copied][name]) for name, old in before.items()}}


def _is_master(state: Tensor, p: Tensor) -> bool:
    is_like = state.dtype == torch.float32 and state.shape == p.shape and p.dim() > 0
    return is_like and torch.equal(state.to(p.dtype), p) and bool(p.any())


# -- what was lost ---------------------------------------------------------------------------------------------


@dataclass
class Stepped:
    """What the steps of optimizers at one place lost: of each parameter, by its ``id``, and of each kind of state.

    ``why``: why there was no copy of it, if so.
    """

    dtype: str
    optimizer: str
    parameters: dict[int, Lost] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    states: dict[str, Lost] = field(default_factory=dict)
    why: str = ""

    def total(self) -> Lost:
        """Return the sum over the parameters."""
        all_of = self.parameters.values()
        factors = [sum(column) for column in zip(*(one.factors for one in all_of), strict=True)]
        return Lost(sum(one.changes for one in all_of), sum(one.lost for one in all_of), factors)


@dataclass(eq=False)
class Updates(Watcher):
    """Counts the updates that round to nothing."""

    _stepped: dict[Place, Stepped] = field(default_factory=dict)
    _running: Stepped | None = None  # what the update that runs is counted in
    _before: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # parameters, and samples of what they were

    # -- optimizers -----------------------------------------------------------------------------------

    def updating(self, optimizer: Optimizer) -> None:
        """Step each low parameter alone, in float32."""
        self._running = None
        low = [(g, p) for g in optimizer.param_groups for p in g["params"] if p.dtype in HALVES]
        if not low:
            return
        place = self.training.places.of(sys._getframe())
        new = Stepped(dtype_name(low[0][1].dtype), type(optimizer).__name__)
        found = self._running = self._stepped.setdefault(place, new)
        counts: list[tuple[Lost, Tensor, float]] = []
        for group, p in low:
            if p.grad is not None and p.grad.layout != torch.strided:
                self.training.unseen["updates by sparse gradients"] = None
            elif p.grad is not None and not keeps_more(optimizer, group, p):
                counts += self._step_of(optimizer, group, p, found)
        if counts:
            numbers = torch.stack([of_one.cpu() for _, of_one, _ in counts]).tolist()
            for (lost, _, weight), of_one in zip(counts, numbers, strict=True):
                lost.add(of_one, weight)

    def _step_of(
        self, optimizer: Optimizer, group: Mapping[str, Any], p: Tensor, found: Stepped
    ) -> list[tuple[Lost, Tensor, float]]:
        """Return what the step of one parameter will lose, and where it counts; or keep what the parameter was."""
        with Attempt() as tried:
            changes = stepped_alone(optimizer, group, p)
            weight = local(p).numel() / max(1, changes[""][0].numel())
            low = {kind: change for kind, change in changes.items() if change[0].dtype in HALVES}
            lost = {
                k: found.states.setdefault(k, Lost()) if k else found.parameters.setdefault(id(p), Lost()) for k in low
            }
            return [(lost[kind], lost_changes(*change), weight) for kind, change in low.items()]
        found.why = str(tried.error)
        self._before.append((p, sample(local(p.detach()), COMPARED).clone()))
        return []

    def updated(self, optimizer: Optimizer) -> None:
        """Compare the parameters that could not be stepped alone with what they were."""
        found = self._running
        if found is None:
            return
        found.names |= self.training.parameter_names()
        for p, old in self._before:
            if p.grad is not None:
                moves = sample(local(p.grad), COMPARED) != 0
                stays = moves & (sample(local(p.detach()), COMPARED) == old)
                lost = found.parameters.setdefault(id(p), Lost())
                lost.add([int(moves.sum()), int(stays.sum())], local(p).numel() / max(1, old.numel()))
        self._before.clear()

    # -- findings -------------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """Yield what was lost, by the line of ``step()``."""
        for place, found in self._stepped.items():
            yield from _of_parameters(place, found)
            yield from _of_states(place, found)


def _of_parameters(place: Place, found: Stepped) -> Iterator[Finding]:
    total = found.total()
    shares = {
        found.names.get(key, f"parameter {n}"): one.share for n, (key, one) in enumerate(found.parameters.items())
    }
    worst = sorted(shares, key=lambda name: -shares[name])
    evidence: dict[str, Any] = {
        "optimizer": found.optimizer, "dtype": found.dtype, "share": total.share, "elements": total.changes,
        "learning_rate_factor": total.factor(), "parameters": {name: shares[name] for name in worst[:20]},
        "estimated_as": found.why,
    }  # fmt: skip
    factor = f"; a learning rate {total.factor():.0f} times as large would keep half of these" if total.factor() else ""
    how = f"; estimated from elements that stay as they are, as {found.why}" if found.why else ""
    fix = (
        f"keep the parameters in float32 and compute under torch.autocast, or give {found.optimizer} float32 copies of "
        "them"
    )
    if total.share >= FEW:
        yield finding(
            "AMP301", place,
            f"{total.share:.0%} of the updates of {len(worst)} parameters in {found.dtype} round to nothing (most of "
            f"{worst[0]}: {shares[worst[0]]:.0%}){factor}{how}",
            fix,
            level="warning" if total.share >= MANY else "note", also=worst[1:], **evidence,
        )  # fmt: skip
    still = [name for name in worst if shares[name] >= STILL]
    if 0 < len(still) < len(worst):
        yield finding(
            "AMP302", place,
            f"{len(still)} of {len(worst)} parameters in {found.dtype} stand still: "
            f"{shares[still[0]]:.0%} of the updates of {still[0]} round to nothing, of all "
            f"{total.share:.0%}{how}",
            fix,
            also=still[1:], **evidence,
        )  # fmt: skip


def _of_states(place: Place, found: Stepped) -> Iterator[Finding]:
    kinds = sorted(found.states, key=lambda kind: -found.states[kind].share)
    if kinds and (share := found.states[kinds[0]].share) >= FEW:
        lost = ", ".join(f"{found.states[kind].share:.0%} of {kind}" for kind in kinds)
        yield finding(
            "AMP304", place,
            f"the state of {found.optimizer} is in {found.dtype}, and changes of it round to nothing: {lost}",
            f"keep the parameters that {found.optimizer} gets in float32: its state has their dtype",
            level="warning" if share >= 0.5 else "note", optimizer=found.optimizer, dtype=found.dtype,
            states={k: found.states[k].share for k in kinds},
        )  # fmt: skip
