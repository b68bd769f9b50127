"""The memory of a whole process that trains, resident and at its peak; each way runs in a process of its own.

Before: a model, and ways to train it: autocast, converted with ``keep_memory`` on and off. After: a line for each model
with megabytes, ratios to ``keep_memory=false``, and milliseconds of CPU time a step. Source of the figures: VmHWM and
VmRSS of /proc/self/status, Linux alone.

    python benchmarks/process_memory.py [--models gpt,lstm] [--scale 1.0] [--steps 20]
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from models import MODELS, MORE

WAYS = {"autocast": "", "kept": "bf16,keep_memory=true", "given back": "bf16,keep_memory=false"}
RESULTS = Path(__file__).parent / "results" / "process_memory.md"


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join([*MODELS, "gpt2_medium"]))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--whole", action="store_true", help="TrainStep instead of convert")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", default="", help="a model and a way, in this process: gpt:kept")
    options = parser.parse_args(argv)
    if unknown := {m for m in options.models.split(",")} - set(MODELS | MORE):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; legal: {', '.join(MODELS | MORE)}")
    return options


def one(model: str, way: str, options: argparse.Namespace) -> dict[str, float]:
    """Train in this process; return megabytes resident and at the peak, and milliseconds a step."""
    import torch
    from variants import Setup, Variant, training_step

    torch.set_num_threads(1)
    policy = WAYS[way]
    whole = options.whole and bool(policy)
    variant = Variant(way, policy=policy, autocast=not policy, whole=whole)
    # GPT-2 medium's batch of 8 x 1,024 tokens is a GPU's.
    scale = options.scale * (0.125 if model in MORE else 1.0)
    made = training_step(model, scale, variant, Setup())
    took = []
    for _ in range(options.steps):
        start = time.process_time()
        made.run()
        took.append(time.process_time() - start)
    return memory() | {"ms": 1e3 * sorted(took)[len(took) // 2]}


def memory() -> dict[str, float]:
    """Return the megabytes of this process, resident and at its peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"resident": int(lines["VmRSS"].split()[0]) / 1e3, "peak": int(lines["VmHWM"].split()[0]) / 1e3}


def apart(model: str, way: str, options: argparse.Namespace) -> dict[str, float]:
    """Train in a process of its own."""
    more = ["--scale", str(options.scale), "--steps", str(options.steps), *(["--whole"] if options.whole else [])]
    command = [sys.executable, __file__, "--one", f"{model}:{way}", *more]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every model in every way, and write the table."""
    options = parsed(argv)
    if options.one:
        print(json.dumps(one(*options.one.split(":"), options)))
        return
    heads = [f"{way}, {what}" for what in ("resident MB", "peak MB", "ms") for way in WAYS]
    lines = [
        f"| model | {' | '.join(heads)} | resident, kept over given back | peak | time |",
        "|---|" + "---:|" * (len(heads) + 3),
    ]
    for model in options.models.split(","):
        found = {way: apart(model, way, options) for way in WAYS}
        cells = [f"{found[way][what]:.0f}" for what in ("resident", "peak", "ms") for way in WAYS]
        cells += [f"{found['kept'][w] / found['given back'][w]:.3f}" for w in ("resident", "peak", "ms")]
        lines.append(f"| {model} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    how = f"Scale {options.scale:g}, {options.steps} steps, {'TrainStep' if options.whole else 'convert'}, one thread."
    options.output.write_text("\n".join(["# Memory of a process that trains", "", how, "", *lines]) + "\n")


if __name__ == "__main__":
    main()
