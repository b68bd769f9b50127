"""What a classification says beside the class."""

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.lists import effective
from amp_graph.passes.graph.fake_values import fake_mode_of
from amp_graph.passes.precision.classify import classify
from tests.layers import layers
from tests.passes.graph.test_identify_ops import traced

X, W = torch.randn(3, 4), torch.randn(4, 4)


def test_only_what_computes_in_fp32_inside_has_a_full_result_under_autocast():
    lists = effective((), dtype="float16", device="cuda")
    full = {}
    for name, function in {
        "softmax": lambda x, w: x.softmax(-1),
        "a conversion": lambda x, w: x.to(torch.float16),
        "what is given": lambda x, w: x.contiguous(),
        "a product": lambda x, w: x @ w,
    }.items():
        node, _ = traced(function, X, W)
        full[name] = classify(node, lists, fake_mode_of(node.graph.owning_module)).full_in_autocast
    assert full == {"softmax": True, "a conversion": False, "what is given": False, "a product": False}


@layers(lambda norm: dict(linear=nn.Linear(4, 4), norm=norm, weight=nn.Parameter(torch.linspace(0.9, 1.1, 4))))
def Normed(self, x):
    """A product and a norm by an operator that torch's autocast does not name; parameters and statistics stay fp32."""
    return self.norm(self.linear(x), self.weight)


NORMS = {
    "of a batch": lambda x, w: torch.native_batch_norm(x, w, w, w.detach(), w.detach(), False, 0.1, 1e-5)[0],
    "of a layer": lambda x, w: torch.native_layer_norm(x, (4,), w, w, 1e-5)[0],
}


@pytest.mark.parametrize("name", NORMS)
def test_under_autocasts_list_an_operator_without_an_entry_runs_as_it_does_there(name):
    """Its kernel takes low values beside fp32 parameters: they do not promote them."""
    model = Normed(NORMS[name])
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(X)
    assert theirs.dtype == torch.bfloat16
    ours = amp_graph.convert(model, "bf16,lists=autocast_cpu,keep_outputs=false", strict=True)
    assert torch.equal(ours(X), theirs)
    (graph,) = amp_graph.report(ours).graphs
    assert len(graph.casts) == 3, "the linear's operands, as under autocast"
