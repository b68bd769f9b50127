"""Runs the operators of a list in low precision, forward and backward, on samples from torch's OpInfos."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cache, lru_cache

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from amp_graph.lists import OpList, Rule
from amp_graph.lists.operators import overloads_of
from tests.warned import without_warnings

from .handwritten import HANDWRITTEN

Sample = tuple[tuple, dict]


@lru_cache(maxsize=1)
def op_infos() -> dict[str, list]:
    """Map an ATen packet name to the OpInfos that call it; the database takes seconds to load."""
    with without_warnings(Warning):
        from torch.testing._internal.common_methods_invocations import op_db
    found = defaultdict(list)
    for info in op_db:
        name = info.aten_name.removeprefix("nn.functional.").replace(".", "_")
        for alias in {name, *(alias.name.replace(".", "_") for alias in info.aliases)}:
            found[alias].append(info)
    return found


@cache
def samples(op: str, count: int = 2) -> tuple[Sample, ...]:
    """Return float32 samples on which the operator runs; `failure` copies them before use."""
    packet, overload = op.split(".")[1], op.partition(".")[2]
    if packet in HANDWRITTEN:
        return tuple((args, {}) for args in HANDWRITTEN.get(overload, HANDWRITTEN[packet])())
    return tuple(itertools.islice((s for s in _op_info_samples(packet) if not failure(op, s)), count))


def _op_info_samples(packet: str) -> Iterator[Sample]:
    for info in op_infos().get(packet, ()):
        if torch.float32 in info.supported_dtypes("cpu"):
            torch.manual_seed(0)
            made = info.sample_inputs_func(info, "cpu", torch.float32, info.supports_autograd)
            first = list(itertools.islice(made, 6))
            if isinstance(made, Generator):
                made.close()  # left halfway, it would be closed by a collection, which may come amid a trace
            for sample in first:
                args = (sample.input, *sample.args)
                if has_floats(args):
                    yield args, dict(sample.kwargs)


def has_floats(values: object) -> bool:
    return any(is_full(value) for value in tree_flatten(values)[0])


def is_full(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def target(op: str):
    packet = getattr(getattr(torch.ops, op.split(".")[0]), op.split(".")[1])
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


def fresh(sample: Sample) -> tuple[Sample, list[torch.Tensor]]:
    """Return the sample with copies of its floating-point tensors, and these."""
    flat, spec = tree_flatten(sample)
    floats = [isinstance(one, torch.Tensor) and one.is_floating_point() for one in flat]
    flat = [
        one.detach().clone().requires_grad_(one.requires_grad) if is_float else one
        for one, is_float in zip(flat, floats, strict=True)
    ]
    return tree_unflatten(flat, spec), [one for one, is_float in zip(flat, floats, strict=True) if is_float]


def failure(op: str, sample: Sample) -> str:
    """Run forward and backward on fresh leaves; return what went wrong, or nothing."""
    (args, kwargs), leaves = fresh(sample)
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
    """Run every rule of these classes in the list's dtype; say which fails, and which has no sample."""
    dtype = getattr(torch, op_list.dtype)
    rules = [rule for rule in op_list if rule.cls.value in classes]
    told = first_messages(rules, lambda rule, sample: [failure(rule.op, lowered(sample, rule, dtype))])
    return told | {rule.op: "no sample" for rule in rules if not samples(rule.op)}


def first_messages(rules: Iterable[Rule], check: Callable[[Rule, Sample], Iterable[str]]) -> dict[str, str]:
    """Return the first message of ``check`` over the samples of each rule, for those that have one."""
    told = {rule.op: [m for sample in samples(rule.op) for m in check(rule, sample) if m] for rule in rules}
    return {op: messages[0] for op, messages in told.items() if messages}


def promotion_failures(op_list: OpList) -> dict[str, str]:
    """Run every rule that says `promotes`, each float operand in turn staying float32 among low ones."""
    dtype = getattr(torch, op_list.dtype)
    return first_messages(
        (rule for rule in op_list if rule.promotes),
        lambda rule, sample: (
            failure(rule.op, lowered(sample, rule, dtype, keep)) for keep in range(full_count(sample))
        ),
    )


def commutation_failure(rule: Rule, sample: Sample, dtype: torch.dtype) -> str:
    """Compare, bit by bit, a cast before the operator with a cast after it, in forward and gradient."""
    results, gradients = [], []
    for before in (True, False):
        (args, kwargs), leaves = fresh(sample)
        if before:
            args, kwargs = lowered((args, kwargs), rule, dtype)
        torch.manual_seed(0)
        result = tree_flatten(target(rule.op)(*args, **kwargs))[0]
        outputs = [o if o.dtype != torch.float32 else o.to(dtype) for o in result if isinstance(o, torch.Tensor)]
        differentiable = [o for o in outputs if o.requires_grad]
        inputs = [one for one in leaves if one.requires_grad]
        ones = [torch.linspace(0.1, 1, o.numel()).reshape(o.shape).to(dtype) for o in differentiable]
        found = torch.autograd.grad(differentiable, inputs, ones, allow_unused=True) if differentiable else ()
        results.append(outputs)
        gradients.append([None if g is None else g.to(dtype) for g in found])
    if not all(map(torch.equal, *results)):
        return "another result"
    pairs = zip(*gradients, strict=True)
    return "" if all(a is b is None or torch.equal(a, b) for a, b in pairs) else "another gradient"
