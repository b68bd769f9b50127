"""fp8 for the three matmuls of a linear that trains: the error against fp64 beside bf16's, and the time on a GPU.

Before: ``y = x @ w.T``, ``dx = dy @ w``, ``dw = dy.T @ x`` in bf16. After: the same with operands rounded to fp8, one
scale a tensor ("tensorwise") or one a row and a column ("rowwise"), by ``torch._scaled_mm``. Values and weights are
e4m3, gradients e5m2, as in Micikevicius et al. 2022, "FP8 Formats for Deep Learning". Sums are fp32, results bf16.
Where the device has no kernel for a pair of formats, the table says so. The time includes finding the scales and
rounding: nothing is cached. ``--sizes rows x outputs x inputs`` are those of Llama-1B by default, with few rows on a
CPU.

    python benchmarks/fp8_products.py [--sizes 256x2048x2048,...] [--rounds 9] [--device cpu]
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from interleaved import interleaved, quartiles
from result_file import machine
from tables import about
from torch import Tensor

from amp_graph.passes.native.output_file import write_atomically

LOW, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
SIZES = {"cpu": "128x2048x2048,128x8192x2048,128x2048x8192", "cuda": "8192x2048x2048,8192x8192x2048,8192x2048x8192"}
RESULTS = Path(__file__).parent / "results" / "fp8_products"


def rounded(x: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """Return ``x`` in fp8 and the scale that it is multiplied by: one number, or one a row."""
    largest = torch.finfo(dtype).max
    amax = x.abs().amax(1, keepdim=True) if by_row else x.abs().amax()
    scale = (amax.float() / largest).clamp_min(1e-12)
    return (x / scale).clamp(-largest, largest).to(dtype), scale


def scaled(a: Tensor, b: Tensor, kinds: tuple[torch.dtype, torch.dtype], by_row: bool) -> Tensor:
    """Return ``a @ b.T`` with operands in fp8: [rows, depth] and [columns, depth]."""
    left, of_left = rounded(a, kinds[0], by_row)
    right, of_right = rounded(b, kinds[1], by_row)
    of_right = of_right.t().contiguous() if by_row else of_right
    return torch._scaled_mm(left, right.t(), scale_a=of_left, scale_b=of_right, out_dtype=LOW)


def products(rows: int, outputs: int, inputs: int, device: str) -> dict[str, tuple[Tensor, Tensor, tuple]]:
    """Return the operands of the three matmuls of one linear, as ``a @ b.T``, with their formats."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    x, w, dy = drawn(rows, inputs), drawn(outputs, inputs) / inputs**0.5, drawn(rows, outputs) * 1e-3
    # A few channels of activations are much larger than the others, as in trained transformers.
    x[:, :: max(1, inputs // 8)] *= 20
    x, w, dy = (t.to(LOW) for t in (x, w, dy))
    return {
        "y = x w'": (x, w, (E4M3, E4M3)),
        "dx = dy w": (dy, w.t().contiguous(), (E5M2, E4M3)),
        "dw = dy' x": (dy.t().contiguous(), x.t().contiguous(), (E5M2, E4M3)),
    }


def measured(size: str, options: argparse.Namespace) -> list[dict]:
    """Measure the three matmuls of one size."""
    found = []
    for name, (a, b, kinds) in products(*map(int, size.split("x")), options.device).items():
        exact = a.double() @ b.double().t()
        ways: dict[str, Callable[[], Tensor]] = {
            "bf16": lambda a=a, b=b: a @ b.t(),
            "tensorwise": lambda a=a, b=b, kinds=kinds: scaled(a, b, kinds, False),
            "rowwise": lambda a=a, b=b, kinds=kinds: scaled(a, b, kinds, True),
        }
        row = {"size": size, "product": name, "error": {}, "time": {}}
        for way, run in list(ways.items()):
            try:
                row["error"][way] = float((run().double() - exact).norm() / exact.norm())
            except RuntimeError as error:
                row["error"][way] = str(error).splitlines()[0]
                del ways[way]
        if options.device == "cuda":
            seconds = interleaved({way: _waited(run) for way, run in ways.items()}, options.rounds, time.perf_counter)
            row["time"] = {way: quartiles(seconds["bf16"], seconds[way]) for way in ways if way != "bf16"}
        found.append(row)
    return found


def _waited(run: Callable[[], Tensor]) -> Callable[[], None]:
    def call() -> None:
        for _ in range(10):
            run()
        torch.cuda.synchronize()

    return call


def markdown(held: dict) -> str:
    """Return the table."""
    lines = [
        "# fp8 products of a linear that trains", "", about(held["machine"]), "",
        "Relative error against fp64 of the bf16 operands (Frobenius norm). A size is rows x outputs x inputs; eight "
        "channels of `x` are 20 times larger than the others. Time: bf16's over that of fp8, scales and rounding "
        "included, above 1 is faster; measured on a GPU only.", "",
        "| size | product | bf16 | tensorwise | rowwise | time, tensorwise | time, rowwise |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in held["rows"]:
        errors = [_error(row["error"][way]) for way in ("bf16", "tensorwise", "rowwise")]
        times = [f"{row['time'][way][1]:.2f}" if way in row["time"] else "" for way in ("tensorwise", "rowwise")]
        lines.append(f"| {row['size']} | {row['product']} | {' | '.join([*errors, *times])} |")
    return "\n".join(lines) + "\n"


def _error(found: float | str) -> str:
    return found if isinstance(found, str) else f"{found:.4f}"


def main() -> None:
    """Measure all sizes and write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--sizes", default="")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS, help="path without suffix")
    options = parser.parse_args()
    sizes = (options.sizes or SIZES[options.device]).split(",")
    held = {"machine": machine(options.device), "rows": [row for size in sizes for row in measured(size, options)]}
    write_atomically(options.output.with_suffix(".json"), json.dumps(held, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(markdown(held))
    print(markdown(held))


if __name__ == "__main__":
    main()
