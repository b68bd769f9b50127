"""Gradients in one piece of memory: all layouts, aligned, and apart from what the next replay writes."""

import torch

from amp_graph.replay.packed_gradients import ALIGNED, PackedGradients


def test_gradients_of_any_layout_come_back_as_they_were():
    grads = [
        torch.randn(3, 5),
        None,
        torch.randn(7, 2).t(),
        torch.randn(()),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(0, 3),
        torch.randn(5).bfloat16(),
        torch.randn(6, 4)[:, ::2],
    ]
    packed = PackedGradients()
    results = packed.pack(grads)
    expected = [None if g is None else (g.clone(), g.stride()) for g in grads]
    found = packed.handed_out(results)
    for r in results:
        r.fill_(torch.nan)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert torch.equal(a, b[0])
            assert a.dtype == b[0].dtype
            assert a.stride() == b[1] or not a.numel()
            assert (a.data_ptr() - a.untyped_storage().data_ptr()) % ALIGNED == 0


def test_no_gradients():
    packed = PackedGradients()
    assert packed.handed_out(packed.pack([None, None])) == [None, None]
