"""The first call of a converted model over that of ``torch.compile(backend="eager")``: what the rewriting adds.

    OMP_NUM_THREADS=1 python benchmarks/first_call.py > benchmarks/results/first_call.md  # the corpus
    OMP_NUM_THREADS=1 python benchmarks/first_call.py gpt2 esm --repeats 3

Each model runs forward and backward once, in a new process of one thread, which has captured a small model before: so
what torch and amp_graph import and build once a process does not count; compiled kernels are in their cache. Figures
are seconds of processor time, so that other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import root_on_path  # noqa: F401
import torch
from result_file import processor

import amp_graph
from tests.corpus import CASES, make

WAYS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "compile": lambda model: torch.compile(model, backend="eager"),
    "convert": lambda model: amp_graph.convert(model, "bf16"),
}


def first_call(name: str, way: str) -> float:
    """Return the seconds of the first forward and backward of one case of the corpus."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    small = WAYS[way](torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()))
    small(torch.randn(2, 8)).sum().backward()
    case = CASES[name]
    model, args, kwargs = make(case, 0)
    prepared = WAYS[way](model)
    start = time.process_time()
    loss = case.loss(prepared(*args, **kwargs))
    if loss.requires_grad:
        loss.backward()
    return time.process_time() - start


def apart(name: str, way: str) -> float | None:
    """Return what a new process measures; None if the call fails there."""
    command = [sys.executable, str(Path(__file__)), "--one", name, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def main() -> None:
    """Print a line for each model, then the median and the worst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(CASES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "WAY"))
    options = parser.parse_args()
    if options.one:
        print(first_call(*options.one))
        return
    about = f"torch {torch.__version__}, {processor(Path('/proc/cpuinfo'))}, one thread"
    print(f"# First calls\n\nSeconds of processor time of the first forward and backward; {about}.\n")
    print("| model | torch.compile | convert | ratio |\n|---|---:|---:|---:|", flush=True)
    ratios = {}
    for name in options.models:
        rounds = [{way: apart(name, way) for way in WAYS} for _ in range(options.repeats)]
        if any(seconds is None for each in rounds for seconds in each.values()):
            print(f"| {name} | fails: {rounds} | | |", flush=True)
            continue
        seconds = {way: statistics.median(each[way] for each in rounds) for way in WAYS}
        ratios[name] = seconds["convert"] / seconds["compile"]
        print(f"| {name} | {seconds['compile']:.2f} | {seconds['convert']:.2f} | {ratios[name]:.2f} |", flush=True)
    worst = max(ratios, key=ratios.__getitem__)
    print(
        f"\n{len(ratios)} models: median {statistics.median(ratios.values()):.2f}, worst {ratios[worst]:.2f} ({worst})"
    )


if __name__ == "__main__":
    main()
