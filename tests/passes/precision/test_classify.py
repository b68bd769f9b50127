"""What a classification says beside the class."""

import torch

from amp_graph.lists import effective
from amp_graph.passes.graph.fake_values import fake_mode_of
from amp_graph.passes.precision.classify import classify
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
