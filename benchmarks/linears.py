"""Linears over few rows: torch's, and compiled C; without gradients oneDNN's on packed weights, too.

    python benchmarks/linears.py [--rounds 9] [--threads 1] [--training | --cold]

bf16. Without gradients weights are packed, or lie in panels; ``--training``: forward and backward under autograd, for
weights as they lie; ``--cold``: one after another of so many weights that no cache holds them, as where a model reads
its own. Ratios are medians over interleaved rounds [quartiles]: above 1 C is faster. Wall-clock time.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from interleaved import interleaved, parser_of, spread
from torch import Tensor

from amp_graph.passes.backends.cpu.linear.lower_linears import linear_low
from amp_graph.passes.backends.cpu.linear.panel_gemm import library, linear_by_panels, panels_of
from amp_graph.passes.torch_compat.devices import linear_of_packed_weight, pack_linear_weight

ROWS = (1, 2, 4, 6, 8, 16, 32, 64, 256)
WIDTHS = ((64, 64), (256, 256), (512, 256), (768, 768), (768, 3072), (1024, 1024))  # inputs, outputs
LARGE = ((1024, 1024), (768, 3072), (3072, 768), (4096, 4096), (768, 16384))
COLD = 3 << 25  # bytes of weights that no cache holds
LEAST = 0.01  # seconds a measurement


def inference(x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Callable[[], object]]:
    """Return the calls without gradients."""
    panels, packed, outputs = panels_of(weight), pack_linear_weight(weight), len(weight)
    return {
        "torch": lambda: F.linear(x, weight, bias),
        "oneDNN": lambda: linear_of_packed_weight(x, packed, bias),
        "ours": lambda: linear_by_panels(x, panels, bias, False, outputs),
    }


def training(x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Callable[[], object]]:
    """Return forward and backward."""
    given = [t.requires_grad_() for t in (x, weight, bias)]
    grad = torch.randn(len(x), len(weight)).bfloat16()
    both = {"torch": F.linear, "ours": linear_low}
    return {name: lambda f=f: torch.autograd.grad(f(*given), given, grad) for name, f in both.items()}


def _all(name: str, made: list[dict[str, Callable[[], object]]]) -> Callable[[], object]:
    return lambda: [one[name]() for one in made]


def main() -> None:
    """Print a row for each size."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if library() is None:
        raise SystemExit("there is no kernel for this CPU, or no C compiler")
    print("rows   in -> out   million    torch us   faster than torch       faster than oneDNN, packed")
    for rows in ROWS:
        for inputs, outputs in LARGE if options.cold else WIDTHS:
            copies = -(-COLD // (2 * inputs * outputs)) if options.cold else 1
            given = [[torch.randn(size).bfloat16() for _ in range(copies)] for size in ((outputs, inputs), (outputs,))]
            x = torch.randn(rows, inputs).bfloat16()
            with torch.set_grad_enabled(options.training):
                made = [(training if options.training else inference)(x, *one) for one in zip(*given, strict=True)]
                calls = {name: _all(name, made) for name in made[0]}
                found = interleaved(calls, options.rounds, time.perf_counter, LEAST)
            us, count = statistics.median(found["torch"]) * 1e6 / copies, rows * inputs * outputs / 1e6
            print(f"{rows:4} {inputs:5} -> {outputs:5} {count:8.2f} {us:10.1f}   ", end="")
            print(*(spread(found[name], found["ours"]) for name in calls if name != "ours"), sep="   ", flush=True)


if __name__ == "__main__":
    main()
