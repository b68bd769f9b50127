"""Step time of converted models and of ``TrainStep`` against eager ``torch.autocast``, interleaved in one process.

One step of each variant in turn, of quick ones as many as take 50 ms, as in a loop, where a step follows another of its
own; the same batch, fused AdamW. A round gives one ratio to autocast, and the median and quartiles over rounds are
printed (and written as JSON with ``--json``). Below 1.00 is faster than autocast. Absolute times are noise on shared
machines.

    python benchmarks/step_time.py [--rounds 30] [--threads 2] [--models cnn,gpt,hf,mlp] [--cpu-time] [--compiled]
"""

import argparse
import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import root_on_path  # noqa: F401 examples.demo
import torch
from interleaved import interleaved, quartiles
from torch import nn

import amp_graph
from examples.demo.tasks import built, task

LEAST = 0.05  # seconds
VARIANTS = {"autocast": None, "amp_graph": "bf16", "amp_graph fast": "bf16,accuracy=fast"}
STEPS = {"TrainStep": ("bf16", "eager"), "TrainStep fast": ("bf16,accuracy=fast", "eager")}
COMPILED = {"TrainStep inductor": ("bf16", "inductor"), "autocast + torch.compile": None}


def mlp() -> tuple[nn.Module, Callable]:
    """Three layers of 256 at batch 32: where call overhead is all there is."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    batch = torch.randn(32, 256)
    return model, lambda m: m(batch).square().mean()


def demo_model(name: str) -> tuple[nn.Module, Callable]:
    """A model of the demo with its own first batch and loss."""
    chosen = task(name)
    model = built(chosen)
    batch = chosen.data.batch(0, chosen.phases[0].batch)
    return model, lambda m: chosen.loss(m, batch)[0]


def step_of(make: Callable, policy: str | None) -> Callable[[], None]:
    """Return a function that makes one training step of one variant."""
    torch.manual_seed(0)
    model, loss_of = make()
    if policy is not None:
        amp_graph.convert(model, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def context() -> contextlib.AbstractContextManager:
        return torch.autocast("cpu", torch.bfloat16) if policy is None else contextlib.nullcontext()

    def step() -> None:
        with context():
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class WithLoss(nn.Module):
    """A model and its loss as one module, which is what ``TrainStep`` and ``torch.compile`` are given."""

    def __init__(self, model: nn.Module, loss_of: Callable) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self) -> torch.Tensor:
        """Return the loss of the one batch."""
        return self.loss_of(self.model)


def whole_step_of(make: Callable, policy: str, compile: str) -> Callable[[], None]:
    """Return a ``TrainStep``."""
    torch.manual_seed(0)
    model = WithLoss(*make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return amp_graph.TrainStep(model, None, optimizer, policy, compile=compile)


def compiled_step_of(make: Callable) -> Callable[[], None]:
    """Return a step of ``torch.compile`` under autocast."""
    torch.manual_seed(0)
    model = WithLoss(*make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def race(make: Callable, rounds: int, clock: Callable[[], float], compiled: bool) -> dict[str, dict[str, float]]:
    """Run the variants step by step in turn and return each one's ratios to autocast."""
    steps = {name: step_of(make, policy) for name, policy in VARIANTS.items()}
    steps |= {name: whole_step_of(make, *given) for name, given in STEPS.items()}
    if compiled:
        steps |= {n: whole_step_of(make, *g) if g else compiled_step_of(make) for n, g in COMPILED.items()}
    seconds = interleaved(steps, rounds, clock, LEAST)
    return {name: _told(times, seconds["autocast"]) for name, times in seconds.items()}


def _told(times: list[float], baseline: list[float]) -> dict[str, float]:
    low, middle, high = quartiles(times, baseline)
    return {"ms": statistics.median(times) * 1e3, "ratio": middle, "p25": low, "p75": high}


def main() -> None:
    """Run the chosen models and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--models", default="mlp,cnn,gpt,hf")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count process CPU time, steadier where cores are shared"
    )
    parser.add_argument("--compiled", action="store_true", help="also through Inductor, on both sides")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    machine = f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}"
    print(f"{machine}; {options.rounds} rounds; time over autocast's, median [p25 - p75]\n")
    print("| model | variant | ms | time / autocast |\n|---|---|---:|---|")
    results = {}
    for name in options.models.split(","):
        make = mlp if name == "mlp" else (lambda name=name: demo_model(name))
        results[name] = race(make, options.rounds, clock, options.compiled)
        for variant, told in results[name].items():
            spread = f"{told['ratio']:.3f} [{told['p25']:.3f} - {told['p75']:.3f}]"
            print(f"| {name} | {variant} | {told['ms']:.2f} | {spread} |", flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine, "rounds": options.rounds, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
