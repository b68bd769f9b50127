"""Measure the variants of one model: time in turn, and once each what a step costs beside time.

Before: a model's name and its variants. After: its entry in the file of results, a row for each variant:
``{"ms": ..., "against_autocast": {"ratio", "p25", "p75"}, "against_same_mode": ..., "casts": ..., "saved": ...}``.
"""

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from devices import Device
from interleaved import interleaved, quartiles
from limits import Rates, limit_of
from result_file import Results
from step_costs import casts_of, held_by, saved_by
from variants import Prepared, Setup, Variant, inference_call, training_step

import amp_graph
from amp_graph.errors import AmpGraphError

LEAST = 0.05  # seconds: of quicker calls, several are timed as one


@dataclass(frozen=True)
class Job:
    """What to measure: a model at a scale, in training or inference."""

    name: str
    scale: float
    training: bool
    setup: Setup
    rounds: int
    patience: float = 900.0  # seconds that a first call may take
    anew: bool = True  # whether compilers begin with nothing, so that the first call's seconds say something


class Apart(Protocol):
    """What runs each variant in a process of its own (``apart.py``)."""

    def clock(self) -> float:
        """Return the seconds that all calls have taken."""
        ...

    def once(self, job: Job, variant: Variant) -> tuple[Callable[[], object], Results]:
        """Return what makes one call of a variant, and what is measured once."""
        ...


class OutOfPatience(BaseException):
    """A first call takes too long; no Exception, which Dynamo would take for a failed capture and run on."""


def measured(job: Job, every: Sequence[Variant], device: Device, rates: Rates, apart: Apart | None = None) -> Results:
    """Measure the variants of one model, in this process or ``apart``; one that raises gets a row that says so."""
    rows: dict[str, Results] = {}
    runs: dict[str, Callable[[], object]] = {}
    for variant in every:
        try:
            found = once(job, variant, device) if apart is None else apart.once(job, variant)
            runs[variant.name], rows[variant.name] = found
        except (RuntimeError, AmpGraphError, OutOfPatience) as error:  # a kernel that torch lacks, say
            rows[variant.name] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    clock, least = (device.clock, LEAST) if apart is None else (apart.clock, 0.0)
    seconds = interleaved(runs, job.rounds, clock, least) if runs else {}
    baselines = {mode: better(mode, every, seconds) for mode in (False, True)}
    saved = rows[baselines[False]]["saved"] if baselines[False] is not None else None
    limit = limit_of(job.name, job.scale, job.training, rates, saved and saved["activations"])
    for variant in every:
        if variant.name in seconds:
            against = seconds.get(baselines[False]), seconds.get(baselines[variant.compiled])
            rows[variant.name] |= timed(seconds[variant.name], limit.ms, *against)
            if variant.policy and not variant.compiled and baselines[True] is not None:
                rows[variant.name]["against_compiled"] = ratio(seconds[variant.name], seconds[baselines[True]])
    return {
        "baseline": baselines[False],
        "compiled_baseline": baselines[True],
        "limit": limit.to_dict(),
        "rates": asdict(rates),
        "variants": rows,
    }


def warm_up(device: str, compiled: bool) -> None:
    """Let what a process does once (imports, a compiler's own start) not be part of the first model's first call."""
    model, x = torch.nn.Linear(4, 4).to(device), torch.zeros(4, 4, device=device)
    amp_graph.convert(model, "bf16", compile="inductor" if compiled else "eager")(x).sum().backward()
    torch._dynamo.reset()


def better(compiled: bool, every: Sequence[Variant], seconds: dict[str, list[float]]) -> str | None:
    """Return the fastest baseline of a mode; None where none ran."""
    names = [v.name for v in every if v.is_baseline and v.compiled is compiled and v.name in seconds]
    return min(names, key=lambda n: statistics.median(seconds[n]), default=None)


def timed(
    times: list[float], limit: float, autocast: list[float] | None, same_mode: list[float] | None
) -> dict[str, object]:
    """Return milliseconds, how many times the limit they are, and how much faster than the baselines that is."""
    ms = statistics.median(times) * 1e3
    against = {"against_autocast": ratio(times, autocast), "against_same_mode": ratio(times, same_mode)}
    return {"ms": ms, "over_limit": ms / limit, **against}


def ratio(times: list[float], baseline: list[float] | None) -> dict[str, float] | None:
    """Return the quartiles of the baseline's time over ``times``, round by round."""
    if baseline is None:
        return None
    low, middle, high = quartiles(baseline, times)
    return {"ratio": middle, "p25": low, "p75": high}


def once(job: Job, variant: Variant, device: Device) -> tuple[Callable[[], object], Results]:
    """Prepare a variant, and measure what is measured once."""
    make = training_step if job.training else inference_call
    made = make(job.name, job.scale, variant, job.setup)
    return made.run, _first_call(made, device, job.patience, job.anew) | _costs(
        made, variant, device, job.setup.cuda_graphs
    )


def _first_call(made: Prepared, device: Device, patience: float, anew: bool = True) -> Results:
    """Run the first step, which captures and compiles, by the wall's clock; of that, what amp_graph's passes took.

    No seconds of what was not compiled ``anew``.
    """
    start = time.perf_counter()
    with _at_most(patience):
        made.run()
    if device.name == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {"first_call_s": seconds if anew else None, "passes_s": made.seconds_of_passes()}


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfPatience in what is inside once it has taken so long; only where the system has such alarms."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise OutOfPatience(f"the first call took more than {seconds:g} s")

    usual = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)


def _costs(made: Prepared, variant: Variant, device: Device, cuda_graphs: bool) -> Results:
    """Measure what a step costs beside time; None for what cannot be seen."""
    for _ in range(3):  # the first captures, and casts, packs and folds the weights of a frozen model
        made.run()
    saved = saved_by(made, variant.compiled) if made.optimizer is not None else None
    in_graph = variant.recorded or (variant.compiled and cuda_graphs)  # whose memory is set aside at capture
    kernels = device.kernels(made.run)
    return {
        "kernels": None if kernels is None else {"count": kernels[0], "ms": kernels[1]},
        "casts": None if variant.compiled or variant.recorded else asdict(casts_of(made.run)),
        "saved": asdict(saved) if saved is not None else None,
        "peak_bytes": None if in_graph else device.peak(made.run),
        "held_bytes": held_by(made),
    }
