"""Linears over few rows, without gradients: torch's, oneDNN's on packed weights, and compiled C on weights in panels.

    python benchmarks/linears.py [--rounds 9] [--threads 1]

bf16. Ratios are medians over interleaved rounds [quartiles]: above 1 the kernel is faster. Wall-clock time.
"""

import statistics
import time

import torch
import torch.nn.functional as F
from interleaved import interleaved, parser_of, spread

from amp_graph.passes.linear_kernel import library, linear_by_panels, panels_of
from amp_graph.passes.torch_private import linear_of_packed_weight, pack_linear_weight

ROWS = (1, 4, 16, 32, 64, 256)
WIDTHS = ((64, 64), (256, 256), (512, 256), (768, 768), (768, 3072), (1024, 1024))  # inputs, outputs
LEAST = 0.01  # seconds a measurement


def main() -> None:
    """Print a row for each size."""
    options = parser_of(__doc__, rounds=9).parse_args()
    torch.set_num_threads(options.threads)
    if library() is None:
        raise SystemExit("there is no kernel for this CPU, or no C compiler")
    print("rows   in -> out   million   oneDNN us   faster than torch       faster than oneDNN, packed")
    for rows in ROWS:
        for inputs, outputs in WIDTHS:
            x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
            bias, panels, packed = torch.randn(outputs).bfloat16(), panels_of(weight), pack_linear_weight(weight)
            calls = {
                "torch": lambda x=x, w=weight, b=bias: F.linear(x, w, b),
                "oneDNN": lambda x=x, w=packed, b=bias: linear_of_packed_weight(x, w, b),
                "ours": lambda x=x, w=panels, b=bias, n=outputs: linear_by_panels(x, w, b, False, n),
            }
            with torch.no_grad():
                found = interleaved(calls, options.rounds, time.perf_counter, LEAST)
            us, count = statistics.median(found["oneDNN"]) * 1e6, rows * inputs * outputs / 1e6
            print(f"{rows:4} {inputs:5} -> {outputs:5} {count:8.2f} {us:10.1f}   ", end="")
            print(spread(found["torch"], found["ours"]), "  ", spread(found["oneDNN"], found["ours"]), flush=True)


if __name__ == "__main__":
    main()
