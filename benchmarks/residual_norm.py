"""A residual sum, its layer norm and the casts of both in one pass of compiled C, against torch's operations.

First the pieces alone, by rows and width: sum, norm and cast for one and for three readers, with gradients of all
parameters, and without gradients; then the same of a stream that is low itself, which has no casts. Then whole models
with and without the pass. Ratios of process CPU times of interleaved rounds, ours to torch's: below 1 ours is faster
[quartiles].

    python benchmarks/residual_norm.py [--models vit,gpt,bert_sdpa] [--scale 0.5] [--rounds 31] [--skip-pieces]
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from interleaved import interleaved, spread
from passes_in_models import compare
from torch import Tensor

from amp_graph.passes.backends.cpu.norm.add_norm_functions import add_norm
from amp_graph.passes.casts.low_layer_norm import layer_norm_low
from amp_graph.passes.casts.shared_cast import shared_cast

LOW, WITHOUT = torch.bfloat16, ",skip=fuse_add_norm"
KINDS = (
    (1, True, torch.float32),
    (3, True, torch.float32),
    (1, False, torch.float32),
    (1, True, LOW),
    (1, False, LOW),
)
SIZES = ((16, 64), (128, 128), (128, 256), (256, 256), (256, 384), (512, 256), (788, 384), (1024, 768), (4096, 768))


def ours(readers: int, *given: Tensor) -> tuple[Tensor, ...]:
    """Return sum and norm of x, branch, weight and bias by the kernel."""
    x, branch, weight, bias = given
    return add_norm(x, branch, weight.shape, weight, bias, 1e-5, LOW, readers, False, True)


def torchs(readers: int, *given: Tensor) -> tuple[Tensor, ...]:
    """Return the same by torch's operations, as converted graphs without the pass call them."""
    x, branch, weight, bias = given
    total = x + branch
    if total.dtype == LOW:
        return total, layer_norm_low(total, weight.shape, weight, bias, 1e-5)
    normed = F.layer_norm(total, weight.shape, weight, bias, 1e-5)
    return total, *((normed.bfloat16(),) if readers == 1 else shared_cast(normed, LOW, readers, False))


def piece(
    function: Callable, readers: int, rows: int, width: int, train: bool, stream: torch.dtype
) -> Callable[[], object]:
    """Return a call of ``function`` that makes results, and gradients with ``train``."""
    torch.manual_seed(0)
    weights = [torch.randn(width), torch.randn(width)]
    given = [torch.randn(rows, width).to(stream), torch.randn(rows, width).to(LOW), *weights]
    given = [t.requires_grad_(train) for t in given]
    grads = [torch.randn(rows, width).to(stream), *(torch.randn(rows, width).to(LOW) for _ in range(readers))]

    def call() -> object:
        made = function(readers, *given)
        return torch.autograd.grad(made, given, grads) if train else made

    return call


def pieces(rounds: int) -> None:
    """Print a line for each size."""
    for rows, width in SIZES:
        told = []
        for readers, train, stream in KINDS:
            calls = {f.__name__: piece(f, readers, rows, width, train, stream) for f in (ours, torchs)}
            with torch.set_grad_enabled(train):
                seconds = interleaved(calls, rounds, time.process_time, least=2e-3)
            kind = "low, " * (stream is LOW) + (f"{readers} readers" if train else "without gradients")
            told.append(f"{kind} {spread(seconds['ours'], seconds['torchs'])}")
        print(f"{rows} x {width} = {rows * width}: {'; '.join(told)}", flush=True)


if __name__ == "__main__":
    compare(__doc__, 31, "vit,gpt,bert_sdpa", WITHOUT, pieces)
