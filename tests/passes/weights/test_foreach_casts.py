"""Copies by one kernel: of tensors whose strides differ in dimensions of size 1 alone, too; others one by one."""

import torch

from amp_graph.passes.weights.foreach_casts import by_layout, copy_all

LAST = torch.channels_last


def test_tensors_are_split_by_the_order_of_their_memory_and_all_are_copied():
    point = torch.randn(6, 4, 1, 1)
    given = [torch.randn(3, 5), point.to(memory_format=LAST), torch.randn(2, 4, 3, 3), torch.randn(7)]
    into = [torch.zeros(3, 5), torch.zeros(6, 4, 1, 1), torch.zeros(2, 4, 3, 3).to(memory_format=LAST), torch.zeros(7)]
    given[1] = given[1].as_strided(given[1].shape, (4, 1, 4, 4))
    parts = by_layout(into, given)
    assert (parts.alike, parts.others) == ((0, 1, 3), (2,))
    assert parts.strided == {1: (4, 1, 1, 1)}
    strides = [t.stride() for t in into]
    copy_all(into, given, parts)
    assert all(torch.equal(a, b) for a, b in zip(into, given, strict=True))
    assert [t.stride() for t in into] == strides
    low = [torch.zeros(6, 4, 1, 1, dtype=torch.bfloat16), torch.zeros(3, 5, dtype=torch.bfloat16)]
    parts = by_layout(low, [given[1], given[0]])
    assert parts.others == ()
    copy_all(low, (given[1], given[0]), parts)
    assert torch.equal(low[0], given[1].bfloat16())
    assert torch.equal(low[1], given[0].bfloat16())
