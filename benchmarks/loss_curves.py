"""Whether training takes autocast's course: loss curves over seeds, against how far autocast's own seeds lie apart.

Every seed has its own starting weights and batches, which all variants share. Curves are running means over
``WINDOW`` steps. The spread at a step is the sample standard deviation of autocast's curves over the seeds; a curve's
distance is that of its mean over the seeds from autocast's mean, in spreads: at most 1 is within. ``paired`` compares
seed by seed instead, which is stricter, as a seed's batches are the same on both sides.

    python benchmarks/loss_curves.py [--seeds 3] [--steps 300] [--models cnn,gpt,resnet50,gpt768] [--dtype bf16]

How many steps would be within by chance, for trainings that have nothing in common but their kind, stands at the top:
what is below that departs from autocast's course.

``cnn``, ``gpt`` and ``hf`` are the demo's; ``resnet50`` is the benchmark of speed's on digits enlarged to 64 px,
``gpt768`` a GPT of 4 layers x 768 on 128 characters. About an hour on one core, most of it for the last two. Curves
are written with ``--json``.
"""

import argparse
import dataclasses
import json
import math
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import root_on_path  # noqa: F401 examples.demo
import torch
import torch.nn.functional as F
from image_models import resnet50
from torch import Tensor, nn

from examples.demo.data import SYMBOLS, Digits, SourceText
from examples.demo.interleaved_training import race
from examples.demo.models import CharGPT
from examples.demo.tasks import Phase, Task, call, task
from examples.demo.variants import VARIANTS, Variant

WINDOW = 10
HEAD = """\
| model | variant | last loss | distance, median | largest | steps within | paired, largest |
|---|---|---|---|---|---|---|"""
Curves = list[list[float]]  # [seed][step]


@dataclasses.dataclass(frozen=True)
class Course:
    """How far the curves of one variant lie from autocast's, in spreads of autocast's seeds."""

    last: float
    median: float
    largest: float
    within: float
    paired: float


def _resnet50() -> Task:
    data = Digits.load()
    return Task("resnet50", "ResNet-50 on digits", lambda: resnet50(1.0).model, data, _enlarged, 1e-3, ())


def _enlarged(model: nn.Module, images: Tensor) -> Tensor:
    colour = F.interpolate(images, size=(64, 64), mode="bilinear").expand(-1, 3, -1, -1)
    return model(colour.contiguous())


def _gpt768() -> Task:
    data = SourceText.load(128)
    build = lambda: CharGPT(len(SYMBOLS), 128, 768, 4, 12, dropout=0.0)  # noqa: E731
    return Task("gpt768", "GPT 4 x 768 on Python's source text", build, data, call, 3e-4, ())


LARGER = {"resnet50": (_resnet50, 8), "gpt768": (_gpt768, 2)}  # with their batches


def chosen(name: str, steps: int, quick: bool = False) -> tuple[Task, Phase]:
    """Return the model ``name`` with its data, and a race over ``steps`` that no clock ends."""
    if name in LARGER:
        made, batch = LARGER[name][0](), LARGER[name][1]
    else:
        made = task(name, quick=quick)
        batch = made.phases[0].batch
    return made, Phase("", steps, batch, math.inf)


def trained(name: str, variants: Sequence[Variant], seeds: Sequence[int], steps: int, quick: bool) -> dict[str, Curves]:
    """Train every variant of one model once for each seed; return each one's losses."""
    made, phase = chosen(name, steps, quick)
    found: dict[str, Curves] = {variant.name: [] for variant in variants}
    for seed in seeds:
        for result in race(made, phase, lambda: None, seed, variants)[1]:
            found[result.variant].append(list(result.losses))
    return found


def smooth(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return running means over ``window`` steps."""
    return [statistics.fmean(losses[i : i + window]) for i in range(len(losses) - window + 1)]


def course(mine: Curves, autocast: Curves) -> Course:
    """Compare curves of the same seeds. Raises ValueError where a loss is not finite: that is no course at all."""
    if not all(math.isfinite(loss) for curve in (*mine, *autocast) for loss in curve):
        raise ValueError("a loss is infinite or NaN")
    ours, theirs = ([smooth(curve) for curve in curves] for curves in (mine, autocast))
    spreads = [statistics.stdev(at) for at in zip(*theirs, strict=True)]
    means = ([statistics.fmean(at) for at in zip(*curves, strict=True)] for curves in (ours, theirs))
    distances = [abs(a - b) / spread for a, b, spread in zip(*means, spreads, strict=True)]
    paired = max(
        abs(a - b) / spread
        for one, other in zip(ours, theirs, strict=True)
        for a, b, spread in zip(one, other, spreads, strict=True)
    )
    within = sum(d <= 1 for d in distances) / len(distances)
    last = statistics.fmean(curve[-1] for curve in ours)
    return Course(last, statistics.median(distances), max(distances), within, paired)


def chance(seeds: int, draws: int = 200_000) -> float:
    """Return the part of steps at which means over ``seeds`` independent, normal losses lie within their spread."""
    generator = torch.Generator().manual_seed(0)
    mine, theirs = (torch.randn(draws, seeds, generator=generator, dtype=torch.float64) for _ in range(2))
    return ((mine.mean(1) - theirs.mean(1)).abs() <= theirs.std(1)).double().mean().item()


def row(model: str, variant: str, found: Course) -> str:
    """Return one line of the Markdown table."""
    figures = f"{found.last:.4f} | {found.median:.2f} | {found.largest:.2f} | {found.within:.0%} | {found.paired:.2f}"
    return f"| {model} | {variant} | {figures} |"


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Curves]]:
    """Train the chosen models and print a Markdown table; the rows' reference is autocast of the same dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--models", default="cnn,gpt,resnet50,gpt768")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="the demo's tiny models: only to see that it works")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.seeds < 2 or options.steps < WINDOW:
        parser.error(f"a spread needs at least 2 seeds, a running mean {WINDOW} steps")
    torch.set_num_threads(options.threads)
    machine = f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}"
    within = f"within by chance: {chance(options.seeds):.0%} of steps"
    print(f"{machine}; {options.seeds} seeds, {options.steps} steps; {within}\n\n{HEAD}", flush=True)
    variants = VARIANTS[options.dtype]
    autocast = next(v.name for v in variants if v.autocast)
    results = {}
    for name in options.models.split(","):
        found = results[name] = trained(name, variants, range(options.seeds), options.steps, options.quick)
        others = {variant: curves for variant, curves in found.items() if variant != autocast}
        print("\n".join(row(name, v, course(curves, found[autocast])) for v, curves in others.items()), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    return results


if __name__ == "__main__":
    main()
