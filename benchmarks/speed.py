"""Training and inference of nine models: ``amp_graph.convert`` against ``torch.autocast``, bf16, in one process.

A round runs every variant once, in an order that turns with the round; it gives one ratio to autocast a variant,
and medians and quartiles of the ratios are reported. Above 1 is faster than autocast. The baseline of models on
images is the better of autocast on contiguous and on channels_last tensors. Training is forward, backward and fused
AdamW. Writes a Markdown table and JSON.

    python benchmarks/speed.py [--models mlp,gpt] [--scale 0.5] [--rounds 7] [--compiled] [--threads 1] [--cpu-time]
"""

import argparse
import contextlib
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from interleaved import interleaved, quartiles
from models import MODELS, Case, case
from torch.utils._pytree import tree_map_only

import amp_graph

RESULTS = Path(__file__).parent / "results"
EAGER = {"amp_graph": "bf16", "amp_graph fast": "bf16,accuracy=fast"}
BASELINES = ("autocast", "autocast channels_last")
INDUCTOR = "inductor"
SUFFIX = " + Inductor"


@dataclass(frozen=True)
class Variant:
    """One way to run a model: a policy, or None for autocast; whether compiled; the memory format."""

    name: str
    policy: str | None = None
    compiled: bool = False
    channels_last: bool = False


def variants(images: bool, compiled: bool, skip: str) -> list[Variant]:
    """Return what is compared, autocast first."""
    plain = [Variant(BASELINES[0]), *([Variant(BASELINES[1], channels_last=True)] if images else [])]
    ours = [Variant(name, policy + (f",skip={skip}" if skip else "")) for name, policy in EAGER.items()]
    found = plain + ours
    if compiled:
        found += [Variant(v.name + SUFFIX, v.policy, True, v.channels_last) for v in (plain[-1], *ours)]
    return found


def prepared(name: str, scale: float, variant: Variant) -> tuple[Case, torch.nn.Module, Callable]:
    """Build the model of a variant; returns its case, what is called, and the context it is called in."""
    made = case(name, scale)
    model = made.model
    if variant.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if variant.policy is not None:
        amp_graph.convert(model, variant.policy, compile=INDUCTOR if variant.compiled else "eager")
        return made, model, contextlib.nullcontext
    called = torch.compile(model) if variant.compiled else model
    if variant.channels_last:
        called = _WithChannelsLast(called)
    return made, called, lambda: torch.autocast("cpu", torch.bfloat16)


class _WithChannelsLast(torch.nn.Module):
    """Gives a model its images in channels_last, as whoever trains in that format does in the data loader."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self._last = model, {}

    def forward(self, *args: object) -> object:
        """Call the model; a batch is converted once."""
        return self.model(*tree_map_only(torch.Tensor, self._converted, args))

    def _converted(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 4:
            return x
        if id(x) not in self._last:
            self._last[id(x)] = x.contiguous(memory_format=torch.channels_last)
        return self._last[id(x)]


def training_step(name: str, scale: float, variant: Variant) -> Callable[[], None]:
    """Return a function that makes one training step."""
    made, model, context = prepared(name, scale, variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with context():
            loss = made.loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def inference_call(name: str, scale: float, variant: Variant) -> Callable[[], None]:
    """Return a function that makes one call in evaluation mode."""
    made, model, context = prepared(name, scale, variant)
    made.model.eval()

    def call() -> None:
        with torch.inference_mode(), context():
            made.infer(model)

    return call


def told(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return milliseconds and ratios to the better baseline of each variant."""
    base = min((n for n in seconds if n in BASELINES), key=lambda n: statistics.median(seconds[n]))
    found = {}
    for name, times in seconds.items():
        low, middle, high = quartiles(seconds[base], times)
        milliseconds = statistics.median(times) * 1e3
        found[name] = {"ms": milliseconds, "ratio": middle, "p25": low, "p75": high}
    return found


def machine(threads: int) -> dict[str, object]:
    """Return what the figures depend on: the kind of processor, and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx": torch.cpu._is_amx_tile_supported(),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def markdown(report: dict) -> str:
    """Return the report as Markdown: a table for training and one for inference."""
    about, options = report["machine"], report["options"]
    lines = [
        f"{about['processor']}, {about['capability']}, bf16 dot products: {about['avx512_bf16']}, AMX: {about['amx']}; "
        f"{about['threads']} thread(s), torch {about['torch']}, Python {about['python']}.",
        "",
        f"Scale {options['scale']}, {options['rounds']} rounds, "
        f"{'process CPU time' if options['cpu_time'] else 'wall-clock time'}. A figure is autocast's time over the "
        "variant's, median of the rounds [quartiles]: above 1 is faster. For models on images the baseline is the "
        "better of contiguous and channels_last."
        + (f" Passes switched off: {options['skip']}." if options["skip"] else ""),
    ]
    for mode, results in report["results"].items():
        names = list(dict.fromkeys(n for r in results.values() for n in r if n not in BASELINES))
        lines += ["", f"## {mode.capitalize()}", "", f"| model | autocast, ms | {' | '.join(names)} |"]
        lines.append("|---|---:|" + "---|" * len(names))
        for model, found in results.items():
            base = min(found[n]["ms"] for n in BASELINES if n in found)
            lines.append(f"| {model} | {base:.1f} | {' | '.join(_cell(found.get(n)) for n in names)} |")
        means = [_mean([f[n]["ratio"] for f in results.values() if n in f]) for n in names]
        lines.append(f"| **geometric mean** | | {' | '.join(f'**{m:.2f}**' for m in means)} |")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, float] | None) -> str:
    return f"{found['ratio']:.2f} [{found['p25']:.2f}-{found['p75']:.2f}]" if found else ""


def _mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(r) for r in ratios))


def main() -> None:
    """Measure the chosen models; prints as it goes, and writes the tables at the end of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default="training,inference")
    parser.add_argument("--scale", type=float, default=1.0, help="of batches and depths")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="also through Inductor, on both sides")
    parser.add_argument("--cpu-time", action="store_true", help="process CPU time, steadier where cores are shared")
    parser.add_argument("--skip", default="", help="passes to switch off, as in the policy word skip=")
    parser.add_argument("--output", type=Path, default=RESULTS / "speed", help="path without suffix")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    named = {k: v for k, v in vars(options).items() if k not in ("output", "models", "modes")}
    report = {"machine": machine(options.threads), "options": named, "results": {}}
    for mode in options.modes.split(","):
        make = training_step if mode == "training" else inference_call
        for name in options.models.split(","):
            chosen = variants(case(name, 0.01).images, options.compiled, options.skip)
            calls = {v.name: make(name, options.scale, v) for v in chosen}
            found = told(interleaved(calls, options.rounds, clock))
            report["results"].setdefault(mode, {})[name] = found
            print(mode, name, *(f"{n}: {f['ms']:.1f} ms x{f['ratio']:.2f}" for n, f in found.items()), flush=True)
            torch._dynamo.reset()
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
            options.output.with_suffix(".md").write_text(markdown(report))
    print("\n" + markdown(report))


if __name__ == "__main__":
    main()
