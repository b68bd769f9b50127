"""What of a result is compared, and which gradients are kept."""

import math

import torch
from torch import fx

from amp_graph.numerics.differences import Reference, first_of


def test_the_first_tensor_of_a_result_is_compared_and_only_if_it_is_dense_and_floating():
    one, other = torch.ones(2), torch.zeros(3)
    assert first_of(one) is one
    assert first_of((one, other)) is one
    assert first_of([other, None]) is other
    for none in ((), None, (3, one), torch.ones(2, dtype=torch.int64), one.to_sparse(), [torch.tensor([True])]):
        assert first_of(none) is None


def test_a_gradient_is_kept_of_a_value_that_is_kept_and_has_its_shape():
    graph = fx.Graph()
    known, unknown = graph.placeholder("known"), graph.placeholder("unknown")
    kept = Reference()
    kept.value(known, torch.ones(2))
    kept.gradient(known, torch.ones(3), 0)
    kept.gradient(unknown, torch.ones(2), 0)
    assert kept.gradients == {}
    assert kept.largest_gradient() == 0.0
    kept.gradient(known, torch.tensor([1.0, -4.0]), 0)
    assert kept.gradients.keys() == {"known"}
    assert kept.largest_gradient() == 4.0
    assert kept.weight(["known", "unknown"]) == math.hypot(1.0, 4.0)
