"""A torch newer than any that was checked runs, without a word: a process whose warnings are errors goes on."""

import pytest
import torch

import amp_graph
from amp_graph.passes import torch_compat
from amp_graph.passes.torch_compat import dispatch, dynamo_settings, fake
from tests.warned import warnings_are_errors


@pytest.mark.parametrize("newer", [(2, 14), (3, 0)])
def test_a_newer_torch_is_no_warning(newer, monkeypatch):
    for module in (torch_compat, dispatch, dynamo_settings, fake):
        monkeypatch.setattr(module, "torch_version", lambda: newer)
    with warnings_are_errors(Warning):
        assert amp_graph.convert(torch.nn.Linear(16, 4), "bf16")(torch.randn(3, 16)).shape == (3, 4)
