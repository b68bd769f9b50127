"""Whether low precision trains to fp32's accuracy: the demo's models over several seeds, mean and spread.

Every seed has its own starting weights, batches and dropout; fp32, ``torch.autocast`` and amp_graph share them. In
fp16 both scale the loss dynamically, each with its own ``GradScaler``; a short ``--growth-interval`` lets the scale
grow until gradients overflow, and steps are skipped, many times in a training. The spread is the sample standard
deviation over the seeds. A mean is "within" where it is no farther from fp32's mean than fp32's spread.

    python benchmarks/accuracy_over_seeds.py [--seeds 3] [--models cnn,gpt,hf] [--dtype fp16] [--steps 150]

Written as JSON, seed by seed, with ``--json``. About 15 minutes on one core: fp16 on a CPU is several times slower
than fp32, which is why the demo itself shows it only briefly.
"""

import argparse
import dataclasses
import json
import math
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from amp_graph.demo.interleaved_training import race
from amp_graph.demo.tasks import NAMES, task
from amp_graph.demo.variants import VARIANTS, Variant

HEAD = """\
| model | variant | held-out accuracy | within | held-out loss | within | steps skipped |
|---|---|---|---|---|---|---|"""


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one variant reached, an entry for each seed."""

    variant: str
    accuracy: list[float]
    loss: list[float]
    skipped: list[int]


def trained(
    name: str, variants: Sequence[Variant], seeds: Sequence[int], steps: int | None, quick: bool = False
) -> list[Figures]:
    """Train every variant of one model once for each seed, with the batches of the demo's longer race."""
    chosen = task(name, quick=quick)
    longer = chosen.phases[0]
    phase = dataclasses.replace(longer, steps=steps or longer.steps, seconds=math.inf)
    found: dict[str, Figures] = {}
    for seed in seeds:
        trainees, results = race(chosen, phase, lambda: None, seed, variants)
        for one, result in zip(trainees, results, strict=True):
            into = found.setdefault(result.variant, Figures(result.variant, [], [], []))
            into.accuracy.append(result.held_out_accuracy)
            into.loss.append(result.held_out_loss)
            into.skipped.append(one.steps_skipped)
    return list(found.values())


def verdict(mine: Sequence[float], reference: Sequence[float]) -> str:
    """Say whether the mean is no farther from the reference's than the reference's seeds spread, or how far it is."""
    distance = statistics.fmean(mine) - statistics.fmean(reference)
    return "yes" if abs(distance) <= statistics.stdev(reference) else f"no: {distance:+.4f}"


def rows(name: str, found: Sequence[Figures]) -> list[str]:
    """Return the Markdown rows of one model; the first variant is the reference."""
    reference = found[0]
    made = []
    for one in found:
        judged = [verdict(one.accuracy, reference.accuracy), verdict(one.loss, reference.loss)]
        accuracy, loss = _told(one.accuracy, "{:.2%}"), _told(one.loss, "{:.4f}")
        first, second = judged if one is not reference else ("", "")
        skipped = ", ".join(map(str, one.skipped))
        made.append(f"| {name} | {one.variant} | {accuracy} | {first} | {loss} | {second} | {skipped} |")
    return made


def _told(values: Sequence[float], form: str) -> str:
    return f"{form.format(statistics.fmean(values))} ± {form.format(statistics.stdev(values))}"


def main(argv: Sequence[str] | None = None) -> dict[str, list[Figures]]:
    """Run the chosen models and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument(
        "--growth-interval", type=int, default=2000, help="good steps before the loss scale grows (default: 2000)"
    )
    parser.add_argument("--steps", type=int, help="of every training (default: those of the demo's bf16 races)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="the demo's tiny models: only to see that it works")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: a spread needs at least 2")
    torch.set_num_threads(options.threads)
    machine = f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}"
    print(f"{machine}; {options.seeds} seeds, mean ± sample standard deviation\n\n{HEAD}", flush=True)
    variants = [dataclasses.replace(v, growth_interval=options.growth_interval) for v in VARIANTS[options.dtype]]
    results = {}
    for name in options.models.split(","):
        results[name] = trained(name, variants, range(options.seeds), options.steps, options.quick)
        print("\n".join(rows(name, results[name])), flush=True)
    if options.json:
        plain = {name: [dataclasses.asdict(one) for one in found] for name, found in results.items()}
        options.json.write_text(json.dumps({"machine": machine, "results": plain}, indent=1))
    return results


if __name__ == "__main__":
    main()
