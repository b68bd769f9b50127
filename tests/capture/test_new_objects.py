"""Methods of a converted model that return another module: what is said, and that ``revert`` ends it."""

import copy
import warnings

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture.diagnostics import RETURN_ANOTHER, Watched
from amp_graph.errors import AmpGraphWarning


class Adapted(nn.Module):
    """Returns the module inside, as peft's models do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)

    def merge_and_unload(self):
        return self.inner

    def unload(self):
        return "nothing"


def test_a_module_that_a_method_returns_is_told_until_the_model_is_reverted():
    model = Adapted()
    converted = amp_graph.convert(model, "bf16")
    for one in (converted, copy.deepcopy(converted)):
        with pytest.warns(
            AmpGraphWarning, match=r"merge_and_unload\(\) of a converted model(?s:.*)convert\(amp_graph.rev"
        ):
            assert type(one.merge_and_unload()) is nn.Linear
        assert one.unload() == "nothing"  # no module: nothing is said
    assert all(isinstance(vars(converted)[name], Watched) for name in RETURN_ANOTHER)
    reverted = amp_graph.revert(converted)
    assert not vars(reverted).keys() & set(RETURN_ANOTHER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reverted.merge_and_unload() is model.inner


def test_a_method_of_the_object_itself_stays():
    model = Adapted()
    model.unload = lambda: torch.nn.Identity()
    own = model.unload
    assert amp_graph.convert(model, "bf16").unload is own
    assert amp_graph.revert(model).unload is own
