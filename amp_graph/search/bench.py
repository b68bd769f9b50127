"""Measures one policy: the time of a step beside fp32's, its error, the user's metric, and the peak of memory.

Each policy runs on a copy of the model, forward and, if the step's result has gradients, backward. Times are taken in
turns with fp32's, so that what else the machine does slows both.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.capture.conversion import conversion_of
from amp_graph.convert import convert
from amp_graph.devices import device_of_model
from amp_graph.errors import AmpGraphError
from amp_graph.freeze import freeze
from amp_graph.lists.errors import Attempt, shortened
from amp_graph.model_state import RandomState, same_random_numbers, seeded, unchanged
from amp_graph.numerics.compare import projected
from amp_graph.numerics.differences import Values, as_containers, error_of, scale_of, values_of
from amp_graph.policy import Policy
from amp_graph.search.space import Step, loss_of
from amp_graph.search.trials import AUTOCAST, EVEN, FAILS, FULL, NOT_FINITE, Trial

WARM_UP, LEAST, TURNS, MOST = 2, 3, 7, 21
AGAIN = 3  # times as many turns, and as long, where a policy is measured again
LOSES = 1.1  # a factor of time: what loses each of the first turns by it is not measured on
CLEAR = 4.0  # standard errors by which times differ that are not measured more often
TURN = 0.02  # seconds: shorter steps are repeated within a turn, so often that they take as long
LONG = 4.0  # seconds after which no more turns are taken than the least: those of slow steps differ less


class Bench:
    """Measures policies for one model and one step; ``metric`` is called with a converted copy of the model.

    ``given``: the arguments of the first call of the model in a step.
    """

    def __init__(self, model: torch.nn.Module, step: Step, metric: Callable[[torch.nn.Module], float] | None) -> None:
        self.model, self.step, self.metric = model, step, metric
        self.plain = copy.deepcopy(model)
        self.device = device_of_model(model) or "cpu"
        with seeded():
            self.random = RandomState()  # in which each step begins that is compared, as dropout and the step may draw
        self.trains = True
        self._converted = {FULL: self.plain}
        self.reference = self.values(self.plain, step)
        self.trains = any(name.startswith("gradient of ") for name in self.reference)

    def key(self) -> dict[str, Any]:
        """Return what tells this model and this step from others: text, with sums of what the step makes."""
        state = "".join(f"{name} {list(t.shape)} {t.dtype}\n" for name, t in self.plain.state_dict().items())
        inputs = [f"{t.dtype} {list(t.shape)}" for t in tree_leaves(self.given) if isinstance(t, Tensor)]
        sums: defaultdict[str, float] = defaultdict(float)
        for name, t in self.reference.items():
            weights = torch.linspace(1, -1, t.numel(), dtype=t.dtype, device=t.device)  # norms of batches are close
            sums["gradients" if name.startswith("gradient") else name] += float(
                t.nan_to_num(0.0, 0.0, 0.0).flatten() @ weights
            )
        return {"parameters and buffers": f"{zlib.crc32(state.encode()):x}", "inputs": inputs} | {
            name: f"{one:.4g}"  # coarser than what another order of additions makes of it
            for name, one in sums.items()
        }

    @cached_property
    def metric_of_full(self) -> float:
        """The metric of fp32; NaN without one."""
        return self._metric(self.plain)

    @cached_property
    def noise(self) -> float:
        """The share of a step's time that two measurements of the same step differ by; at least 1 %."""
        ratios = self.ratios(copy.deepcopy(self.model), self.plain)
        return max(EVEN, abs(statistics.median(ratios) - 1), spread_of(ratios))

    def trial(self, policy: str, why: str, beside: Trial | None = None, *, again: bool = False) -> Trial:
        """Return what is measured of ``policy``, in turns with ``beside``, else with fp32.

        Of one that fails, an infinite error and the reason. ``again``: in more turns.
        """
        beside = beside or Trial(FULL, 1.0, 0.0)
        if policy == FULL:
            return Trial(FULL, 1.0, 0.0, self.metric_of_full, self._peak(self.plain), why)
        with Attempt() as tried:  # whatever a plan, a kernel or the user's step raises
            made = self.converted(policy, beside.policy)
            error = self.error(made, self.step, self.reference)
            if math.isfinite(error):
                ratios = self.ratios(made, self.converted(beside.policy, policy), AGAIN if again else 1)
                time, spread = statistics.median(ratios) * beside.time, spread_of(ratios)
                return Trial(policy, time, error, self._metric(made), self._peak(made), why, spread, beside.policy)
        why += FAILS + (NOT_FINITE if tried.error is None else tried.reason)
        return Trial(policy, math.inf, math.inf, math.inf, why=why)

    def converted(self, policy: str, *others: str) -> torch.nn.Module:
        """Return a copy of the model, converted; frozen if the step is no training. Only ``others`` are kept beside.

        Of torch.autocast, a copy as it was written, which is called under it.
        """
        self._converted = {one: made for one, made in self._converted.items() if one in (FULL, policy, *others)}
        if policy not in self._converted:
            made = copy.deepcopy(self.model)
            if policy != AUTOCAST:
                made = convert(made, policy) if self.trains else freeze(convert(made, policy))
            self._converted[policy] = made
        return self._converted[policy]

    def sample(self, model: torch.nn.Module) -> Any:
        """Return a number with gradients: the loss of a step, or a mixture of the outputs of a model without one."""
        args, kwargs = self.given
        return loss_of(self.step(model)) if self.trains else projected(as_containers(model(*args, **kwargs)))

    def _under(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Return torch.autocast in the low dtype for the copy that stands for it."""
        is_on = model is self._converted.get(AUTOCAST)
        return torch.autocast(self.device, Policy().torch_dtype(self.device)) if is_on else nullcontext()

    def error(self, model: torch.nn.Module, step: Step, reference: Values) -> float:
        """Return the relative L2 error of a step's outputs or, if larger, of its gradients."""
        conversion = conversion_of(model)
        is_fp16 = conversion is not None and conversion.policy.torch_dtype(self.device) == torch.float16
        return error_of(self.values(model, step, scale_of(reference) if is_fp16 else 1.0), reference)

    def values(self, model: torch.nn.Module, step: Step, scale: float = 1.0) -> Values:
        """Return the outputs of ``model`` in one step, its loss, and the gradients of parameters, in fp64.

        The model, its buffers and the state of random number generators are as before.
        """
        calls: list[tuple[Any, Any, Any]] = []
        hook = model.register_forward_hook(lambda module, *call: calls.append(call), with_kwargs=True)
        try:
            with unchanged(model), torch.set_grad_enabled(self.trains):
                self.random.restore()
                with self._under(model):
                    out = step(model)
                if not isinstance(out, Tensor) or not calls:
                    what = f"returned a {type(out).__name__}" if calls else "does not call the model that it is given"
                    raise AmpGraphError(
                        f"search: step {what}\n  legal: a function that calls its model, and returns a tensor: a "
                        "loss, or the output\n  fix:   step=lambda model: loss_fn(model(x), y)"
                    )
                self.given = calls[0][:2]
                return values_of(model, [*(as_containers(call[2]) for call in calls), out], loss_of(out), scale)
        finally:
            hook.remove()

    def _metric(self, model: torch.nn.Module) -> float:
        if self.metric is None:
            return math.nan
        with same_random_numbers(), torch.set_grad_enabled(self.trains), self._under(model):
            found = self.metric(model)
        number = math.nan
        with Attempt():  # float() may call what others wrote
            number = float(found.detach() if isinstance(found, Tensor) else found)
        if math.isnan(number) and model is self.plain:
            raise AmpGraphError(
                f"search: the metric of the model in fp32 is {shortened(found)}\n"
                "  legal: a number, of which less is better\n"
                "  fix:   metric=lambda model: 1.0 - accuracy(model, batches)"
            )
        return math.inf if math.isnan(number) else number

    def _peak(self, model: torch.nn.Module) -> int:
        """Return the most bytes that a step of ``model`` takes on CUDA, with its parameters and buffers; else 0."""
        if self.device != "cuda":
            return 0
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        self._once(model)
        return torch.cuda.max_memory_allocated() - others

    def ratios(self, model: torch.nn.Module, beside: torch.nn.Module, more: int = 1) -> list[float]:
        """Return the times of a step of ``model`` over those of ``beside``, in turns: the more, the closer they are.

        ``more``: how many times as many turns are taken of what is close.
        """
        for _ in range(WARM_UP):
            taken = [seconds_of(partial(self._once, one), 1, self.device) for one in (beside, model)]
        calls = max(1, int(TURN / max(min(taken), 1e-9)))
        found: list[float] = []
        ends = time.monotonic() + LONG * more
        while len(found) < MOST * more:
            first, second = (model, beside) if len(found) % 2 else (beside, model)
            taken = [seconds_of(partial(self._once, one), calls, self.device) for one in (first, second)]
            found.append(taken[0] / taken[1] if first is model else taken[1] / taken[0])
            if len(found) >= LEAST and (min(found) > LOSES or time.monotonic() > ends):
                break
            if len(found) >= TURNS and spread_of(found) < max(EVEN / 2, abs(statistics.median(found) - 1) / CLEAR):
                break
        return found

    def _once(self, model: torch.nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(self.trains):
            with self._under(model):
                out = self.step(model)
            if self.trains:
                loss_of(out).backward()


def spread_of(ratios: list[float]) -> float:
    """Return the standard error of the median of ``ratios``, as a share of it, by the distance of their quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return 0.93 * (high / middle - low / middle) / math.sqrt(len(ratios))


def seconds_of(step: Callable[[], None], calls: int, device: str) -> float:
    """Return the seconds of one of ``calls`` calls; on CUDA, until the device is done.

    Where one thread of a CPU computes, those that it computed: other processes do not lengthen them.
    """
    start = _now(device)
    for _ in range(calls):
        step()
    return (_now(device) - start) / calls


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


def refuse_unusable_steps(bench: Bench) -> None:
    """Raise AmpGraphError for a step that is NaN or infinite in fp32, or another when it runs again from one state."""
    values = bench.reference
    loss = next((name for name in reversed(values) if name.startswith("output") and values[name].numel() == 1), "")
    checked = (name for name in values if name == loss or name.startswith("gradient"))
    if bad := next((name for name in checked if not bool(values[name].isfinite().all())), ""):
        raise AmpGraphError(
            f"search: the {'loss' if bad == loss else bad} of step is not finite in fp32, before any precision is "
            "lowered\n  legal: a batch and weights whose loss is finite\n"
            "  fix:   check the batch and the loss function first"
        )
    again = bench.values(bench.plain, bench.step)
    same = {name: torch.equal(t.nan_to_num(), again.get(name, -t - 1).nan_to_num()) for name, t in values.items()}
    if not all(same.values()) or not same:
        different = next((name for name, is_same in same.items() if not is_same), "output")
        raise AmpGraphError(
            f"search: two runs of step on the same model differ, first in the {different}\n"
            "  legal: a step that uses the same batch each time\n"
            "  fix:   x, y = next(iter(loader)), and step=lambda model: loss_fn(model(x), y)"
        )
