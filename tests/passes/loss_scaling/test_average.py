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


HALF = (torch.bfloat16,) * 3
BUCKETS = [
    ((1, 1, 1), (), [[2, 1, 0]]),
    ((1, 1, 25 * MIB), (), [[2, 1], [0]]),  # the limit itself still takes one more
    ((1, 1, 25 * MIB + 1), (), [[2], [1, 0]]),
    ((1, 13 * MIB, 13 * MIB), (), [[2, 1], [0]]),
    ((1, 30 * MIB, 1), (), [[2, 1], [0]]),
    ((), (), []),
    ((1, 1, 26 * MIB), HALF, [[2, 1, 0]]),  # bytes are counted
    ((1, 1, 51 * MIB), HALF, [[2], [1, 0]]),
    ((1, 1, 1, 1), HALF[:2], [[3, 2], [1, 0]]),  # dtypes do not share a bucket
    ((1, 1, 1), (torch.bfloat16, torch.float32, torch.bfloat16), [[2], [1], [0]]),
]


@pytest.mark.parametrize(("sizes", "dtypes", "wanted"), BUCKETS)
def test_a_bucket_is_full_above_25_mib_and_of_one_dtype(sizes, dtypes, wanted):
    assert buckets(*sizes, dtypes=dtypes) == wanted


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
