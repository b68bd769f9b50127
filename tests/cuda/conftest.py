"""Tests of this folder run where there is a GPU."""

import pytest
import torch

from tests.conformance.conftest import IGNORED_WARNINGS

OF_TORCH_ITSELF = (
    "ignore:.*torch.jit.script:DeprecationWarning",  # where Inductor is imported for the first time, 2.11
    "ignore:Synchronization debug mode is a prototype:UserWarning",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if "cuda" in item.path.parent.name:
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))
            for line in (*IGNORED_WARNINGS, *OF_TORCH_ITSELF):
                item.add_marker(pytest.mark.filterwarnings(line))
