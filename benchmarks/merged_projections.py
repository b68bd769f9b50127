"""Three linears that share their input, as queries, keys and values do, against one of three times the width.

Forward and backward in bf16 from fp32 parameters, as a converted model has them: each weight is cast at every step.
``merged`` concatenates the weights as it casts them, and splits their gradients; a round runs both in turn. Above 1
merging is faster. It is a pass that amp_graph does not have, because of what this prints.

    python benchmarks/merged_projections.py [--rounds 20] [--threads 1]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.casts.share_casts import shared_cast

LOW = torch.bfloat16
SHAPES = ((1024, 768), (512, 768), (1576, 384), (256, 256), (128, 768))


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        rows = [len(w) for w in weights]
        merged = torch.empty(sum(rows), weights[0].shape[1], dtype=LOW)
        for part, weight in zip(merged.split(rows), weights, strict=True):
            part.copy_(weight)
        low = x.to(LOW)
        ctx.save_for_backward(low, merged)
        ctx.rows = rows
        return F.linear(low, merged).split(rows, -1)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, ...]:
        low, merged = ctx.saved_tensors
        grad = torch.cat(grads, -1).flatten(0, -2)
        dweight = (grad.t() @ low.flatten(0, -2)).float()
        return (grad @ merged).float().view_as(low), *dweight.split(ctx.rows)


def separate(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Three linears of one shared cast: what converted graphs run."""
    parts = shared_cast(x, LOW, len(weights), False)
    return tuple(F.linear(part, w.to(LOW)) for part, w in zip(parts, weights, strict=True))


def seconds(run: Callable, x: Tensor, weights: list[Tensor], grads: list[Tensor]) -> float:
    """Time one forward and backward, in process CPU time."""
    for leaf in (x, *weights):
        leaf.grad = None
    start = time.process_time()
    torch.autograd.backward(run(x, *weights), grads)
    return time.process_time() - start


def main() -> None:
    """Print one line a shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for tokens, width in SHAPES:
        x = torch.randn(4, tokens // 4, width).requires_grad_()
        weights = [(torch.randn(width, width) / 30).requires_grad_() for _ in range(3)]
        grads = [torch.randn(4, tokens // 4, width).to(LOW) for _ in range(3)]
        ratios = [
            seconds(separate, x, weights, grads) / seconds(_Merged.apply, x, weights, grads)
            for _ in range(options.rounds + 2)
        ][2:]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{tokens} tokens x {width}: {middle:.2f} [{low:.2f} - {high:.2f}]", flush=True)


if __name__ == "__main__":
    main()
