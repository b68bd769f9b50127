"""Runs one operator of a list in low precision, forward and backward, on samples that torch's own OpInfos give."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from amp_graph.lists import OpList, Rule
from amp_graph.lists.operators import overloads_of

from .handwritten import HANDWRITTEN

Sample = tuple[tuple, dict]


@lru_cache(maxsize=1)
def op_infos() -> dict[str, list]:
    """Map an ATen packet name to the OpInfos that call it."""
    found = defaultdict(list)
    for info in op_db:
        name = info.aten_name.removeprefix("nn.functional.").replace(".", "_")
        for alias in {name, *(alias.name.replace(".", "_") for alias in info.aliases)}:
            found[alias].append(info)
    return found


def samples(op: str, count: int = 2) -> Iterator[Sample]:
    """Yield float32 samples on which the operator runs; they are made afresh for every call."""
    packet = op.split(".")[1]
    if packet in HANDWRITTEN:
        yield from ((args, {}) for args in HANDWRITTEN[packet]())
        return
    good = 0
    for info in op_infos().get(packet, ()):
        if torch.float32 not in info.supported_dtypes("cpu"):
            continue
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd), 6):
            args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
            if has_floats(args) and not failure(op, (args, kwargs)):
                good += 1
                yield args, kwargs
            if good == count:
                return


def has_floats(values: object) -> bool:
    return any(is_full(value) for value in tree_flatten(values)[0])


def is_full(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def target(op: str):
    packet = getattr(torch.ops.aten, op.split(".")[1])
    return packet if op.count(".") == 1 else getattr(packet, op.split(".")[2])


def lowered(sample: Sample, rule: Rule, dtype: torch.dtype, keep: int | None = None) -> Sample:
    """Cast the sample's float32 tensors: those that the rule's `inputs` name, all but the number `keep`."""
    args, kwargs = sample
    if rule.inputs is not None:
        names = [argument.name for argument in overloads_of(rule.op)[0]._schema.arguments]
        chosen = [is_full(a) and names[i] in rule.inputs for i, a in enumerate(args)]
        low = tuple(a.to(dtype) if yes else a for a, yes in zip(args, chosen, strict=True))
        return low, {k: v.to(dtype) if k in rule.inputs and is_full(v) else v for k, v in kwargs.items()}
    flat, spec = tree_flatten((args, kwargs))
    numbers = iter(range(len(flat)))
    flat = [v.to(dtype) if is_full(v) and next(numbers) != keep else v for v in flat]
    return tree_unflatten(flat, spec)


def full_count(sample: Sample) -> int:
    return sum(map(is_full, tree_flatten(sample)[0]))


def failure(op: str, sample: Sample) -> str:
    """Run forward and backward on fresh leaves; return what went wrong, or nothing."""
    leaves = []

    def leaf(value):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        leaves.append(value.detach().clone().requires_grad_(value.requires_grad))
        return leaves[-1]

    args, kwargs = tree_map(leaf, sample)
    try:
        result = target(op)(*args, **kwargs)
        outputs = [o for o in tree_flatten(result)[0] if isinstance(o, torch.Tensor) and o.requires_grad]
        if outputs:
            gradients = [torch.ones_like(o) for o in outputs]
            inputs = [one for one in leaves if one.requires_grad]
            torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        return str(error).strip().splitlines()[0][:200]
    return ""


def failures(op_list: OpList, classes: set[str]) -> dict[str, str]:
    """Run every rule of these classes in the list's dtype; say what each does that fails, or has no sample."""
    dtype = getattr(torch, op_list.dtype)
    found = {}
    for rule in op_list:
        if rule.cls.value in classes:
            messages = [failure(rule.op, lowered(sample, rule, dtype)) for sample in samples(rule.op)]
            found[rule.op] = "no sample" if not messages else next(filter(None, messages), "")
    return {op: message for op, message in found.items() if message}


def promotion_failures(op_list: OpList) -> dict[str, str]:
    """Run every rule that says `promotes`, each float operand in turn staying float32 among low ones."""
    dtype = getattr(torch, op_list.dtype)
    found = {}
    for rule in op_list:
        for sample in samples(rule.op) if rule.promotes else ():
            for keep in range(full_count(sample)):
                if message := failure(rule.op, lowered(sample, rule, dtype, keep)):
                    found[rule.op] = message
    return found
