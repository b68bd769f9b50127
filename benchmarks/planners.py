"""What the planners make of models on this machine: a training step, as a ratio to torch.autocast in the same dtype.

    python benchmarks/planners.py [dtype] [rounds]

One step of each variant in turn, in one process, on one thread; medians of the rounds' ratios [quartiles] of CPU time.
``low``: how many of the products run in low precision.
"""

import copy
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.precision.machine_rates import machine_for
from amp_graph.passes.precision.plan_precision import marks


def mlp(width: int, depth: int = 3) -> nn.Module:
    """Return a perceptron of equal layers."""
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))


def llama() -> nn.Module:
    """Return a small Llama, whose rotary embedding mixes precisions."""
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(
        LlamaConfig(
            vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False,
        )
    )  # fmt: skip


def cnn() -> nn.Module:
    """Return a few convolutions with batch norms."""
    blocks = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(4):
        blocks += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    return nn.Sequential(*blocks)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp 3x256, batch 1": (lambda: mlp(256), lambda: torch.randn(1, 256)),
    "mlp 3x256, batch 32": (lambda: mlp(256), lambda: torch.randn(32, 256)),
    "mlp 3x1024, batch 4": (lambda: mlp(1024), lambda: torch.randn(4, 1024)),
    "mlp 3x1024, batch 256": (lambda: mlp(1024), lambda: torch.randn(256, 1024)),
    "cnn, 2x3x32x32": (cnn, lambda: torch.randn(2, 3, 32, 32)),
    "llama, 1x8": (llama, lambda: torch.randint(0, 500, (1, 8))),
    "llama, 4x128": (llama, lambda: torch.randint(0, 500, (4, 128))),
}


def variants(dtype: str) -> dict[str, str]:
    """Return the policies to compare, by name."""
    return {
        "paint": f"{dtype},planner=paint",
        "mincut": dtype,
        "mincut, skip": f"{dtype},skip_unprofitable=true",
        "fast, paint": f"{dtype},accuracy=fast,planner=paint",
        "fast, mincut": f"{dtype},accuracy=fast",
    }


def step(model: nn.Module, x: torch.Tensor, low: torch.dtype | None = None) -> float:
    """Return the CPU seconds of a forward and a backward, under autocast where ``low`` is given."""
    model.zero_grad()
    start = time.process_time()
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        out = model(x)
    getattr(out, "last_hidden_state", out).float().square().mean().backward()
    return time.process_time() - start


def lowered(model: nn.Module) -> str:
    """Return how many products run in low precision, and how many there are."""
    found = [m for g in conversion_of(model).graphs for m in marks(g.rewritten.gm).values() if str(m.cls) == "allow"]
    return f"{sum(m.precision == 'low' for m in found)}/{len(found)}"


def compare(name: str, dtype: str, rounds: int) -> None:
    """Print one model's table."""
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    base, x = build(), inputs()
    low = torch.bfloat16 if dtype == "bf16" else torch.float16
    models = {v: amp_graph.convert(copy.deepcopy(base), p) for v, p in variants(dtype).items()}
    under, plain = copy.deepcopy(base), copy.deepcopy(base)
    runs: dict[str, Callable[[], float]] = {"autocast": lambda: step(under, x, low), "fp32": lambda: step(plain, x)}
    runs.update({v: lambda m=m: step(m, x) for v, m in models.items()})
    times: dict[str, list[float]] = {v: [] for v in runs}
    for round_ in range(-3, rounds):
        for v, run in runs.items():
            taken = run()
            if round_ >= 0:
                times[v].append(taken)
    print(f"{name}: autocast {statistics.median(times['autocast']) * 1e3:.2f} ms")
    for v, all_of_it in times.items():
        a, b, c = statistics.quantiles([t / u for t, u in zip(all_of_it, times["autocast"], strict=True)], n=4)
        shown = f"low {lowered(models[v])}" if v in models else ""
        print(f"  {v:14s} {b:.2f} [{a:.2f}-{c:.2f}]  {shown}", flush=True)


def main(dtype: str = "bf16", rounds: str = "30") -> None:
    """Print the tables of all models."""
    torch.set_num_threads(1)
    print(f"{platform.machine()}, planned for {machine_for('cpu').name}, torch {torch.__version__}, 1 thread, {dtype}")
    for name in MODELS:
        compare(name, dtype, int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
