"""Steps whose batches differ in sizes and numbers: each kind is traced once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import CaptureError
from amp_graph.scaling.loss_scale import LossScale
from tests.by_hand import descend
from tests.layers import layers
from tests.warned import without_warnings

STEPS = 5


@layers(lambda: dict(a=nn.Linear(16, 32), norm=nn.BatchNorm1d(32), b=nn.Linear(32, 4)))
def Net(self, x, times=1, factor=1.0):
    """Takes as many turns as it is told."""
    h = self.a(x) * factor
    for _ in range(times):
        h = self.norm(F.gelu(h))
    return self.b(h)


def lengths(micro_batches=1):
    drawn = torch.Generator().manual_seed(1)
    sizes = [micro_batches * (n + 3) for n in range(STEPS)]
    return [(torch.randn(n, 16, generator=drawn), torch.randn(n, 4, generator=drawn)) for n in sizes]


def turns():
    x, y = lengths()[-1]
    return [((x, n), y) for n in range(STEPS)]


def factors():
    x, y = lengths()[-1]
    return [((x, 1, 0.9**n), y) for n in range(STEPS)]


def made():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("kinds", "policy", "parts"), [(lengths, "fp16", 1), (turns, "bf16", 1), (factors, "bf16", 1), (lengths, "bf16", 2)]
)
def test_each_kind_of_batch_is_traced_once_and_trains_as_by_hand(kinds, policy, parts):
    batches = lengths(parts) if kinds is lengths else kinds()
    (model, optimizer), (other, theirs) = made(), made()
    scale = LossScale(2.0**8) if policy == "fp16" else None
    step = amp_graph.TrainStep(model, F.mse_loss, optimizer, policy, loss_scale=scale, micro_batches=parts)
    amp_graph.convert(other, policy)
    for x, y in batches * 2:
        with without_warnings():
            loss = step(x, y)
        xs = x.chunk(parts) if isinstance(x, torch.Tensor) else [x]
        pairs = zip(xs, y.chunk(parts), strict=True)
        expected = sum(F.mse_loss(other(*x) if isinstance(x, tuple) else other(x), y) for x, y in pairs) / parts
        descend(theirs, expected)
        assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    assert len(step.captured) == STEPS
    for (name, p), q in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert (p - q).float().norm() <= 0.03 * q.float().norm() + 1e-3, name


def test_a_size_that_the_user_marks_as_dynamic_is_refused():
    model, optimizer = made()
    step = amp_graph.TrainStep(model, F.mse_loss, optimizer, "bf16")
    x, y = lengths()[0]
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(y, 0)
    for _ in range(2):
        with pytest.raises(CaptureError, match="a size of the batch is marked as dynamic"):
            step(x, y)
    step(x.clone(), y.clone())
    assert len(step.captured) == 1
