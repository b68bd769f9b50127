"""The last linear of a language model and its loss, forward and backward in bf16: four ways to compute the loss.

``float``: ``cross_entropy(logits.float(), target)``, what autocast and a plain conversion run. ``low``: the pass
fuse-cross-entropy, the loss from bf16 logits a few rows at a time. ``again``: the same, with logits that are not kept
but multiplied again in backward. ``chunks``: the linear by chunks of tokens too, gradients already in forward, the
weight's summed in fp32. A round runs all in turn; a figure is the time of ``float`` over theirs, above 1 is faster.
``returned``: with the logits as output, as Hugging Face's models have them.

    python benchmarks/cross_entropy.py [--rounds 9] [--threads 1] [--shapes 512x16384x768,...]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.cpu.loss.cross_entropy_functions import cross_entropy_and_logits, cross_entropy_low

LOW = torch.bfloat16
SHAPES = "512x16384x768,512x10240x768,1024x8192x512,256x50257x768,512x8192x768,1024x4096x768,256x16384x768,512x4096x768"
ROWS = 256  # tokens in a chunk


def by_float(h: Tensor, w: Tensor, target: Tensor) -> None:
    """Widen the logits, and keep their log-softmax."""
    F.cross_entropy(F.linear(h, w).float(), target).backward()


def by_low(h: Tensor, w: Tensor, target: Tensor) -> None:
    """Keep the bf16 logits."""
    cross_entropy_low(F.linear(h, w), target).backward()


def returned_by_float(h: Tensor, w: Tensor, target: Tensor) -> None:
    """Widen the logits, and hold them until after backward."""
    wide = F.linear(h, w).float()
    F.cross_entropy(wide, target).backward()


def returned_by_low(h: Tensor, w: Tensor, target: Tensor) -> None:
    """Keep the bf16 logits, and hold wide ones until after backward."""
    loss, _held = cross_entropy_and_logits(F.linear(h, w), target)
    loss.backward()


def by_low_again(h: Tensor, w: Tensor, target: Tensor) -> None:
    """Multiply once for the loss, and once more in backward."""
    with torch.no_grad():
        cross_entropy_low(F.linear(h, w), target)
    by_low(h, w, target)


@torch.no_grad()
def by_chunks(h: Tensor, w: Tensor, target: Tensor) -> None:
    """Multiply, and differentiate, some tokens at a time."""
    h.grad, wide_grad = torch.empty_like(h), torch.zeros(w.shape)
    for start in range(0, len(h), ROWS):
        part, index = h[start : start + ROWS], target[start : start + ROWS, None]
        chances = F.linear(part, w).float().softmax(1)
        chances.scatter_add_(1, index, torch.full(index.shape, -1.0))
        grad = chances.div_(len(h)).to(LOW)
        torch.mm(grad, w, out=h.grad[start : start + ROWS])
        wide_grad.add_(torch.mm(grad.t(), part))
    w.grad = wide_grad.to(LOW)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "float": by_float,
    "low": by_low,
    "again": by_low_again,
    "chunks": by_chunks,
    "float, returned": returned_by_float,
    "low, returned": returned_by_low,
}


def main() -> None:
    """Print one line a shape: milliseconds of ``float``, and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", default=SHAPES, help="tokens x classes x width")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for shape in options.shapes.split(","):
        print(shape, told(*map(int, shape.split("x")), options.rounds), flush=True)


def told(tokens: int, classes: int, width: int, rounds: int) -> str:
    """Run one shape; returns its line."""
    h = torch.randn(tokens, width).to(LOW).requires_grad_()
    w = (torch.randn(classes, width) / width**0.5).to(LOW).requires_grad_()
    target = torch.randint(classes, (tokens,))
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(rounds + 1):
        for name, run in WAYS.items():
            h.grad = w.grad = None
            start = time.process_time()
            run(h, w, target)
            if turn:
                times[name].append(time.process_time() - start)
    found = [f"float {statistics.median(times['float']) * 1e3:.1f} ms"]
    for name in ("low", "again", "chunks", "low, returned"):
        base = times["float, returned" if "returned" in name else "float"]
        low, middle, high = statistics.quantiles([a / b for a, b in zip(base, times[name], strict=True)], n=4)
        found.append(f"{name} {middle:.2f} [{low:.2f}-{high:.2f}]")
    return "; ".join(found)


if __name__ == "__main__":
    main()
