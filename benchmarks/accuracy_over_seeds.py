"""Whether low precision trains to fp32's accuracy: the demo's models over several seeds, mean and spread.

Every seed has its own starting weights, batches and dropout; fp32, ``torch.autocast`` and amp_graph share them. In
fp16 both scale the loss dynamically, each with its own ``GradScaler``; a short ``--growth-interval`` lets the scale
grow until gradients overflow, and steps are skipped, many times in a training. The spread is the sample standard
deviation over the seeds. A mean is "within" where it is no farther from fp32's mean than fp32's spread.

    python benchmarks/accuracy_over_seeds.py [--seeds 3] [--models cnn,gpt,hf] [--dtype fp16] [--steps 150]
    python benchmarks/accuracy_over_seeds.py --emulate [--models cnn,gpt,hf,t5,resnet]

``--emulate`` trains with ``emulate=cuda``: fp16 as on a GPU, without a calibration, and with one of 3 batches in fp32
at the starting weights. ``t5`` and ``resnet`` have a part out of fp16's range, see ``out_of_range_models.py``. Each
training is written to results/emulation.json as it ends, and not repeated; the table is results/emulation.md.

Written as JSON, seed by seed, with ``--json``. About 15 minutes on one core: fp16 on a CPU is several times slower
than fp32, which is why the demo itself shows it only briefly.
"""

import argparse
import dataclasses
import json
import math
import platform
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import root_on_path  # noqa: F401 examples.demo
import torch
from out_of_range_models import PHASES, given_to, out_of_range
from result_file import machine

import amp_graph
from amp_graph.passes.native.output_file import write_atomically
from examples.demo.interleaved_training import APART, race, train
from examples.demo.tasks import NAMES, Task, built, task
from examples.demo.variants import FP32, VARIANTS, Trainee, Variant

RESULTS = Path(__file__).with_name("results") / "emulation.json"
EMULATED = "fp16,emulate=cuda"
CALIBRATED = f"{EMULATED},calibration="
BATCHES = 3  # of a calibration

TITLE = """\
# fp16 as on a GPU, emulated on a CPU: trained accuracy

Held-out accuracy and loss after {steps} steps, mean and sample standard deviation over three seeds, by
`benchmarks/accuracy_over_seeds.py --emulate`. "Within": no farther from fp32's mean than fp32's spread. `cnn`, `gpt`
and `hf` are the demo's models{quick}. `t5` and `resnet` are transformers' with random weights, one part of which is
out of fp16's range. Data: scikit-learn's digits and Python's source text. No GPU was at hand: how far the emulation is
from one is not measured.
"""
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


def calibrated(chosen: Task, start: torch.nn.Module, seed: int, batch: int, path: Path) -> None:
    """Write the calibration of the starting weights on the first batches of a training."""
    given = given_to(chosen.name) if chosen.name in PHASES else lambda inputs: inputs
    drawn = [chosen.data.batch(seed * APART + i, batch) for i in range(BATCHES)]
    batches = [(given(inputs), targets) for inputs, targets in drawn]

    def loss(out: object, targets: torch.Tensor) -> torch.Tensor:
        logits = getattr(out, "logits", out)
        return chosen.weight * torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())

    amp_graph.calibrate(start, batches, loss).save(path)


