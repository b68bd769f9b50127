"""What a case is: a call of a kernel at given sizes, and what it is compared with.

Before: a parametrized test. After: ``@over(rows=(0, 1, 17))`` above a function of ``rows``, which calls ``op("name")``
or ``checked(function)`` and compares with ``same``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.native.operator_library import FUNCTIONS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOWS = (BF16, FP16)
SIZES = (0, 1, 3, 17, 31, 33)
MOST = 160  # combinations of sizes of one function
OPERATORS_CALLED: set[str] = set()
# Of the rounding of a result, and of what is added up in fp32.
BOUNDS = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 2.0**-16}


@dataclass(frozen=True)
class Case:
    """One call. ``tiled``: of a kernel that multiplies tile by tile, which other instructions do not have."""

    name: str
    run: Callable[[], None]
    tiled: bool
    sampled: bool


CASES: list[Case] = []


def over(tiled: bool = False, **sizes: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make cases of combinations of ``sizes``: all, or ``MOST`` of them and more until every two sizes have met.

    Of each function the first, which is mostly of nothing, and three others are sampled.
    """

    def noted(function: Callable[..., None]) -> Callable[..., None]:
        combinations = _some([dict(zip(sizes, values, strict=True)) for values in itertools.product(*sizes.values())])
        step = max(1, len(combinations) // 3)
        for i, given in enumerate(combinations):
            words = " ".join(f"{name}={_word(value)}" for name, value in given.items())
            sampled = i % step == step // 2 or not i
            name = f"{function.__name__} {words}".strip()
            CASES.append(Case(name, lambda given=given: function(**given), tiled, sampled))
        return function

    return noted


def _some(combinations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``MOST`` of the combinations, always the same, and further ones that hold a pair that these do not."""
    if len(combinations) <= MOST:
        return combinations
    chosen = {0, *random.Random(len(combinations)).sample(range(len(combinations)), MOST)}
    met = set().union(*(_pairs(combinations[i]) for i in chosen))
    for i, given in enumerate(combinations):
        if not met >= (pairs := _pairs(given)):
            chosen.add(i)
            met |= pairs
    return [combinations[i] for i in sorted(chosen)]


def _pairs(given: dict[str, Any]) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in itertools.combinations(given.items(), 2)}


def _word(value: Any) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")


def op(name: str) -> Callable[..., Any]:
    """Return what ``amp_graph::name`` runs, as a Python function, whose own allocations can be moved."""
    OPERATORS_CALLED.add(f"amp_graph.{name}.default")
    return FUNCTIONS[f"amp_graph.{name}.default"]


def drawn(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    """Return random numbers, the same at each run of a case."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))
    return made.mul_(scale).to(dtype)


def same(found: Tensor, wanted: Tensor, bound: float | None = None, what: str = "result") -> None:
    """Compare with ``wanted``, in fp64; ``bound``: of the largest of its numbers, by the dtype of ``found``."""
    if found.shape != wanted.shape:
        raise AssertionError(f"{what}: {tuple(found.shape)} for {tuple(wanted.shape)}")
    if not wanted.numel():
        return
    bound = BOUNDS.get(found.dtype, 0.0) if bound is None else bound
    one, other = found.double(), wanted.double()
    holes = one.isnan() != other.isnan()
    if holes.any():
        raise AssertionError(f"{what}: {int(holes.sum())} of {holes.numel()} numbers are NaN, or are not: not written?")
    off = (one - other).nan_to_num().abs().max().item()
    allowed = bound * max(1.0, other.nan_to_num().abs().max().item())
    if off > allowed:
        raise AssertionError(f"{what}: off by {off:.3g}, where {allowed:.3g} is allowed")


def equal(found: Tensor, wanted: Tensor, what: str = "result") -> None:
    """Compare bit for bit, NaN with NaN."""
    same(found, wanted, 0.0, what)
