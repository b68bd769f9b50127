"""What runs without the packages: the errors where one is missing, and the search for what a step calls."""

import importlib
import sys
import threading

import pytest
import torch

from amp_graph.integrations import missing
from amp_graph.integrations.lightning_precision import outermost_calls
from tests.layers import forward_of, layers

PACKAGES = {
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "transformers": "transformers",
    "accelerate": "accelerate",
}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named_with_the_command_that_installs_it(name, monkeypatch):
    ours = f"amp_graph.integrations.{name}"
    for module in [m for m in sys.modules if m.partition(".")[0] == name or m == ours]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(ours)
    first, fix = str(caught.value).splitlines()
    assert first == f"{ours} needs the package {PACKAGES[name]}, which is not installed"
    assert f"pip install {PACKAGES[name]}, or pip install 'amp-graph[integrations]'" in fix


def test_another_missing_module_is_its_own_error():
    error = ModuleNotFoundError("No module named 'tqdm'", name="tqdm")
    assert missing(error, "lightning", "us") is error


@forward_of(torch.nn.Module)
def Inner(self, x):
    return x + 1


@layers(lambda: dict(first=Inner(), second=Inner()))
def Outer(self, x):
    return self.second(self.first(x))


@pytest.mark.parametrize("deep", [False, True])
def test_the_modules_that_a_block_calls_are_heard_before_they_run(deep):
    outer, alone, heard = Outer(), Inner(), []
    before = torch.nn.Module.__call__
    with outermost_calls(lambda module: heard.append(module) or not (deep and module is outer)):
        assert outer(1) == 3
        alone(1)
        other = threading.Thread(target=alone, args=(1,))
        other.start()
        other.join()
    assert heard == ([outer, outer.first, outer.second, alone] if deep else [outer, alone])
    assert torch.nn.Module.__call__ is before


def test_what_raises_leaves_modules_as_they_were():
    before = torch.nn.Module.__call__

    def refuse(module):
        raise ValueError

    with pytest.raises(ValueError), outermost_calls(refuse):  # noqa: PT011
        Inner()(1)
    with pytest.raises(TypeError), outermost_calls(lambda module: True):
        Inner()(None)
    assert torch.nn.Module.__call__ is before
