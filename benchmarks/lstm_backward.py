"""An LSTM layer that trains, and a product with its bias: oneDNN's and torch's calls against ours.

bf16, forward and backward of one layer, by its sizes: with backward by large products, and by compiled C as a whole;
and ``addmm(b, x, w.t())`` against one call that adds the bias. A round runs all in turn, in process CPU time (with
several threads, which wait for each other, in wall-clock time); medians [quartiles] of the ratios: above 1 ours is
faster. Where they pay, ``passes/native/gemm_thresholds.py`` says.

    python benchmarks/lstm_backward.py [--rounds 15] [--threads 1]
"""

import argparse
import time
from collections.abc import Callable

import torch
from interleaved import interleaved, quartiles
from torch import Tensor

from amp_graph.passes.backends.recurrent import lstm_kernel
from amp_graph.passes.backends.recurrent.layer_kernels import differentiable
from amp_graph.passes.backends.recurrent.lstm_functions import kernels_of
from amp_graph.passes.torch_compat.devices import linear_pointwise

LOW = torch.bfloat16
# Length, batch, size.
LAYERS = (
    (64, 4, 64), (64, 32, 128), (35, 20, 256), (64, 8, 512), (64, 16, 512), (64, 32, 512), (64, 64, 512),
    (64, 128, 512), (30, 32, 1024),
)  # fmt: skip
PRODUCTS = ((32, 256, 256), (512, 768, 3072), (788, 384, 1536), (1024, 512, 256))  # rows, inputs, outputs


def layer(length: int, batch: int, size: int) -> tuple[list[Tensor], Tensor]:
    """Return what an LSTM layer reads, and a gradient of its output."""
    shapes = ((length, batch, size), (4 * size, size), (4 * size, size), (4 * size,), (4 * size,))
    given = [torch.randn(s).div(size**0.5).to(LOW).requires_grad_() for s in shapes]
    states = [torch.zeros(batch, size, dtype=LOW, requires_grad=True) for _ in range(2)]
    return given + states, torch.randn(length, batch, size).to(LOW)


def training(given: list[Tensor], grad: Tensor, *, compiled: bool) -> Callable[[], object]:
    """Return what runs one layer forward and back, by compiled C or by oneDNN."""
    kernels = kernels_of(given[5].shape[-1], False, True, False, compiled=compiled)
    return lambda: torch.autograd.grad(differentiable(kernels, *given)[0], given, grad)


def products(rows: int, inputs: int, outputs: int) -> dict[str, Callable[[], object]]:
    """Return a product with its bias in both ways."""
    x, w, b = (torch.randn(s).to(LOW) for s in ((rows, inputs), (outputs, inputs), (outputs,)))
    turned = w.t()
    return {
        "theirs": lambda: torch.addmm(b, x, turned),
        "ours": lambda: linear_pointwise(x, w, b, "none", [], ""),
    }


def main() -> None:
    """Print one line a shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for sizes in LAYERS:
        given, grad = layer(*sizes)
        calls = {"theirs": training(given, grad, compiled=False)}
        if lstm_kernel.library() is not None:
            calls["compiled"] = training(given, grad, compiled=True)
        _print(f"LSTM of {sizes[0]} steps, {sizes[1]} states of {sizes[2]}", calls, options)
    for sizes in PRODUCTS:
        with torch.no_grad():
            _print("product with bias, {} x {} x {}".format(*sizes), products(*sizes), options)


def _print(what: str, calls: dict[str, Callable[[], object]], options: argparse.Namespace) -> None:
    clock = time.process_time if options.threads == 1 else time.perf_counter
    seconds = interleaved(calls, options.rounds, clock, 0.02)
    told = []
    for name in list(calls)[1:]:
        low, middle, high = quartiles(seconds["theirs"], seconds[name])
        told.append(f"{name} {middle:.2f} [{low:.2f}-{high:.2f}]")
    print(f"{what}: {', '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