def emulated(name: str, seed: int, steps: int | None, quick: bool = False) -> dict[str, dict[str, float]]:
    """Train one model once in fp32, and in fp16 as on a GPU without and with a calibration."""
    chosen = out_of_range(name) if name in PHASES else task(name, quick=quick)
    longer = chosen.phases[0]
    phase = dataclasses.replace(longer, steps=steps or longer.steps, seconds=math.inf)
    start = built(chosen, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.json"
        calibrated(chosen, start, seed, phase.batch, path)
        variants = [
            FP32,
            Variant("fp16 as on a GPU", policy=EMULATED, scaled=True),
            Variant("fp16 as on a GPU, calibrated", policy=f"{CALIBRATED}{path}", scaled=True),
        ]
        trainees = [Trainee.of(chosen, phase, variant, start) for variant in variants]
        train(trainees, phase, lambda: None, seed)
        held_out = {one.variant.name: one.held_out() for one in trainees}
    return {
        one.variant.name: {
            "accuracy": held_out[one.variant.name][1],
            "loss": held_out[one.variant.name][0] if math.isfinite(held_out[one.variant.name][0]) else None,
            "skipped": one.steps_skipped,
        }
        for one in trainees
    }


def emulate(options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Train what the file of results lacks, and write its table."""
    about = {
        "format": 1,
        "machine": machine("cpu"),
        "options": {"steps": options.steps, "quick": options.quick, "policy": EMULATED},
    }
    held = json.loads(options.output.read_text()) if options.output.exists() else {}
    found = held["results"] if {key: held.get(key) for key in about} == about else {}  # else measured elsewhere
    for name in options.models.split(","):
        for seed in range(options.seeds):
            if str(seed) in found.setdefault(name, {}):
                continue
            found[name][str(seed)] = emulated(name, seed, options.steps, options.quick)
            print(name, seed, found[name][str(seed)], flush=True)
            write_atomically(options.output, json.dumps({**about, "results": found}, indent=1) + "\n")
    figures = {name: figures_of(seeds) for name, seeds in found.items() if len(seeds) > 1}  # a spread needs 2
    table = "\n".join([HEAD, *(row for name, one in figures.items() for row in rows(name, one))])
    options.output.with_suffix(".md").write_text(
        f"{TITLE.format(steps=options.steps or 150, quick=', its small ones' * options.quick)}\n{table}\n"
    )
    print(table)
    return figures


def figures_of(seeds: dict[str, dict[str, dict[str, float]]]) -> list[Figures]:
    """Return the figures of a model, variant by variant, of what the file of results has seed by seed."""
    made = []
    for variant in next(iter(seeds.values())):
        each = [one[variant] for one in seeds.values()]
        losses = [math.nan if one["loss"] is None else one["loss"] for one in each]
        made.append(Figures(variant, [o["accuracy"] for o in each], losses, [int(o["skipped"]) for o in each]))
    return made


def verdict(mine: Sequence[float], reference: Sequence[float]) -> str:
    """Say whether the mean is no farther from the reference's than the reference's seeds spread, or how far it is."""
    if not all(map(math.isfinite, mine)):
        return "no"
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
    if not all(map(math.isfinite, values)):
        return "NaN"
    return f"{form.format(statistics.fmean(values))} ± {form.format(statistics.stdev(values))}"


def main(argv: Sequence[str] | None = None) -> dict[str, list[Figures]]:
    """Run the chosen models and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models")
    parser.add_argument("--emulate", action="store_true", help="fp16 as on a GPU, without and with a calibration")
    parser.add_argument("--output", type=Path, default=RESULTS, help="of --emulate (default: results/emulation.json)")
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
    options.models = options.models or ",".join((*NAMES, *(PHASES if options.emulate else ())))
    if options.emulate:
        return emulate(options)
    described = f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}"
    print(f"{described}; {options.seeds} seeds, mean ± sample standard deviation\n\n{HEAD}", flush=True)
    variants = [dataclasses.replace(v, growth_interval=options.growth_interval) for v in VARIANTS[options.dtype]]
    results = {}
    for name in options.models.split(","):
        results[name] = trained(name, variants, range(options.seeds), options.steps, options.quick)
        print("\n".join(rows(name, results[name])), flush=True)
    if options.json:
        plain = {name: [dataclasses.asdict(one) for one in found] for name, found in results.items()}
        options.json.write_text(json.dumps({"machine": described, "results": plain}, indent=1))
    return results


if __name__ == "__main__":
    main()
