"""The peak of memory of a process that trains, against that of ``torch.autocast``; each way in a process of its own.

    python benchmarks/peak_memory.py [--models "lstm;gpt2, 2 x 256"] [--optimizers SGD,AdamW]
        [--ways "autocast;convert"] [--steps 2] [--device cpu] [--again] [--output PATH]

A row is a model with an optimizer of torch (fused), in bf16; a column a way to train it: fp32, autocast, ``convert``
and ``TrainStep``. Its figures, in bytes:

    whole       VmHWM of the process at the end, over what was resident before the first step: with capture
    steps       the same of the steps behind the first two alone, over the same
    allocated   by torch's allocator in one more step: what is held between steps, and the peak beside it
    device      on CUDA, torch.cuda.max_memory_allocated from before the model on, and that of the steps alone

What is resident before has the model, its batch, the imports of every way, and what a conversion of another, tiny model
leaves. On Linux alone. Rows that the file of results has are not run again, unless --again.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from devices import Device
from measuring import warm_up
from memory_models import MEMORY
from peak_tables import WAYS, markdown
from result_file import Results, machine, opened, run_of, written
from step_costs import held_by
from variants import Setup, Variant, training_step

from amp_graph.passes.native.output_file import write_atomically

RESULTS = Path(__file__).parent / "results" / "peak_memory.json"
MODELS = [*MEMORY, "lstm"]
HOW: dict[str, dict[str, Any]] = {
    "fp32": {},
    "autocast": {"autocast": True},
    "convert": {"policy": "bf16"},
    "TrainStep": {"policy": "bf16", "whole": True},
}
WARM_UP = 2


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=";".join(MODELS), help="separated by semicolons")
    parser.add_argument("--optimizers", default="SGD,AdamW")
    parser.add_argument("--ways", default=";".join(HOW), help="separated by semicolons")
    parser.add_argument("--steps", type=int, default=2, help=f"steps behind the first {WARM_UP}")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--again", action="store_true", help="also rows that are there")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", default="", help="a model, an optimizer and a way, in this process: lstm;SGD;fp32")
    options = parser.parse_args(argv)
    for given, legal in ((options.models, MODELS), (options.ways, HOW)):
        if unknown := set(given.split(";")) - set(legal):
            parser.error(f"unknown: {'; '.join(sorted(unknown))}\n  legal: {'; '.join(legal)}")
    return options


def one(model: str, optimizer: str, way: str, options: argparse.Namespace) -> dict[str, int]:
    """Train in this process; return what it took, in bytes."""
    torch.set_num_threads(1)
    warm_up(options.device, compiled=False)
    variant, setup = Variant(way, **HOW[way]), Setup(options.device, optimizer=optimizer)
    made = training_step(model, options.scale, variant, setup)
    release_free_memory()
    forget_peak(options.device)
    before, given = resident("VmRSS"), held_by(made)
    peaks = [peak_of(made.run, times, options.device) for times in (WARM_UP, options.steps)]
    process, device = zip(*peaks, strict=True)
    found = {"before": before, "whole": max(process) - before, "steps": process[1] - before}
    if options.device == "cuda":
        return found | {"device": max(device), "device_steps": device[1]}
    return found | {"allocated": held_by(made) - given + Device().peak(made.run)}


def peak_of(run: Callable[[], object], times: int, device: str) -> tuple[int, int]:
    """Return the peaks of the process and of the device's allocator in so many calls."""
    forget_peak(device)
    for _ in range(times):
        run()
    return resident("VmHWM"), torch.cuda.max_memory_allocated() if device == "cuda" else 0


def release_free_memory() -> None:
    """Give what making the model left back to the system, where the C library is glibc."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def forget_peak(device: str) -> None:
    """Let the peak of this process, and of the device, be what there is now."""
    Path("/proc/self/clear_refs").write_text("5")
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def resident(line: str) -> int:
    """Return the bytes that this process has in memory (``VmRSS``), or had at its peak (``VmHWM``)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[line].split()[0]) * 1024


def apart(row: tuple[str, str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Train in a process of its own; return its figures, or what it raised."""
    more = ["--steps", str(options.steps), "--scale", str(options.scale), "--device", options.device]
    ran = subprocess.run([sys.executable, __file__, "--one", ";".join(row), *more], capture_output=True, text=True)
    if ran.returncode:
        return {"error": (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]}
    return json.loads(ran.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the rows that are not there yet; write each at once."""
    options = parsed(argv)
    if options.one:
        print(json.dumps(one(*options.one.split(";"), options)))
        return
    for model in options.models.split(";"):
        for optimizer in options.optimizers.split(","):
            for way in options.ways.split(";"):
                _measure(model, optimizer, way, options)


def _measure(model: str, optimizer: str, way: str, options: argparse.Namespace) -> None:
    """Measure one way to train and write it, unless the file has it; the file is read anew each time."""
    words = {"device": options.device, "scale": options.scale, "steps": options.steps}

    def held_rows() -> tuple[Results, Results, dict[str, Any]]:
        held = opened(options.output, machine(options.device))
        run = run_of(held, words)
        return held, run, dict(run["results"].get(optimizer, {}).get(model, {}))

    if way in (there := held_rows()[2]) and "error" not in there[way] and not options.again:
        return
    found = apart((model, optimizer, way), options)
    print(model, optimizer, way, found, flush=True)
    held, run, rows = held_rows()
    rows[way] = found
    written(options.output, held, run, optimizer, model, {name: rows[name] for name in WAYS if name in rows})
    write_atomically(options.output.with_suffix(".md"), markdown(held))


if __name__ == "__main__":
    main()
