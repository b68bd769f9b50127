"""Training and inference of nine models: amp_graph against ``torch.autocast``, side by side in one process.

A round runs every variant once, in an order that turns with the round; it gives one ratio to autocast a variant, and
medians and quartiles of the ratios are reported. Above 1 is faster than autocast. What runs through Inductor is
compared with autocast through Inductor, and with eager autocast as well. The baseline of models on images is the better
of autocast on contiguous and on channels_last tensors. Beside it, once: casts, saved and peak memory, the first call,
and an estimate of what the machine could do (``limits.py``). Writes JSON and Markdown: some models, modes or options
into what is there, but never results of another machine or version (``result_file.py``).

In one process variants share a heap, and what one leaves there another need not get from the system. With ``--apart``
each has a process of its own, as where it is used; they take turns as before.

    python benchmarks/speed.py [--models mlp,gpt] [--scale 0.5] [--rounds 7] [--compiled] [--threads 1,2] [--cpu-time]
    python benchmarks/speed.py --variants "fp32,amp_graph*" --modes training
    python benchmarks/speed.py --device cuda --dtype fp16 --compiled --cuda-graphs
"""

import argparse
import contextlib
import gc
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from apart import apart
from devices import prepare
from limits import measured_rates
from measuring import Job, measured, warm_up
from models import MODELS, MORE, case
from result_file import Results, machine, opened, refuse_to_lose, run_of, written
from tables import markdown, one_line
from variants import DTYPES, Setup, Variant, chosen, variants

from amp_graph.passes.native.jit_compiler import FOLDER

RESULTS = Path(__file__).parent / "results"
MODES = ("training", "inference")
# What is chosen of all that could be measured: all other options change the figures, which are kept apart by them.
CHOICES = ("models", "modes", "variants", "compiled", "output", "threads", "patience", "keep_compiled")


@dataclass(frozen=True)
class Entry:
    """One model in one mode, and where its figures go."""

    run: Results
    mode: str
    name: str
    every: list[Variant]


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--variants", default="", help="patterns of names: 'fp32,TrainStep*' (default: all eager ones)")
    parser.add_argument("--compiled", action="store_true", help="also through Inductor, on all sides")
    parser.add_argument("--scale", type=float, default=1.0, help="of batches and depths")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", default="1", help="one number or several: 1,2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--cpu-time", action="store_true", help="process CPU time, steadier where cores are shared")
    parser.add_argument("--raised-thresholds", action="store_true", help="glibc keeps freed memory, all sides")
    parser.add_argument("--apart", action="store_true", help="each variant in a process of its own, in turn")
    parser.add_argument("--no-grad", action="store_true", help="inference under no_grad, not inference_mode")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="on a GPU")
    parser.add_argument("--cuda-graphs", action="store_true", help="on a GPU: Inductor's mode='reduce-overhead'")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds that a first call may take")
    parser.add_argument(
        "--keep-compiled", type=Path, help="a folder of what was compiled, for a run that goes on later"
    )
    parser.add_argument("--skip", default="", help="passes to switch off, as in the policy word skip=")
    parser.add_argument("--output", type=Path, default=RESULTS / "speed", help="path without suffix")
    options = parser.parse_args(argv)
    for given, legal in ((options.models, MODELS | MORE), (options.modes, MODES)):
        if unknown := set(given.split(",")) - set(legal):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; legal: {', '.join(legal)}")
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: quartiles need at least 2")
    if options.cpu_time and options.threads != "1":
        parser.error(f"--cpu-time --threads {options.threads}: the time of several threads adds up; leave one out")
    return options


def of_process(options: argparse.Namespace) -> dict[str, Any]:
    """Return how a process that measures is set up."""
    names = ("device", "cpu_time", "cudnn_benchmark", "cuda_graphs", "raised_thresholds")
    return {name: getattr(options, name) for name in names}


def planned(options: argparse.Namespace, setup: Setup, held: Results) -> list[Entry]:
    """Return what to measure, in order; SystemExit where results that are there would be lost."""
    same = {k: v for k, v in vars(options).items() if k not in CHOICES and (v or k != "apart")}
    plan = []
    for threads in map(int, options.threads.split(",")):
        run = run_of(held, {"threads": threads, **same})
        for mode in options.modes.split(","):
            for name in options.models.split(","):
                every = variants(setup, case(name, 0.01).images, training=mode == "training")
                wanted = chosen(every, options.variants, options.compiled)
                refuse_to_lose(options.output.with_suffix(".json"), run, mode, name, [v.name for v in wanted])
                plan.append(Entry(run, mode, name, wanted))
    return plan


@contextlib.contextmanager
def compiled_anew(kept: Path | None = None) -> Iterator[None]:
    """Have Inductor and amp_graph compile all there is, and nothing come from an earlier run: its time is measured.

    With ``kept``, a folder, what an earlier run left there is used, and first calls say nothing.
    """
    import torch._inductor.config as inductor

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own,
        mock.patch.dict(os.environ, _folders(kept or Path(own))),
        inductor.patch(force_disable_caches=kept is None),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
        yield


def _folders(inside: Path) -> dict[str, str]:
    """Return the variables that say where compilers keep things."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(inside.absolute()), FOLDER: str(inside.absolute() / "amp_graph")}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen models with each number of threads; prints as it goes, and writes behind each model."""
    options = parsed(argv)
    device = prepare(**of_process(options))
    setup = Setup(options.device, options.dtype, options.skip, options.no_grad, options.cuda_graphs)
    path = options.output.with_suffix(".json")
    held = opened(path, machine(options.device))
    rates = {}
    plan = planned(options, setup, held)
    with compiled_anew(options.keep_compiled):
        warm_up(device.name, any(v.compiled for entry in plan for v in entry.every))
        for entry in plan:
            threads = entry.run["options"]["threads"]
            torch.set_num_threads(threads)
            if threads not in rates:
                rates[threads] = measured_rates(device, {"fp32": torch.float32, setup.dtype: DTYPES[setup.dtype]})
            training = entry.mode == "training"
            job = Job(
                entry.name,
                options.scale,
                training,
                setup,
                options.rounds,
                options.patience,
                options.keep_compiled is None,
            )
            with apart(of_process(options), threads) if options.apart else contextlib.nullcontext() as processes:
                found = measured(job, entry.every, device, rates[threads], processes)
            print(one_line(entry.mode, entry.name, found), flush=True)
            written(path, held, entry.run, entry.mode, entry.name, found)
            options.output.with_suffix(".md").write_text(markdown(held))
            torch._dynamo.reset()
            gc.collect()
    print(f"written: {path}, {path.with_suffix('.md')}")


if __name__ == "__main__":
    main()
