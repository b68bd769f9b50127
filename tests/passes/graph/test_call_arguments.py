"""The arguments of ``F.batch_norm`` by name: a call with them computes what the call that was captured computes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Interpreter

from amp_graph.passes.graph.call_arguments import batch_norm_arguments, has_norm
from tests.passes.graphs import capture_function

X = torch.linspace(-1, 1, 24).view(4, 6) ** 3 * 0.01  # of a small variance, so that eps counts
MEAN, VARIANCE = torch.linspace(0, 1, 6), torch.linspace(1, 2, 6) * 1e-4
CALLS = {
    "nothing more": lambda x, mean, variance: F.batch_norm(x, mean, variance),
    "in training": lambda x, mean, variance: F.batch_norm(x, mean, variance, None, None, True),
    "with a momentum": lambda x, mean, variance: F.batch_norm(x, mean, variance, None, None, True, 0.5),
    "by name": lambda x, mean, variance: F.batch_norm(x, variance, running_var=mean + 1, eps=0.1, training=False),
    "with a scale": lambda x, mean, variance: F.batch_norm(x, mean, variance, mean),
}


class ByName(Interpreter):
    """Runs a graph, with each batch norm called by the names that were read of it."""

    def run_node(self, node):
        if node.target is not F.batch_norm:
            return super().run_node(node)
        given = {name: self.env.get(v, v) for name, v in batch_norm_arguments(node).items()}
        return F.batch_norm(**given)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_them_computes_the_same(name):
    made = capture_function(lambda s, x, *statistics: CALLS[name](2 * x, *statistics), X, MEAN, VARIANCE)
    (node,) = (n for n in made.gm.graph.nodes if n.target is F.batch_norm)
    assert has_norm(node.args[0]) == ("training" not in name and "momentum" not in name)
    ours, theirs = (copy.deepcopy(made.given) for _ in range(2))
    (found,), (wanted,) = ByName(made.gm).run(*ours), made.gm.forward(*theirs)
    assert torch.equal(found, wanted)
    assert all(map(torch.equal, ours, theirs)), "the running statistics"
