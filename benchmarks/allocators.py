"""What settings of the allocator are worth in training, for ``torch.autocast`` and for amp_graph alike.

Before: environment variables. After: a Markdown table, a row a model and setting. Each side with each setting has a
process of its own, since an allocator belongs to a process; they take turns. A ratio is CPU time with glibc's defaults
over that with the setting, by the round: the median and the quartiles. ``faults`` are page faults of one step.

    python benchmarks/allocators.py [--models gpt,lstm] [--scale 0.25] [--rounds 9]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from interleaved import interleaved, parser_of, spread
from result_file import machine
from tables import about
from variants import Setup, Variant, training_step

LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")  # where Debian's libjemalloc2 and libtcmalloc-minimal4 are
DEFAULT = "glibc"
SETTINGS = {
    DEFAULT: {},
    "glibc, high thresholds": {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)},
    "glibc, huge pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "jemalloc": {"LD_PRELOAD": str(LIBRARIES / "libjemalloc.so.2")},
    "jemalloc, no decay": {
        "LD_PRELOAD": str(LIBRARIES / "libjemalloc.so.2"),
        "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1",
    },
    "tcmalloc": {"LD_PRELOAD": str(LIBRARIES / "libtcmalloc_minimal.so.4")},
}
SIDES = {
    "autocast": Variant("autocast", autocast=True),
    "convert": Variant("convert", policy="bf16"),
}


def serve(model: str, scale: float, side: str, threads: int) -> None:
    """Train in this process: a step for each line that is read; the answer has its seconds, faults and memory."""
    torch.set_num_threads(threads)
    made = training_step(model, scale, SIDES[side], Setup())
    for _ in sys.stdin:
        faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
        made.run()
        seconds, used = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps([seconds, used.ru_minflt - faults, used.ru_maxrss // 1024]), flush=True)


class Worker:
    """A process with one setting, and what its last step took."""

    def __init__(self, model: str, scale: float, side: str, setting: str, threads: int) -> None:
        words = ["--serve", side, "--models", model, "--scale", str(scale), "--threads", str(threads)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **SETTINGS[setting]},
        )  # fmt: skip
        self.seconds, self.faults, self.megabytes = 0.0, 0, 0
        self.step()  # so that one process starts at a time

    def step(self) -> None:
        """Have it make a step."""
        assert self.process.stdin is not None and self.process.stdout is not None, "both are pipes"  # noqa: PT018
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        seconds, self.faults, self.megabytes = json.loads(self.process.stdout.readline())
        self.seconds += seconds


def rows_of(model: str, options: argparse.Namespace) -> list[str]:
    """Measure one model; return its lines of the table."""
    known = {key: s for key, s in SETTINGS.items() if Path(s.get("LD_PRELOAD", "/")).exists()}
    pairs = [(setting, side) for setting in known for side in SIDES]
    workers = {pair: Worker(model, options.scale, pair[1], pair[0], options.threads) for pair in pairs}
    calls = {str(pair): worker.step for pair, worker in workers.items()}
    try:
        seconds = interleaved(calls, options.rounds, lambda: sum(w.seconds for w in workers.values()))
    finally:
        for worker in workers.values():
            worker.process.kill()
    lines = []
    for setting in known:
        of = {side: seconds[str((setting, side))] for side in SIDES}
        gains = [spread(seconds[str((DEFAULT, side))], of[side]) for side in SIDES]
        faults, peaks = ([getattr(workers[setting, side], what) for side in SIDES] for what in ("faults", "megabytes"))
        cells = [model, setting, *gains, spread(of["autocast"], of["convert"])]
        lines.append(f"| {' | '.join(cells)} | {faults[0]:,}, {faults[1]:,} | {peaks[0]:,}, {peaks[1]:,} |")
    return lines


def main() -> None:
    """Print the table, or serve."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--models", default="gpt,lstm")
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.models, options.scale, options.serve, options.threads)
        return
    print(about(machine("cpu")), f"{options.threads} thread, models at {options.scale:g} of their sizes.\n")
    print(
        "| model | setting | autocast, default / setting | convert, default / setting | autocast / convert | ", end=""
    )
    print("faults of a step | peak of the process, MB |\n|---|---|---|---|---|---:|---:|")
    for model in options.models.split(","):
        print(*rows_of(model, options), sep="\n", flush=True)


if __name__ == "__main__":
    main()
