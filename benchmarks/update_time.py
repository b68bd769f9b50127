"""The update of weights held in two precisions: in one pass of compiled C, by torch's kernels, and by parts of them.

Before: gradients in bf16, as backward makes them. After: fp32 weights and moments updated, bf16 copies written.
25 million parameters in 24 tensors, AdamW; variants in turn in one process. A round gives one ratio to torch's kernels
as ``TrainStep(update="torch")`` runs them; medians and quartiles over rounds. ``--models``: whole training steps of
``TrainStep``, and of autocast, ratios to ``update="torch"``. What compiling takes, once a machine, is said first.

    python benchmarks/update_time.py [--rounds 30] [--threads 1] [--cpu-time] [--models gpt,bert_sdpa] [--scale 0.5]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from unittest import mock

import torch
from interleaved import interleaved, quartiles
from models import case
from variants import WithLoss

import amp_graph
from amp_graph.optim.native_update_ops import OPS, library
from amp_graph.passes.native.jit_compiler import FOLDER

SHAPES = [(1024, 1024)] * 23 + [(1024, 512)]
RULE = "adam decoupled bf16"
OPTIONS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
BLOCK = 1 << 18


class Weights:
    """Weights, moments, copies and gradients that are always the same."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.full = [torch.randn(shape) for shape in SHAPES]
        self.low = [p.bfloat16() for p in self.full]
        self.grads = [torch.randn(shape).bfloat16() for shape in SHAPES]
        self.moments = [[torch.zeros(shape) for shape in SHAPES] for _ in range(2)]
        self.steps = [torch.zeros(()) for _ in SHAPES]
        self.lr, self.inverse = torch.tensor(1e-4, dtype=torch.float64), torch.tensor(0.5)

    def fused(self, grads: list[torch.Tensor], found_inf: torch.Tensor | None = None) -> None:
        """Run torch's kernel on fp32 gradients."""
        torch._foreach_add_(self.steps, 1)
        options = {**OPTIONS, "amsgrad": False, "maximize": False, "found_inf": found_inf}
        torch._fused_adamw_(self.full, grads, *self.moments, [], self.steps, lr=self.lr, **options)

    def one_pass(self, found_inf: torch.Tensor | None = None, inverse: torch.Tensor | None = None) -> None:
        """Run ours on bf16 gradients."""
        flat, numbers = [*self.moments[0], *self.moments[1]], list(range(len(SHAPES)))
        given = (self.full, self.grads, flat, self.steps, self.low, numbers, self.lr, found_inf, inverse, None)
        OPS.one_pass_update_(*given, rule=RULE, **OPTIONS)


def by_torch() -> Callable[[], None]:
    """Return the operations of a ``TrainStep`` that updates by torch's kernels."""
    w = Weights()

    def run() -> None:
        w.fused([g.float() for g in w.grads])
        torch._foreach_copy_(w.low, w.full)

    return run


def by_torch_scaled() -> Callable[[], None]:
    """Return the same with a loss scale."""
    w = Weights()

    def run() -> None:
        wide, found_inf = [g.float() for g in w.grads], torch.zeros(())
        OPS.check_finite_and_unscale_(wide, w.inverse, found_inf)
        w.fused(wide, found_inf)
        torch._foreach_copy_(w.low, w.full)

    return run


def preallocated() -> Callable[[], None]:
    """Return the same into gradients that are there already: no memory is mapped anew."""
    w = Weights()
    wide = [g.float() for g in w.grads]

    def run() -> None:
        torch._foreach_copy_(wide, w.grads)
        w.fused(wide)
        torch._foreach_copy_(w.low, w.full)

    return run


def in_blocks() -> Callable[[], None]:
    """Return torch's operations on a block at a time, which stays in the caches."""
    w = Weights()
    wide = torch.empty(BLOCK)
    tensors = (w.full, w.grads, *w.moments, w.low)
    blocks = list(zip(*([b for t in kind for b in t.view(-1).split(BLOCK)] for kind in tensors), strict=True))
    options = {**OPTIONS, "amsgrad": False, "maximize": False}

    def run() -> None:
        torch._foreach_add_(w.steps, 1)
        for p, g, first, second, low in blocks:
            grad = wide[: g.numel()].copy_(g)
            torch._fused_adamw_([p], [grad], [first], [second], [], w.steps[:1], lr=w.lr, **options)
            low.copy_(p)

    return run


def kernel_alone() -> Callable[[], None]:
    """Return torch's kernel on fp32 gradients, without copies: what a loop in fp32 runs."""
    w = Weights()
    wide = [g.float() for g in w.grads]
    return lambda: w.fused(wide)


def in_one_pass() -> Callable[[], None]:
    """Return the update in one pass."""
    return Weights().one_pass


def in_one_pass_scaled() -> Callable[[], None]:
    """Return the same with a loss scale: gradients are read once more, before."""
    w = Weights()
    return lambda: w.one_pass(OPS.look_at_gradients(w.grads, RULE)[0], w.inverse)


UPDATES = {
    "torch: cast, update, cast": by_torch,
    "with a loss scale": by_torch_scaled,
    "torch, gradients preallocated": preallocated,
    "torch, in blocks": in_blocks,
    "torch, the kernel alone": kernel_alone,
    "one pass": in_one_pass,
    "one pass, with a loss scale": in_one_pass_scaled,
}


def training(name: str, scale: float, update: str) -> Callable[[], object]:
    """Return whole steps of a model: of ``TrainStep``, or under autocast with fused AdamW."""
    made = case(name, scale)
    module = WithLoss(made)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    if update != "autocast":
        step = amp_graph.TrainStep(module, None, optimizer, "bf16", update=update)
        return lambda: step(*made.batch)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = made.loss(made.model, *made.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def seconds_to_compile() -> float:
    """Return what the first process of a machine takes; others load what it made."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", {FOLDER: folder}):
        start = time.perf_counter()
        library.__wrapped__(RULE)
        return time.perf_counter() - start


def table(seconds: dict[str, list[float]], baseline: str) -> None:
    """Print medians, and ratios of rounds to the baseline."""
    print("| variant | ms | time / first |\n|---|---:|---|")
    for name, times in seconds.items():
        low, middle, high = quartiles(times, seconds[baseline])
        print(f"| {name} | {statistics.median(times) * 1e3:.1f} | {middle:.2f} [{low:.2f} - {high:.2f}] |", flush=True)


def main() -> None:
    """Run the variants in turn and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="count process CPU time, steadier on shared cores")
    parser.add_argument("--models", default="", help="whole steps of these models of models.py")
    parser.add_argument("--scale", type=float, default=0.5, help="of the models' batches and depths")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    print(f"{options.threads} threads, torch {torch.__version__}, {options.rounds} rounds")
    print(f"compiling took {seconds_to_compile():.2f} s\n")
    if not options.models:
        table(interleaved({name: make() for name, make in UPDATES.items()}, options.rounds, clock), next(iter(UPDATES)))
    for name in filter(None, options.models.split(",")):
        steps = {f"{name}, {u}": training(name, options.scale, u) for u in ("torch", "one_pass", "autocast")}
        table(interleaved(steps, options.rounds, clock, least=0.05), f"{name}, torch")


if __name__ == "__main__":
    main()
