"""A batch norm that trains and the relu behind it as one operation of compiled C, against torch's two.

By images, channels and their side: forward and backward with the gradients of input and parameters. Ratios of process
CPU times of interleaved rounds, ours to torch's: below 1 ours is faster [quartiles].

    python benchmarks/batch_norm.py [--rounds 31] [--threads 1]
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from interleaved import interleaved, parser_of, spread
from torch import Tensor

from amp_graph.passes.backends.cpu.norm.batch_norm_functions import norm_and_relu

# Of a U-Net at 128 x 128, and of ResNet-50 at 112 x 112.
SIZES = ((2, 32, 128), (2, 64, 64), (2, 128, 32), (8, 64, 56), (8, 64, 28), (8, 128, 14), (8, 256, 7), (8, 512, 4))
LAST = torch.channels_last


def torchs(x: Tensor, *given: Tensor) -> Tensor:
    """Return norm and relu by torch's operations, in place as models write it."""
    mean, var, weight, bias = given
    return F.relu_(F.batch_norm(x, mean, var, weight, bias, True))


def piece(function: Callable, images: int, channels: int, side: int) -> Callable[[], object]:
    """Return a call of ``function`` that makes its result and all gradients."""
    torch.manual_seed(0)
    shape = (images, channels, side, side)
    x, grad = (torch.randn(shape).bfloat16().contiguous(memory_format=LAST) for _ in range(2))
    weight, bias = torch.rand(channels).requires_grad_(), torch.randn(channels).requires_grad_()
    running = torch.zeros(channels), torch.ones(channels)
    leaf = x.requires_grad_()
    return lambda: torch.autograd.grad(function(leaf, *running, weight, bias), (leaf, weight, bias), grad)


def main() -> None:
    """Print a line for each size."""
    options = parser_of(__doc__, rounds=31).parse_args()
    torch.set_num_threads(options.threads)
    for size in SIZES:
        calls = {"ours": piece(norm_and_relu, *size), "torchs": piece(torchs, *size)}
        seconds = interleaved(calls, options.rounds, time.process_time, least=2e-3)
        elements = size[0] * size[1] * size[2] * size[2]
        print(f"{size} = {elements}: {spread(seconds['ours'], seconds['torchs'])}", flush=True)


if __name__ == "__main__":
    main()
