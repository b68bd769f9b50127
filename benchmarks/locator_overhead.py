"""What watching a training costs: ``Locator``, and the history of the scale.

    python benchmarks/locator_overhead.py [--rounds 40] [--models gpt,cnn] [--threads 1] [--output PATH]

Steps of the same model, in turn in one process, by CPU time; a ratio is the median over rounds, with quartiles. "the
same once more" is a second plain step: its spread is that of the measurement. No step overflows.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from host_models import MODELS as SMALL
from interleaved import interleaved, parser_of, quartiles
from model_case import Case
from models import case
from result_file import machine
from torch import Tensor, nn

import amp_graph
from amp_graph.passes.native.output_file import write_atomically
from amp_graph.scaling.scale_records import ScaleRecords

RESULTS = Path(__file__).parent / "results" / "locator_overhead.json"
SCALE = 2.0**8
BASE, SAME = "plain", "the same once more"
LOOP, WATCHED_LOOP = "loop with GradScaler", "loop with GradScaler and Locator"


class WithLoss(nn.Module):
    """A model of the benchmarks with its loss inside, as a TrainStep takes it."""

    def __init__(self, made: Case) -> None:
        super().__init__()
        self.model, self.loss = made.model, made.loss

    def forward(self, *batch: Tensor) -> Tensor:
        """Return the loss."""
        return self.loss(self.model, *batch)


class NoRecords(ScaleRecords):
    """Keeps nothing."""

    def note(self, state: object) -> None:
        """Do nothing."""


def step_of(name: str, watch: Callable[[amp_graph.TrainStep], object] | None = None) -> Callable[[], object]:
    """Return a call of one step; ``watch`` gets the step first."""
    made = SMALL[name]() if name in SMALL else case(name, 0.25)
    model = WithLoss(made)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    scale = amp_graph.LossScale(SCALE, growth_interval=2**30)
    step = amp_graph.TrainStep(model, None, optimizer, "fp16", loss_scale=scale)
    kept = watch(step) if watch is not None else None
    return lambda: (step(*made.batch), kept)


def loop_of(name: str, watched: bool) -> Callable[[], object]:
    """Return a call of one step of a loop with a GradScaler."""
    made = SMALL[name]() if name in SMALL else case(name, 0.25)
    model = amp_graph.convert(made.model, "fp16")
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, fused=True)
    scaler = amp_graph.GradScaler("cpu", SCALE, growth_interval=2**30)
    locator = amp_graph.Locator(model, scaler) if watched else None

    def step() -> object:
        optimizer.zero_grad()
        scaler.scale(made.loss(model, *made.batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        return locator

    return step


def without_history(step: amp_graph.TrainStep) -> None:
    """Keep no history."""
    step.loss_scale.records = NoRecords()


def measured(name: str, rounds: int) -> dict[str, object]:
    """Time the variants of one model."""
    variants = {
        BASE: step_of(name),
        SAME: step_of(name),
        "without history": step_of(name, without_history),
        "Locator": step_of(name, amp_graph.Locator),
        LOOP: loop_of(name, watched=False),
        WATCHED_LOOP: loop_of(name, watched=True),
    }
    seconds = interleaved(variants, rounds, time.process_time, least=0.02)
    ratios = {
        other: dict(zip(("p25", "ratio", "p75"), quartiles(times, seconds[LOOP if other == WATCHED_LOOP else BASE]),
                        strict=True))
        for other, times in seconds.items()
    }  # fmt: skip
    return {
        "ms": statistics.median(seconds[BASE]) * 1e3,
        "loop_ms": statistics.median(seconds[LOOP]) * 1e3,
        "ratios": ratios,
    }


def main() -> None:
    """Measure, print a table, and write the results."""
    parser = parser_of(__doc__, rounds=40)
    parser.add_argument("--models", default="linears_4,cnn_8,bert_16,gpt,vit")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = {"format": 1, "machine": machine("cpu"), "options": {"threads": options.threads, "policy": "fp16"}}
    held = json.loads(options.output.read_text()) if options.output.exists() else {}
    found = held["results"] if {key: held.get(key) for key in about} == about else {}  # else measured elsewhere
    for name in options.models.split(","):
        found[name] = one = {"rounds": options.rounds, **measured(name, options.rounds)}
        print(f"{name}: a step takes {one['ms']:.2f} ms, one of the loop {one['loop_ms']:.2f} ms")
        for variant, ratio in one["ratios"].items():
            print(f"  {variant:<34} {ratio['ratio']:.4f} [{ratio['p25']:.4f} - {ratio['p75']:.4f}]", flush=True)
        write_atomically(options.output, json.dumps({**about, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
