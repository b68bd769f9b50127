"""What loss scaling adds to an optimizer's step: ``amp_graph.GradScaler`` against ``torch.amp.GradScaler``.

25 million parameters in 24 tensors, fused AdamW, gradients there already: ``step`` and ``update`` only, variants in
turn in one process. A round gives one ratio to the step without a scaler; medians and quartiles over rounds.

    python benchmarks/scaler_time.py [--rounds 30] [--threads 1] [--cpu-time]
"""

import statistics
import time
from collections.abc import Callable

import torch
from interleaved import interleaved, parser_of, spread

import amp_graph

SHAPES = [(1024, 1024)] * 23 + [(1024, 512)]


def variant(scaler: torch.amp.GradScaler | None) -> Callable[[], None]:
    """Return a function that makes one step and update on gradients that are always the same."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    for p in params:
        p.grad = torch.randn_like(p)
    if scaler is None:
        return optimizer.step
    scaler.scale(torch.zeros(()))  # puts its state on the device

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def main() -> None:
    """Run the variants in turn and print a Markdown table."""
    parser = parser_of(__doc__, rounds=30)
    parser.add_argument("--cpu-time", action="store_true", help="count process CPU time, steadier on shared cores")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    scale = 2.0  # small, so that gradients that are unscaled at every step stay normal numbers
    steps = {
        "no scaler": variant(None),
        "torch.amp.GradScaler": variant(torch.amp.GradScaler("cpu", scale, growth_interval=2**30)),
        "amp_graph.GradScaler": variant(amp_graph.GradScaler("cpu", scale, growth_interval=2**30)),
    }
    seconds = interleaved(steps, options.rounds, clock)
    count = sum(a * b for a, b in SHAPES) / 1e6
    print(f"{count:.1f}M parameters, {options.threads} threads, torch {torch.__version__}, {options.rounds} rounds\n")
    print("| variant | ms | time / step without a scaler |\n|---|---:|---|")
    for name, times in seconds.items():
        print(f"| {name} | {statistics.median(times) * 1e3:.1f} | {spread(times, seconds['no scaler'])} |")


if __name__ == "__main__":
    main()
