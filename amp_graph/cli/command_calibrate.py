"""``amp-graph calibrate``: measures this machine's rates and writes the file that the planner reads."""

from __future__ import annotations

import argparse
import contextlib
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer as synchronized

from amp_graph.cli.terminal import Told
from amp_graph.errors import AmpGraphError
from amp_graph.passes.backends.cpu.attention.attention_functions import attention_low
from amp_graph.passes.graph.graph_text import aligned
from amp_graph.passes.native.output_file import write_or_refuse
from amp_graph.passes.precision.machine_rates import (
    DTYPES,
    FAMILIES,
    PRODUCT_CALL,
    SIZES,
    Machine,
    class_of,
    machine_text,
    place_of_own_file,
)

COLUMNS = ("rate", "dtype", "measured", "class")
ROUNDS, SECONDS = 2, 0.08  # rounds of about 25 measurements, and the least time of each
LEAST = 1e-9  # seconds: no rate may be zero
# Half a million elements: larger than a core's private caches. Factors for the GPU: of the sides of matmuls, and of the
# elements of activations. Smaller operations only measure the launch: on an H200, matmuls of 512 rows ran at a
# thirtieth of its rate; its cache holds 16 million elements.
ELEMENTS = 1 << 19
LARGER = {"cuda": (8, 64)}

Probe = tuple[str, str, float, Callable[[], Any]]  # family, dtype, FLOPs or bytes or calls, the call


def run(args: argparse.Namespace) -> Told:
    """Measure, write the file, and tell the rates beside the built-in ones."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise AmpGraphError("calibrate: torch finds no CUDA device\n  legal: cpu\n  fix:   --device cpu")
    path = args.output
    if path is None:
        path = place_of_own_file()
        with contextlib.suppress(OSError):  # writing says so
            path.parent.mkdir(parents=True, exist_ok=True)
    found, known = calibrate(args.device), class_of(args.device)
    write_or_refuse(path, machine_text(found), "calibrate", "--output machine.toml")
    rates = [
        *((name, "", getattr(found, name), getattr(known, name)) for name in ("call", "kept")),
        *((f, dtype, rate, known.rates[f][dtype]) for f in FAMILIES for dtype, rate in found.rates[f].items()),
    ]
    told = [dict(zip(COLUMNS, one, strict=True)) for one in rates]
    rows = [(name, dtype, f"{ours:.2e}", f"{theirs:.2e}") for name, dtype, ours, theirs in rates]
    end = f"written to {path}; plans read {place_of_own_file()}, or what AMP_GRAPH_MACHINE names"
    return Told(
        {"machine": found.description, "file": str(path), "rates": told},
        [*aligned([COLUMNS, *rows]), found.description, end],
    )


# -- the rates of this machine ------------------------------------------------------------------------


def probes(device: str) -> Iterator[Probe]:
    """Yield what is measured; a dtype of "" is that of a figure without one."""
    n, more = LARGER.get(device, (1, 1))
    elements = ELEMENTS * more
    small, large = torch.ones(8, device=device), torch.ones(8 * elements, device=device)
    yield "call", "", 1, lambda: small + small
    yield "kept", "", 2 * large.numel() * large.element_size(), large.clone
    for dtype in DTYPES:
        yield from _probes_in(dtype, device, n, elements)


def _probes_in(dtype: str, device: str, n: int, elements: int) -> Iterator[Probe]:
    size, low = SIZES[dtype], getattr(torch, dtype)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(low)

    rows, width, wide, channels, tokens = (side * n for side in (512, 768, 1024, 32, 128))
    x, weight = new(rows, width), new(width, width)
    yield "matmul", dtype, 2 * rows * width**2, lambda: F.linear(x, weight)
    row, square = new(1, wide), new(wide, wide)
    yield "matvec", dtype, (wide**2 + 2 * wide) * size, lambda: F.linear(row, square)
    image, kernel = new(4 * n, channels, 28, 28), new(channels, channels, 3, 3)
    flops = 2 * 4 * n * channels * 28 * 28 * channels * 9
    yield "convolution", dtype, flops, lambda: F.conv2d(image, kernel, padding=1)
    q, k, v = (new(2 * n, 4, tokens, 64) for _ in range(3))
    # As in converted graphs: our kernel, or torch's where ours declines.
    yield "attention", dtype, 4 * 2 * n * 4 * tokens**2 * 64, lambda: attention_low(q, k, v)
    a, b = new(elements), new(elements)
    yield "elementwise", dtype, 3 * elements * size, lambda: a * b
    yield "activation", dtype, 2 * elements * size, lambda: F.gelu(a)
    # On the CPU with float32 parameters, as in planned graphs; CUDA's kernel needs them in the dtype of its input.
    scale, bias = torch.ones(2, 256, device=device, dtype=None if device == "cpu" else low)
    lines = a.view(-1, 256)
    yield "normalization", dtype, 2 * elements * size, lambda: F.layer_norm(lines, (256,), scale, bias)
    tiny, tiny_weight = new(8, 32), new(32, 32)
    yield PRODUCT_CALL, dtype, 1, lambda: F.linear(tiny, tiny_weight)
    if dtype != "float32":
        full = a.float()
        yield "cast", dtype, 2 * elements * (4 + size), lambda: (full.to(low), a.float())


def calibrate(device: str = "cpu", seconds: float = SECONDS) -> Machine:
    """Return the rates of this machine: of one core of a CPU, or of the GPU. Takes about twenty seconds.

    Each is the best of several rounds, as other load only slows it down; of a CPU, which may be shared with others, CPU
    time counts. ``seconds``: the least time of a measurement.
    """
    threads, clock = torch.get_num_threads(), time.process_time if device == "cpu" else synchronized
    torch.set_num_threads(1)
    rates: dict[str, dict[str, float]] = {}
    try:
        with torch.no_grad():
            for family, dtype, amount, call in (probe for _ in range(ROUNDS) for probe in probes(device)):
                timer = Timer("call()", globals={"call": call}, timer=clock)
                least = min(timer.blocked_autorange(min_run_time=seconds).times)
                of_family = rates.setdefault(family, {})
                of_family[dtype] = max(of_family.get(dtype, 0), amount / least)
    finally:
        torch.set_num_threads(threads)
    where = torch.cuda.get_device_name() if device == "cuda" else f"one core of {platform.machine()}"
    call_rate, kept = rates.pop("call")[""], rates.pop("kept")[""]
    products = {dtype: max(1 / rate - 1 / call_rate, LEAST) for dtype, rate in rates.pop(PRODUCT_CALL).items()}
    said = f"calibrated: {where}, torch {torch.__version__}"
    graph = class_of(device).graph  # overhead of Python and Dynamo: not a rate of the machine
    return Machine("calibrated", device, said, 1 / call_rate, graph, kept, device == "cpu", products, rates)
