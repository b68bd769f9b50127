"""Lookups in a table that is rounded: what they return is, once, and no gradient is. A table read in fp32 stays so."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from amp_graph.passes.loss_scaling import name_joint
from amp_graph.passes.manager import run_passes
from amp_graph.passes.sharding.round_lookups import RoundLookups

IDS = torch.tensor([[1, 2, 0], [2, 2, 4]])
LOWS = [torch.bfloat16, torch.float16]
EXTRAS = [{}, {"padding_idx": 0}, {"scale_grad_by_freq": True}]


def _batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 3, generator=generator), torch.randn(2, 3, 3, generator=generator), IDS


def _joint(head=None, **extras):
    """Return forward and backward of lookups, and of a product in ``head`` with the same table."""

    def both(table, weight, ids):
        found = F.embedding(ids, table, **extras)
        loss = (found * weight).sum()
        loss = loss if head is None else loss + (weight[0].to(head) @ table.to(head).t()).float().sum()
        return (loss, *torch.autograd.grad(loss, (table, weight)), found.detach())

    leaves = [t.requires_grad_(t.is_floating_point()) for t in _batch()]
    gm = make_fx(both, tracing_mode="fake")(*leaves)
    name_joint(gm, {"table": 1, "weight": 2}, loss=0)
    return gm


def _rounded(gm, dtype):
    name = next(node.name for node in gm.graph.nodes if node.op == "placeholder")
    (done,) = run_passes(gm, [RoundLookups({name: dtype})])
    return done.result


@pytest.mark.parametrize("extras", EXTRAS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", LOWS)
def test_what_is_looked_up_is_rounded_once_and_the_gradient_of_the_table_is_not(dtype, tied, extras):
    gm = _joint(dtype if tied else None, **extras)
    before = gm(*_batch())
    assert [change.action for change in _rounded(gm, dtype).changes] == ["round"]
    after = gm(*_batch())
    assert torch.equal(after[3], F.embedding(IDS, _batch()[0].to(dtype)).float())
    assert not torch.equal(after[3], before[3])
    assert torch.equal(after[1], before[1])
    assert not _rounded(gm, dtype).changes


@pytest.mark.parametrize(("head", "dtype"), [(torch.float32, LOWS[0]), (torch.float64, LOWS[0]), LOWS])
def test_a_table_that_is_read_otherwise_as_well_is_left_alone(head, dtype):
    gm = _joint(head)
    before, done = gm(*_batch()), _rounded(gm, dtype)
    assert not done.changes
    assert "reads it as it is" in done.skips[0].reason
    assert all(map(torch.equal, before, gm(*_batch())))
