"""What counted operations take on a machine, predicted from its rates for FLOPs, bytes and calls.

Before: 24 calls of ``aten.addmm`` in float32, 1.2e9 FLOP and 9 MB. After: 7.1 ms, and 2.4 ms in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from amp_graph.audit.records import CONVERSION, LOW, Call, Totals, name_of
from amp_graph.passes.graph.node_info import is_view
from amp_graph.passes.precision.machine_rates import (
    ACTIVATIONS,
    BY_LIBRARY,
    COUNTED,
    DTYPES,
    PRODUCTS,
    SIZES,
    Machine,
)
from amp_graph.passes.torch_compat.dispatch import OpOverload

LEAST_SHARE = 0.02  # of a step's predicted time or bytes: times of equal steps differ by more than what is below it
GROUPED = "_grouped_mm"  # of a mixture of experts
CONVOLUTIONS = ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution")
ATTENTIONS = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")


def family_of(operator: str) -> str:
    """Return which rate of a machine applies to an operator of ATen; "" if it moves nothing, as a view."""
    if product := _product_family(operator):
        return product
    if operator == CONVERSION:
        return "cast"
    if is_view_by_name(operator):
        return ""
    return "activation" if name_of(operator).removesuffix("_backward") in ACTIVATIONS else "elementwise"


def is_product(call: Call) -> bool:
    """Say whether a call is a matrix product, a convolution or an attention, in forward or backward."""
    return bool(call.inputs) and _product_family(call.operator) != ""


def _product_family(operator: str) -> str:
    name = name_of(operator)
    if name in PRODUCTS or name == GROUPED:
        return "matmul"
    if name.startswith(CONVOLUTIONS):
        return "convolution"
    return "attention" if name.startswith(ATTENTIONS) else ""


def dtype_of(call: Call) -> str:
    """Return the dtype that a call computed in: of its first operand."""
    return call.inputs[0] if call.inputs else call.output


def seconds_of(call: Call, totals: Totals, machine: Machine, dtype: str = "") -> float:
    """Return the predicted time of counted calls, as they ran, or as they would in ``dtype``."""
    family, ran = family_of(call.operator), dtype_of(call)
    if not family:
        return 0.0
    wanted = dtype or ran
    times = 2.0 if wanted == "float64" else 1.0  # of float32's rates, which machine files have
    size, had = (getattr(torch, one, torch.float32).itemsize for one in (wanted, ran))
    moved = totals.bytes * (size / had)
    known = wanted if wanted in DTYPES else "float32"
    overhead = totals.calls * machine.call
    if family == "cast":
        low = next((d for d in (*call.inputs, call.output) if d in LOW), "bfloat16")
        return totals.bytes / machine.rates["cast"][low] + overhead
    if family not in COUNTED:
        return moved / machine.rates[family][known] + overhead
    if family in BY_LIBRARY:
        overhead += totals.calls * machine.product_call[known]
    return max(times * totals.flops / machine.rates[family][known], moved / machine.rates["matvec"][known]) + overhead


def seconds_of_casts(bytes_of_fp32: float, calls: int, machine: Machine, dtype: str) -> float:
    """Return the predicted time of casting fp32 values of this size to ``dtype``; none if that is float32."""
    if dtype == "float32":
        return 0.0
    return bytes_of_fp32 * (1 + SIZES[dtype] / SIZES["float32"]) / machine.rates["cast"][dtype] + calls * machine.call


def seconds_of_steps(calls: Mapping[Call, Totals], machine: Machine) -> float:
    """Return the predicted time of all counted operations but those of optimizers."""
    return sum(seconds_of(call, totals, machine) for call, totals in calls.items() if call.phase != "update")


def is_view_by_name(operator: str) -> bool:
    """Say whether an operator only makes views."""
    found: object = torch.ops  # those over functions have none there
    for name in operator.split("."):
        found = getattr(found, name, None)
    return isinstance(found, OpOverload) and is_view(found)
