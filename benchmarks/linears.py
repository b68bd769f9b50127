"""Linears over few rows: torch's, and compiled C; without gradients oneDNN's on packed weights, too.

    python benchmarks/linears.py [--rounds 9] [--threads 1] [--training]

bf16. Without gradients weights are packed, or lie in panels; ``--training``: forward and backward under autograd, for
weights as they lie. Ratios are medians over interleaved rounds [quartiles]: above 1 C is faster. Wall-clock time.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from interleaved import interleaved, parser_of, spread
from torch import Tensor

from amp_graph.passes.linear_kernel import library, linear_by_panels, panels_of
from amp_graph.passes.linear_low import linear_low
from amp_graph.passes.torch_private import linear_of_packed_weight, pack_linear_weight

ROWS = (1, 4, 16, 32, 64, 256)
WIDTHS = ((64, 64), (256, 256), (512, 256), (768, 768), (768, 3072), (1024, 1024))  # inputs, outputs
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


def main() -> None:
    """Print a row for each size."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--training", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if library() is None:
        raise SystemExit("there is no kernel for this CPU, or no C compiler")
    print("rows   in -> out   million    torch us   faster than torch       faster than oneDNN, packed")
    for rows in ROWS:
        for inputs, outputs in WIDTHS:
            given = [torch.randn(size).bfloat16() for size in ((rows, inputs), (outputs, inputs), (outputs,))]
            with torch.set_grad_enabled(options.training):
                calls = (training if options.training else inference)(*given)
                found = interleaved(calls, options.rounds, time.perf_counter, LEAST)
            us, count = statistics.median(found["torch"]) * 1e6, rows * inputs * outputs / 1e6
            print(f"{rows:4} {inputs:5} -> {outputs:5} {count:8.2f} {us:10.1f}   ", end="")
            print(*(spread(found[name], found["ours"]) for name in calls if name != "ours"), sep="   ", flush=True)


if __name__ == "__main__":
    main()
