"""Counters of batch norms are raised by one call, and by as much."""

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.passes.backends.cuda import foreach_batch_counters


class Net(nn.Module):
    """Three norms, one of which is called twice."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        for norm in (*self.norms, self.norms[0]):
            x = norm(self.conv(x))
        return x


@pytest.mark.parametrize(("pays", "calls"), [(True, (1, 2)), (False, (0, 4))])
def test_counters_are_raised_together(pays, calls, monkeypatch):
    monkeypatch.setattr(foreach_batch_counters, "few_calls_are_profitable", lambda device: pays)
    model = amp_graph.convert(Net(), "bf16", strict=True)
    for _ in range(2):
        model(torch.randn(2, 3, 4, 4))
    text = amp_graph.report(model).graphs[0].text
    assert (text.count("_foreach_add_("), text.count(".add_(")) == calls
    assert [int(norm.num_batches_tracked) for norm in model.norms] == [4, 2, 2]
    model.eval()
    model(torch.randn(2, 3, 4, 4))
    assert [int(norm.num_batches_tracked) for norm in model.norms] == [4, 2, 2]
