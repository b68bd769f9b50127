"""Buckets of gradients as DDP makes them: one dtype, begun anew above 25 MiB, in the order of backward."""

import pytest
import torch

from amp_graph.passes.loss_scaling import average
from amp_graph.passes.loss_scaling.average import AverageOverRanks


def buckets(*sizes, dtypes=()):
    """The buckets of gradients of so many elements, fp32 where no dtype is given."""
    dtypes = (*dtypes, *[torch.float32] * (len(sizes) - len(dtypes)))
    return average._buckets([torch.empty(n, dtype=d, device="meta") for n, d in zip(sizes, dtypes, strict=True)])


MIB = 2**18  # elements of fp32


def test_a_bucket_is_full_above_25_mib():
    assert buckets(1, 1, 1) == [[2, 1, 0]]
    assert buckets(1, 1, 25 * MIB) == [[2, 1], [0]], "the limit itself still takes one more"
    assert buckets(1, 1, 25 * MIB + 1) == [[2], [1, 0]]
    assert buckets(1, 13 * MIB, 13 * MIB) == [[2, 1], [0]]
    assert buckets(1, 30 * MIB, 1) == [[2, 1], [0]]
    assert buckets() == []


def test_bytes_are_counted_and_dtypes_do_not_share_a_bucket():
    half = torch.bfloat16
    assert buckets(1, 1, 26 * MIB, dtypes=(half, half, half)) == [[2, 1, 0]]
    assert buckets(1, 1, 51 * MIB, dtypes=(half, half, half)) == [[2], [1, 0]]
    assert buckets(1, 1, 1, 1, dtypes=(half, half)) == [[3, 2], [1, 0]]
    assert buckets(1, 1, 1, dtypes=(half, torch.float32, half)) == [[2], [1], [0]]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_averages_of_ranks_are_gradients_in_their_own_shapes(dtype, monkeypatch):
    """Four ranks with the same gradients: the sum of quarters, of which each has the layout of its gradient."""
    sent = []

    def summed(flat, kind, group):
        sent.append(flat)
        return flat * 4

    monkeypatch.setattr(torch.ops._c10d_functional, "all_reduce", summed)
    monkeypatch.setattr(torch.ops._c10d_functional, "wait_tensor", lambda flat: flat)
    grads = [torch.arange(6.0).reshape(2, 3).t(), torch.ones(4, dtype=torch.float64), torch.tensor(3.0)]
    made, _ = average.average(grads, "ranks", 4, dtype)
    assert [flat.dtype for flat in sent] == [dtype or t.dtype for t in (grads[2], grads[1], grads[0])]
    for ours, grad in zip(made, grads, strict=True):
        assert torch.equal(ours, grad)
        assert (ours.dtype, ours.stride()) == (grad.dtype, grad.stride())
    assert AverageOverRanks("ranks", 4).dtype is None


def test_what_is_absent_is_zeros_and_skipped_where_no_rank_has_it(monkeypatch):
    """Two ranks: the other one has the gradients of the first parameter and of the last."""
    wire = []

    def summed(flat, kind, group):
        wire.append(flat)
        return flat + torch.tensor([1.5, 1.5, 1.0, 0.0, 4.0, 4.0, 0.5, 0.0, 0.5])

    monkeypatch.setattr(torch.ops._c10d_functional, "all_reduce", summed)
    monkeypatch.setattr(torch.ops._c10d_functional, "wait_tensor", lambda flat: flat)
    grads = [torch.zeros(2), torch.zeros(2), torch.tensor([2.0, 2.0])]
    made, skips = average.average(grads, "ranks", 2, None, (0, 1))
    assert wire[0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0]
    assert [t.tolist() for t in made] == [[4.0, 4.0], [1.0, 0.0], [2.5, 2.5]]
    assert [t.item() for t in skips] == [0.0, 1.0]
