"""Each Triton kernel against the torch operations that it replaces, on a GPU: time, peak of memory, bandwidth.

Forward and backward together, of interleaved rounds; torch's are the operations of a converted graph without the pass,
which are those of autocast. Ratio: torch's time over ours, above 1 ours is faster. Prints a line a size, and with
``--output`` writes them as JSON with the GPU's name and the versions.

    python benchmarks/gpu/kernels.py [--rounds 20] [--output results.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

from amp_graph.passes.backends.cpu.loss.cross_entropy_functions import cross_entropy_low
from amp_graph.passes.backends.cpu.norm.add_norm_functions import add_norm
from amp_graph.passes.backends.cuda.kernels import add_norm as norms
from amp_graph.passes.backends.cuda.kernels import cross_entropy as losses
from amp_graph.passes.backends.cuda.kernels import optimizer_update as updates
from amp_graph.passes.native.triton_loader import VARIABLE, why_failed

LOW = torch.bfloat16
LOSSES = ((256, 32768), (1024, 8192), (2048, 50257), (8192, 50257), (8192, 128256), (32768, 30522))
NORMS = ((2048, 768), (4096, 1024), (8192, 1024), (32768, 768), (8192, 2048), (8192, 4096), (4096, 8192))

UPDATES = ((300, 16384), (290, 1 << 20), (146, 1 << 23))  # how many tensors, and of how many elements
ADAMW = {"weight_decay": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999}


def of_loss(rows: int, classes: int) -> tuple[Callable[[], None], Callable[[], None], int]:
    """Return a step by our kernel, one by torch, and the bytes that a step has to move."""
    x = torch.randn(rows, classes, device="cuda").to(LOW).requires_grad_()
    target = torch.randint(classes, (rows,), device="cuda")

    def ours() -> None:
        x.grad = None
        cross_entropy_low(x, target).backward()

    def torchs() -> None:
        x.grad = None
        F.cross_entropy(x.float(), target).backward()

    return ours, torchs, 6 * rows * classes


def of_norm(rows: int, width: int, centered: bool) -> tuple[Callable[[], None], Callable[[], None], int]:
    """Return the same of a residual sum, its norm and the cast of that for one reader."""
    x = torch.randn(rows, width, device="cuda").requires_grad_()
    branch = torch.randn(rows, width, device="cuda").to(LOW).requires_grad_()
    weight, bias = (torch.randn(width, device="cuda").requires_grad_() for _ in range(2))
    leaves, seeds = (x, branch, weight, bias)[: 3 + centered], (torch.randn_like(x), torch.randn_like(branch))

    def ours() -> None:
        given = (weight, bias if centered else None, 1e-5, LOW, 1, False, True, centered)
        torch.autograd.grad(add_norm(x, branch, (width,), *given), leaves, seeds)

    def torchs() -> None:
        total = x + branch
        normed = F.layer_norm(total, (width,), weight, bias) if centered else F.rms_norm(total, (width,), weight, 1e-5)
        torch.autograd.grad((total, normed.to(LOW)), leaves, seeds)

    return ours, torchs, 32 * rows * width


def of_update(count: int, size: int) -> tuple[Callable[[], None], Callable[[], None], int]:
    """Return the same of AdamW's update behind a loss scale, from bf16 gradients, with the weights' copies."""
    params, *moments = ([torch.randn(size, device="cuda").abs() for _ in range(count)] for _ in range(3))
    grads, lows = ([p.to(LOW) for p in params] for _ in range(2))
    steps, states = [torch.zeros((), device="cuda") for _ in params], [t for kind in moments for t in kind]
    lr, scale = torch.tensor(1e-6, device="cuda"), torch.ones((), device="cuda")

    def ours() -> None:
        found_inf, _ = updates.look(grads)
        own = (params, grads, states, steps, lows, list(range(count)), lr, found_inf, scale, None)
        updates.update(*own, rule="adam decoupled bf16", **ADAMW)

    def torchs() -> None:
        wide, found_inf = [g.float() for g in grads], torch.zeros((), device="cuda")
        torch._amp_foreach_non_finite_check_and_unscale_(wide, found_inf, scale)
        torch._foreach_add_(steps, 1)
        options = {"lr": lr, "amsgrad": False, "maximize": False, "found_inf": found_inf, **ADAMW}
        torch._fused_adamw_(params, wide, *moments, [], steps, **options)
        torch._foreach_copy_(lows, params)

    return ours, torchs, 30 * count * size


def measured(ours: Callable[[], None], torchs: Callable[[], None], moved: int, rounds: int) -> dict[str, float]:
    """Return milliseconds, peaks of memory in MiB above what is held, and our bandwidth."""
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    peaks = {}
    for turn in range(rounds + 3):
        for name, run in (("ours", ours), ("torch", torchs)):
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)  # the host is ahead: what is timed is the device
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            peaks[name] = (torch.cuda.max_memory_allocated() - held) / 2**20
            if turn >= 3:
                times[name].append(start.elapsed_time(end))
    middle = {name: statistics.median(found) for name, found in times.items()}
    return {
        "ours_ms": middle["ours"], "torch_ms": middle["torch"], "ratio": middle["torch"] / middle["ours"],
        "ours_mib": peaks["ours"], "torch_mib": peaks["torch"], "ours_tb_s": moved / middle["ours"] / 1e9,
    }  # fmt: skip


def main() -> None:
    """Print a line a kernel and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ.setdefault(VARIABLE, "1")
    losses.kernels(LOW), norms.kernels(LOW), updates.kernels(LOW)  # raises where they do not run
    told = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(*told.values())
    cases = [("cross entropy", size, lambda s: of_loss(*s)) for size in LOSSES]
    cases += [("layer norm", size, lambda s: of_norm(*s, True)) for size in NORMS]
    cases += [("rms norm", size, lambda s: of_norm(*s, False)) for size in NORMS]
    cases += [("AdamW's update", size, lambda s: of_update(*s)) for size in UPDATES]
    lines = []
    for name, size, make in cases:
        found = measured(*make(size), options.rounds)
        lines.append({"kernel": name, "rows": size[0], "width": size[1], **found})
        print(f"{name} {size[0]} x {size[1]}:", ", ".join(f"{k} {v:.3g}" for k, v in found.items()), flush=True)
        if options.output:
            options.output.write_text(json.dumps({**told, "lines": lines}, indent=1) + "\n")
        torch.cuda.empty_cache()
    assert not why_failed(), why_failed()


if __name__ == "__main__":
    main()
