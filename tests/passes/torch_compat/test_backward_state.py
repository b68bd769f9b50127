"""What surrounds a call that a recording could not repeat."""

import contextlib

import pytest
import torch
from torch.autograd.forward_ad import dual_level
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode

from amp_graph.passes.torch_compat.autograd import what_watches_calls


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


AROUND = {
    "nothing": (contextlib.nullcontext, ""),
    "a dispatch mode": (Mode, "a dispatch mode"),
    "forward mode": (dual_level, "a function transform"),
    "no hooks allowed": (lambda: disable_saved_tensors_hooks("none here"), "a function transform"),
    "hooks": (save_on_cpu, "saved-tensor hooks"),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_has_to_see_each_operation_is_named(name):
    around, told = AROUND[name]
    with around():
        assert what_watches_calls() == told
    assert what_watches_calls() == ""


def test_a_transform_is_named():
    told = []
    torch.func.vmap(lambda x: (told.append(what_watches_calls()), x)[1])(torch.ones(2))
    assert told == ["a function transform"]
