"""The user's autograd functions in a call are found wherever and whenever they are defined."""

import pytest
import torch

from amp_graph.passes.torch_compat.autograd import users_functions


def negated(base, module=__name__):
    """A new function of the user's, and its result."""
    negate = staticmethod(lambda ctx, x: -x)
    return type("Negated", (base,), {"__module__": module, "forward": negate, "backward": negate})


X = torch.ones(3, requires_grad=True)


@pytest.mark.parametrize("deep", [False, True])
def test_one_that_is_defined_later_is_found(deep):
    function = negated(torch.autograd.Function, "torch.testing" if deep else __name__)
    assert not deep or not list(users_functions([function.apply(X)], [X]))
    function = negated(function) if deep else function
    assert len(list(users_functions([function.apply(X * 2).exp()], [X]))) == 1
