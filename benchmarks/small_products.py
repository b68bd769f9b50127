"""Small products of bf16 matrices: torch's call of oneDNN against the kernel that compiled graphs get.

    python benchmarks/small_products.py [--rounds 9] [--threads 1]

A linear, the gradient of its input and that of its weight, for a few widths and batches; ratios are medians over
interleaved rounds: above 1 the kernel is faster. Process CPU time.
"""

import statistics
import time

import torch
from interleaved import interleaved, parser_of, spread
from torch import Tensor

from amp_graph.passes.backends.inductor.small_gemm_template import NUMBERS, POINTERS, source_of

BATCHES, WIDTHS = (1, 8, 32, 128, 512), ((64, 64), (256, 256), (512, 256), (1024, 1024))
LEAST = 0.02  # seconds a measurement


def compiled() -> object:
    """Return the kernel as Inductor binds it."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache.load_pybinding([*POINTERS, *NUMBERS], source_of("kernel"))


def products(batch: int, inside: int, outside: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the operands of the three products of a linear layer, laid out as they are in a step."""
    x, w, grad = (torch.randn(shape).bfloat16() for shape in ((batch, inside), (outside, inside), (batch, outside)))
    return {"result": (x, w.t()), "input": (grad, w), "weight": (grad.t(), x)}


def main() -> None:
    """Print a row for each product."""
    options = parser_of(__doc__, rounds=9).parse_args()
    torch.set_num_threads(options.threads)
    kernel = compiled()
    print("batch   in -> out   product   million    oneDNN us   kernel faster by")
    for batch in BATCHES:
        for inside, outside in WIDTHS:
            for name, (a, b) in products(batch, inside, outside).items():
                out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
                numbers = (0, 0, *out.shape, a.shape[1], *a.stride(), *b.stride(), 0, 0, 0)
                calls = {
                    "torch": lambda a=a, b=b, out=out: torch.mm(a, b, out=out),
                    "ours": lambda a=a, b=b, out=out, numbers=numbers: kernel(a, b, a, out, *numbers),
                }
                found = interleaved(calls, options.rounds, time.process_time, LEAST)
                us = statistics.median(found["torch"]) * 1e6
                count = batch * inside * outside / 1e6
                print(f"{batch:5} {inside:5} -> {outside:5} {name:>8} {count:8.2f} {us:10.1f}   ", end="")
                print(spread(found["torch"], found["ours"]), flush=True)


if __name__ == "__main__":
    main()
