"""The loss scale: its options, its state on the device, and how both are saved.

Before: a Python float and a host copy each step. After: tensors that ``amp_graph::update_loss_scale_`` updates.
Source of the method: Micikevicius et al., Mixed Precision Training, 2018, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from amp_graph.errors import ScaleError, warn
from amp_graph.passes.loss_scaling.operators import OPS
from amp_graph.scaling.scale_records import ScaleRecords

STUCK = 20  # consecutive bad steps at the floor before a warning


@dataclass
class LossScale:
    """A dynamic loss scale: it grows after steps with finite gradients and backs off after others.

    init_scale: the first scale. growth_factor (> 1): applied after ``growth_interval`` consecutive good steps.
    backoff_factor (< 1): applied after ``hysteresis`` bad steps since the last growth. Powers of two make scaling
    exact. floor, ceiling: limits of the scale.
    dynamic: False for a static scale, which still skips bad steps and counts them.

    Raises ScaleError for invalid options.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    floor: float = 2.0**-14
    ceiling: float = 2.0**32
    dynamic: bool = True

    def __post_init__(self) -> None:
        """Refuse invalid options; the state is created at the first ``to``."""
        _refuse(vars(self), "", "leave {name} out: its default is {default:g}")
        if self.dynamic and not self.floor <= self.init_scale <= self.ceiling:
            raise ScaleError(
                f"loss scale: init_scale={self.init_scale!r} is not between floor={self.floor!r} and "
                f"ceiling={self.ceiling!r}\n  legal: a scale within its limits\n  fix:   another "
                f"{'floor' if self.init_scale < self.floor else 'ceiling'}, or another init_scale"
            )
        for name in WHOLE:
            setattr(self, name, int(getattr(self, name)))
        # On the host, in fp64, until there is a device.
        counts = [torch.tensor(n, dtype=torch.int32, device="cpu") for n in (0, int(self.hysteresis), 0, 0)]
        self._state = torch.tensor(float(self.init_scale), dtype=torch.float64, device="cpu"), *counts
        self.ready = False  # whether the state is on a device already
        self.records = ScaleRecords()

    # -- state ----------------------------------------------------------------------------------------

    def to(self, device: torch.device) -> LossScale:
        """Place the state on ``device`` at the first call; it stays there."""
        if not self.ready:
            scale, *counts = self._state
            self._state = scale.to(device, torch.float32), *(n.to(device, torch.int32) for n in counts)
            self.ready = True
        return self

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """Scale (fp32), growth tracker, hysteresis left, skipped steps, bad steps at the floor (int32), all 0-d.

        Raises ScaleError before ``to``.
        """
        if not self.ready:
            raise ScaleError("loss scale: it has no device yet\n  fix:   scaler.scale(loss) before anything else")
        return self._state

    @property
    def scale(self) -> torch.Tensor:
        """The scale, a 0-d fp32 tensor that is updated in place."""
        return self.state[0]

    @property
    def skipped(self) -> torch.Tensor:
        """How many steps were skipped, a 0-d int32 tensor: on the device, and written by ``update``, after ``to``."""
        return self._state[3]

    def options(self) -> tuple[float, float, int, int, float, float]:
        """Return the options as ``amp_graph::update_loss_scale_`` takes them."""
        if not self.dynamic:  # a static scale: no growth, no backoff, no limits
            return 2.0, 1.0, MOST, 1, 0.0, LARGEST
        limits = (self.floor, self.ceiling)
        return (self.growth_factor, self.backoff_factor, self.growth_interval, self.hysteresis, *limits)

    def update(self, found_inf: torch.Tensor) -> None:
        """Adjust the scale by a step's ``found_inf`` (0-d fp32, above 0 for a bad step)."""
        self.records.note(self.state)
        scale, *counts = self.state
        OPS.update_loss_scale_(scale, *counts, found_inf, *self.options())

    def note(self) -> None:
        """Record a step that is about to run, whose graph updates the scale."""
        self.records.note(self._state)

    def values(self) -> tuple[float, int, int, int, int]:
        """Return the state as numbers, with one copy to the host from another device."""
        scale, *counts = torch.stack([t.double() for t in self._state]).tolist()
        good, left, skipped, stuck = map(int, counts)
        return scale, good, left, skipped, stuck

    # -- saving ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of ``torch.amp.GradScaler.state_dict``, and those that it does not have."""
        scale, good, left, skipped, stuck = self.values()
        return {
            "scale": scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": good,
            "hysteresis": self.hysteresis,
            "floor": self.floor,
            "ceiling": self.ceiling,
            "_hysteresis_left": left,
            "_skipped": skipped,
            "_stuck": stuck,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class or of ``torch.amp.GradScaler``; ScaleError, and no change, where it is neither."""
        if not isinstance(state, Mapping):
            raise ScaleError(
                f"loss scale: expected a state dict, got a {type(state).__name__}\n"
                "  legal: what state_dict() of an enabled GradScaler returned, ours or torch's\n"
                "  fix:   load the checkpoint's entry of the scaler"
            )
        wanted = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        missing = [key for key in wanted if key not in state]
        if missing:
            has = ", ".join(map(repr, state)) or "nothing"
            raise ScaleError(
                f"loss scale: the state has no {', '.join(map(repr, missing))}; it has {has}\n"
                "  legal: what state_dict() of an enabled GradScaler returned, ours or torch's\n"
                "  fix:   load the checkpoint's entry of the scaler, not of the optimizer or the model"
            )
        names = ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "floor", "ceiling")
        given = {name: state.get(name, getattr(self, name)) for name in names}
        fix = "load an older checkpoint, or none: a new scaler finds its scale within some steps"
        _refuse({**state, **given}, "the state has ", fix)
        given = {name: int(value) if name in WHOLE else float(value) for name, value in given.items()}
        good = int(state["_growth_tracker"])
        left = int(state.get("_hysteresis_left", given["hysteresis"]))
        start = (float(state["scale"]), good, left, int(state.get("_skipped", 0)), int(state.get("_stuck", 0)))
        for name, value in given.items():
            setattr(self, name, value)
        for tensor, value in zip(self._state, start, strict=True):
            tensor.fill_(value)

    def change(self, name: str, value: Any) -> None:
        """Change the option ``name`` to ``value``, for later updates. Raises ScaleError for an illegal one."""
        if name not in RULES or name == "init_scale":
            legal = ", ".join(rule for rule in RULES if rule != "init_scale")
            raise ScaleError(
                f"loss scale: option {name!r} cannot be changed\n  legal: {legal}\n"
                "  fix:   loss_scale.set(value) for the scale itself"
            )
        _refuse({"floor": self.floor, "ceiling": self.ceiling, name: value}, "", "a legal value")
        setattr(self, name, int(value) if name in WHOLE else value)

    def set(self, value: float | torch.Tensor) -> None:
        """Set the scale to ``value``; a tensor (one element) is copied without a host sync, else raises ScaleError."""
        if not isinstance(value, torch.Tensor):
            _refuse({"scale": value}, "new_", "a power of two, for example 2.0**16")
        elif value.numel() != 1 or value.requires_grad:
            raise ScaleError(f"loss scale: new_scale has {value.numel()} elements\n  legal: one, without gradient")
        self._state[0].fill_(value.reshape(()) if isinstance(value, torch.Tensor) else value)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle and copy as options and numbers, independent of the device."""
        scale, *counts = self._state
        known = scale.to("cpu", torch.float64, copy=True), *(n.to("cpu", copy=True) for n in counts)
        return {**self.__dict__, "_state": known, "ready": False}


WHOLE = ("growth_interval", "hysteresis")  # options that are whole numbers
LARGEST = float(torch.finfo(torch.float32).max)
MOST = 2**31 - 1  # the largest int32


def loss_scale_of(who: str, given: Any, *, zero: bool = False) -> LossScale | None:
    """Return the loss scale of an argument: static for a number, dynamic for "dynamic", None for None.

    zero: whether 0 means dynamic as well.
    """
    if given is None or isinstance(given, LossScale):
        return given
    if _is_number(given) and (given > 0 or (zero and given == 0)):
        return LossScale(float(given), dynamic=False) if given else LossScale()
    if isinstance(given, str) and given == "dynamic":
        return LossScale()
    raise ScaleError(
        f"{who}: loss_scale={given!r}\n  legal: 'dynamic', {'0, ' if zero else ''}a number above 0, a LossScale, None\n"
        "  fix:   loss_scale='dynamic'"
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta and abs(value.item()) <= LARGEST
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    size: Any = abs(value)  # not as a float: an integer may be too large for one
    return bool(size <= LARGEST)


def _is_count(value: Any, least: int) -> bool:
    return _is_number(value) and least <= value <= MOST and int(value) == value


# Checks of each value, given the other options, and the legal values.
RULES: dict[str, tuple[Callable[[Any, Mapping[str, Any]], bool], str]] = {
    "init_scale": (lambda v, _: _is_number(v) and v > 0, "above 0, and finite in fp32"),
    "growth_factor": (lambda v, _: _is_number(v) and v > 1, "finite, above 1"),
    "backoff_factor": (lambda v, _: _is_number(v) and 0 < v < 1, "between 0 and 1"),
    "growth_interval": (lambda v, _: _is_count(v, 1), "a whole number, from 1 to 2**31 - 1"),
    "hysteresis": (lambda v, _: _is_count(v, 1), "a whole number, from 1 to 2**31 - 1"),
    "floor": (lambda v, _: _is_number(v) and v > 0, "above 0, and finite in fp32"),
    "dynamic": (lambda v, _: isinstance(v, bool), "True, False"),
    "ceiling": (lambda v, given: _is_number(v) and v >= given["floor"], "finite in fp32, not below floor"),
}
COUNTS = ("_growth_tracker", "_hysteresis_left", "_skipped", "_stuck")
OF_STATE = {
    "scale": RULES["init_scale"],
    **RULES,
    **dict.fromkeys(COUNTS, (lambda v, _: _is_count(v, 0), "a number of steps")),
}


def _refuse(given: Mapping[str, Any], where: str, fix: str) -> None:
    """Raise ScaleError for invalid options, also saved ones."""
    for name, (holds, legal) in OF_STATE.items():
        if name in given and not holds(given[name], given):
            fix = fix.format(name=name, default=getattr(LossScale, name, math.nan))
            raise ScaleError(f"loss scale: {where}{name}={given[name]!r}\n  legal: {legal}\n  fix:   {fix}")


class FloorWatch:
    """Reports gradients that stay infinite at the smallest scale, by a warning or an error, without a GPU sync."""

    def __init__(self, who: str, at_floor: str) -> None:
        """Start with nothing read. Raises ScaleError for an ``at_floor`` other than "warn" and "error"."""
        if at_floor not in ("warn", "error"):
            raise ScaleError(f"{who}: at_floor={at_floor!r}\n  legal: 'warn', 'error'\n  fix:   at_floor='warn'")
        self._who, self._at_floor, self._updates = who, at_floor, 0
        self._copied: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def look(self, scale: LossScale, culprit: Callable[[], str]) -> None:
        """Look at the scale after an update, on devices other than the CPU at every STUCKth; ``culprit``: what is bad.

        Raises ScaleError at the floor if ``at_floor`` is "error".
        """
        stuck = scale.state[4]
        self._updates += 1
        on_cpu = stuck.device.type == "cpu"
        if not on_cpu and self._updates % STUCK:
            return
        steps = self._read(stuck)
        if steps < STUCK or (steps > STUCK and on_cpu):
            return
        text = (
            f"{self._who}: gradients were infinite or NaN in {steps} steps in a row at the smallest scale, "
            f"{scale.floor:g}; these steps were skipped. The first bad one: {culprit()}\n"
            "  fix:   look for the division, logarithm or overflow behind it; a smaller scale will not help"
        )
        if self._at_floor == "error":
            raise ScaleError(text)
        warn(text)

    def _read(self, stuck: torch.Tensor) -> int:
        """Return ``stuck`` (0-d int32) as a number; on CUDA its value at an earlier call, copied asynchronously."""
        if stuck.device.type != "cuda":
            return int(stuck.item())
        found = 0
        if self._copied is not None:
            copy, done = self._copied
            if not done.query():
                return 0
            found = int(copy.item())
        copy, done = torch.empty_like(stuck, device="cpu", pin_memory=True), torch.cuda.Event()
        copy.copy_(stuck, non_blocking=True)
        done.record(torch.cuda.current_stream(stuck.device))
        self._copied = copy, done
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a new one."""
        return FloorWatch, (self._who, self._at_floor)
