"""Measures the rates of this machine, which the planner uses to predict time.

Before: the rates of a class of machines. After: ``calibrate("cpu")``, a ``Machine`` with the rates of this one.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer as synchronized

from amp_graph.passes.backends.cpu.attention.attention_functions import attention_low
from amp_graph.passes.precision.machine_rates import DTYPES, PRODUCT_CALL, Machine, class_of
from amp_graph.passes.precision.op_cost import SIZES

ROUNDS, SECONDS = 2, 0.08  # rounds of about 25 measurements, and the least time of each
ELEMENTS = 1 << 19  # half a million elements: larger than a core's private caches
# Factors for the GPU: of matmul sides, and the elements of activations. Smaller operations only measure the launch:
# on an H200, matmuls of 512 rows ran at a thirtieth of its rate; its cache holds 16 million elements.
LONGER, ELEMENTS_ON = {"cuda": 8}, {"cuda": 64 * ELEMENTS}
LEAST = 1e-9  # seconds: no rate may be zero


@dataclass(frozen=True)
class Probe:
    """One operation to measure: its family, its FLOPs and elements per call, and its operands for a dtype."""

    family: str
    flops: int
    elements: int
    call: Callable[..., Any]
    operands: Callable[[Callable[..., torch.Tensor]], tuple[torch.Tensor, ...]]


def elements_on(device: str) -> int:
    """Return the number of elements of measured activations on ``device``."""
    return ELEMENTS_ON.get(device, ELEMENTS)


def probes(device: str) -> Iterator[Probe]:
    """Yield the operations that are measured in each dtype."""
    n, elements = LONGER.get(device, 1), elements_on(device)
    rows, width, wide, channels, tokens = (size * n for size in (512, 768, 1024, 32, 128))
    yield Probe("matmul", 2 * rows * width**2, 0, F.linear, lambda new: (new(rows, width), new(width, width)))
    yield Probe("matvec", 0, wide**2 + 2 * wide, F.linear, lambda new: (new(1, wide), new(wide, wide)))
    yield Probe(
        "convolution",
        2 * 4 * n * channels * 28 * 28 * channels * 9,
        0,
        lambda x, w: F.conv2d(x, w, padding=1),
        lambda new: (new(4 * n, channels, 28, 28), new(channels, channels, 3, 3)),
    )
    yield Probe(
        "attention",
        4 * 2 * n * 4 * tokens**2 * 64,
        0,
        attention_low,  # as in converted graphs: our kernel, or torch's where ours declines
        lambda new: tuple(new(2 * n, 4, tokens, 64) for _ in range(3)),
    )
    yield Probe("elementwise", 0, 3 * elements, torch.mul, lambda new: (new(elements), new(elements)))
    yield Probe("activation", 0, 2 * elements, F.gelu, lambda new: (new(elements),))


def calibrate(device: str = "cpu", seconds: float = SECONDS) -> Machine:
    """Return the rates of this machine: of one core of a CPU, or of the GPU. Takes about twenty seconds.

    Each is the best of several rounds, as other load only slows it down. ``seconds``: the least time of a measurement.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            rounds = [_measured(device, seconds) for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    where = torch.cuda.get_device_name() if device == "cuda" else f"one core of {platform.machine()}"
    rates: dict[str, dict[str, float]] = {}
    for family, dtype in rounds[0]:
        if dtype:
            rates.setdefault(family, {})[dtype] = max(found[family, dtype] for found in rounds)
    call, kept = (max(found[name, ""] for found in rounds) for name in ("call", "kept"))
    products = {dtype: max(1 / rate - 1 / call, LEAST) for dtype, rate in rates.pop(PRODUCT_CALL).items()}
    said = f"calibrated: {where}, torch {torch.__version__}"
    graph = class_of(device).graph  # overhead of Python and Dynamo: not a rate of the machine
    return Machine("calibrated", device, said, 1 / call, graph, kept, device == "cpu", products, rates)


def _measured(device: str, seconds: float) -> dict[tuple[str, str], float]:
    """Measure every rate once, by family and dtype; entries without a dtype are calls and kept bytes per second."""
    found = {}
    elements = elements_on(device)
    for probe in probes(device):
        for dtype in DTYPES:
            found[probe.family, dtype] = _rate(probe, dtype, device, seconds)
    for dtype in DTYPES:
        found["normalization", dtype] = _normalization(dtype, device, seconds)
        found[PRODUCT_CALL, dtype] = _product_calls(dtype, device, seconds)
    for dtype in DTYPES[1:]:
        found["cast", dtype] = _cast(dtype, device, seconds)
    small, large = torch.ones(8, device=device), torch.ones(8 * elements, device=device)
    found["call", ""] = 1 / _best(lambda: small + small, device, seconds)
    found["kept", ""] = 2 * large.numel() * large.element_size() / _best(large.clone, device, seconds)
    return found


def _new(dtype: str, device: str) -> Callable[..., torch.Tensor]:
    return lambda *shape: torch.randn(*shape, device=device).to(getattr(torch, dtype))


def _rate(probe: Probe, dtype: str, device: str, seconds: float) -> float:
    operands = probe.operands(_new(dtype, device))
    return (probe.flops or probe.elements * SIZES[dtype]) / _best(lambda: probe.call(*operands), device, seconds)


def _normalization(dtype: str, device: str, seconds: float) -> float:
    """Return the rate of layer norms; on the CPU with float32 parameters, as in planned graphs.

    CUDA's kernel needs parameters in the dtype of its input.
    """
    elements = elements_on(device)
    x, weight, bias = _new(dtype, device)(elements // 256, 256), *torch.ones(2, 256, device=device)
    if device != "cpu":
        weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    taken = _best(lambda: F.layer_norm(x, (256,), weight, bias), device, seconds)
    return 2 * elements * SIZES[dtype] / taken


def _product_calls(dtype: str, device: str, seconds: float) -> float:
    """Return how many tiny matmuls run per second."""
    x, weight = _new(dtype, device)(8, 32), _new(dtype, device)(32, 32)
    return 1 / _best(lambda: F.linear(x, weight), device, seconds)


def _cast(dtype: str, device: str, seconds: float) -> float:
    """Return the rate of casts, the mean of downcasts and upcasts."""
    elements = elements_on(device)
    wide, low = _new("float32", device)(elements), _new(dtype, device)(elements)
    taken = _best(lambda: (wide.to(low.dtype), low.float()), device, seconds)
    return 2 * elements * (4 + SIZES[dtype]) / taken


def _best(call: Callable[[], Any], device: str, seconds: float) -> float:
    """Return the least time of a call: CPU time on a CPU, which may be shared with others."""
    timer = Timer("call()", globals={"call": call}, timer=time.process_time if device == "cpu" else synchronized)
    return float(min(timer.blocked_autorange(min_run_time=seconds).times))
