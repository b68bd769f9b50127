"""Operators over compiled C, as the guard's cases call them: of nothing all is written, and fakes are truthful."""

from itertools import groupby

import pytest
import torch
from torch.testing._internal.optests.generate_tests import ALL_TEST_UTILS
from torch.utils._pytree import tree_map_only

import amp_graph.passes.pipeline_table  # noqa: F401  which defines all operators
from amp_graph.passes.native.operator_library import FUNCTIONS, OPS
from tests.guard import cases_attention, cases_images, cases_norm, cases_products  # noqa: F401
from tests.guard.case import CASES
from tests.passes.builds import memory_that_is_not_zero  # noqa: F401

pytestmark = [pytest.mark.compiled, pytest.mark.multiplied]
BY_KERNEL = {kernel: list(cases) for kernel, cases in groupby(CASES, lambda case: case.name.partition(" ")[0])}


def of_nothing(case):
    return "=0 " in f"{case.name} " or "=(0" in case.name


@pytest.mark.parametrize("kernel", BY_KERNEL)
def test_of_nothing_it_is_what_torch_makes_of_it_and_all_is_written(kernel):
    for case in filter(of_nothing, BY_KERNEL[kernel]):
        case.run()


@pytest.mark.parametrize("kernel", sorted(BY_KERNEL.keys() - {"large_products"}))  # which calls that of products
def test_its_operators_have_truthful_fakes(kernel, monkeypatch):
    calls = []

    def noting(name, function):
        return lambda *given: calls.append((name, tree_map_only(torch.Tensor, torch.clone, given))) or function(*given)

    for name, function in list(FUNCTIONS.items()):
        monkeypatch.setitem(FUNCTIONS, name, noting(name.split(".")[1], function))
    for case in [case for case in BY_KERNEL[kernel] if not of_nothing(case)][:2]:
        case.run()
    assert calls
    for name, given in calls:
        in_place = name.endswith("_")  # returns what it writes to, which no compiler takes
        only = ("test_schema", "test_faketensor") if in_place else tuple(ALL_TEST_UTILS)
        torch.library.opcheck(getattr(OPS, name).default, given, test_utils=only)
