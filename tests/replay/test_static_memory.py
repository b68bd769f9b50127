"""Copies out of a recording: all layouts, each apart from the others and from what the next replay writes."""

import torch

from amp_graph.replay.slots import copies


def test_tensors_of_any_layout_come_back_as_they_were():
    whole = torch.randn(6, 4)
    results = [
        torch.randn(3, 5),
        None,
        torch.randn(7, 2).t(),
        torch.tensor(-0.0),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(0, 3),
        torch.randn(5).bfloat16(),
        torch.arange(4),
        torch.randn(4) > 0,
        whole[:, ::2],
        whole,  # the same memory as another result
        whole,
    ]
    expected = [None if r is None else (r.clone(), r.stride()) for r in results]
    found = copies(results)
    for r in results:
        if r is not None and r.numel():
            (r[:1] if r.dim() and r.stride(0) == 0 else r).fill_(1)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a, b[0])
            assert torch.equal(a.signbit(), b[0].signbit())
            assert (a.dtype, a.stride()) == (b[0].dtype, b[1])
    owners = [a.untyped_storage().data_ptr() for a in found if a is not None and a.numel()]
    assert len(set(owners)) == len(owners)
