"""Batch the casts of many parameters into one call where no gradients are recorded.

Before: ``a = w1.bfloat16(); b = w2.bfloat16()``, one kernel each. After: ``low = low_weights((w1, w2), torch.bfloat16,
formats); a, b = low``: one kernel for all. Only on devices where a call costs more than a cast: GPUs.
Source of the kernels: aten/src/ATen/native/cuda/ForeachBinaryOpList.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import captured, value
from amp_graph.passes.graph.grad_regions import may_record_gradients
from amp_graph.passes.graph.meta_keys import CHECKPOINT, REGION
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.dispatch import is_wrapper
from amp_graph.passes.weights.cast_weights import casts_of_parameters

own_functions(__name__)

LEAST = 3  # casts of a group


@dataclass(frozen=True)
class BatchWeightCasts(Pass):
    """Casts parameters together where no gradients are recorded, when it is profitable.

    Law: the graph neither writes to these parameters, nor returns a cast, nor enables gradients. Exactness: bit-exact.
    """

    options: PipelineOptions
    name: ClassVar[str] = "batch-weight-casts"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every inserted cast of a parameter."""
        if not few_calls_are_profitable(self.options.device) or may_record_gradients(gm):
            return PassResult(gm)
        may: dict[torch.device, list[Node]] = {}
        for node, reason in casts_of_parameters(gm, self.options.dtype):
            if not reason and _fits(node):
                may.setdefault(value(node).device, []).append(node)
        changes = []
        for together in may.values():
            if len(together) >= LEAST:
                _group(gm, together, self.options.dtype)
                told = f"with {len(together) - 1} others"
                changes += [Change(self.name, "grouped", n.name, told) for n in together]
        return PassResult(gm, tuple(changes))


def few_calls_are_profitable(device: str) -> bool:
    """Say whether one call for many small tensors beats one call for each.

    H200: the cast of a weight takes 2 us on the GPU and 16 to 24 us on the host; the casts are a quarter of the time
    of a GPT's token. Converted models infer at 1.08 of autocast's speed instead of 0.94.
    """
    return device == "cuda"


def _fits(cast: Node) -> bool:
    """Say whether ``cast`` may run as soon as its parameter exists, and changes only precision and layout."""
    elsewhere = not {REGION, CHECKPOINT}.isdisjoint(cast.meta) or is_wrapper(captured(cast.all_input_nodes[0]))
    return not elsewhere and set(cast.kwargs) <= {"memory_format"}


def _group(gm: GraphModule, together: list[Node], dtype: torch.dtype) -> None:
    formats = tuple(n.kwargs.get("memory_format") for n in together)
    with gm.graph.inserting_before(together[0]):
        made = gm.graph.call_function(low_weights, (tuple(n.args[0] for n in together), dtype, formats))
    made.meta["val"] = tuple(value(n) for n in together)
    for i, node in enumerate(together):
        node.op, node.target = "call_function", low_weight
        node.args, node.kwargs = (node.args[0], made, i), {}


def low_weight(weight: Tensor, group: Sequence[Tensor], place: int) -> Tensor:
    """Return the cast of ``weight`` from a group; the call names the weight in printed graphs."""
    return group[place]


def low_weights(weights: Sequence[Tensor], dtype: torch.dtype, formats: Sequence[Any]) -> list[Tensor]:
    """Cast ``weights`` to ``dtype``, each into its format, where that is not None.

    One call copies those of equal layout, and one the others. torch compares all strides, also of dimensions of size 1,
    as those of a 1 x 1 convolution in channels_last.
    """
    made: list[Tensor] = []
    parts: tuple[list[Any], list[Any]] = ([], [])
    for weight, format in zip(weights, formats, strict=True):
        low = torch.empty_like(weight, dtype=dtype, requires_grad=False, memory_format=format or torch.preserve_format)
        strides = zip(low.stride(), weight.stride(), low.shape, strict=True)
        alike = all(one == other for one, other, size in strides if size != 1)
        made.append(low)
        parts[not alike].append((low, weight.as_strided(weight.shape, low.stride()) if alike else weight))
    for part in filter(None, parts):
        torch._foreach_copy_([low for low, _ in part], [weight for _, weight in part])
    return made
