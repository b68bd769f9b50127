"""A block under activation checkpointing, reentrant or not, is measured and located as one without."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from tests.layers import layers
from tests.numerics.planted import BACKWARD, FORWARD, Plant


@layers(
    lambda kind, reentrant: dict(
        reentrant=reentrant,
        first=nn.Linear(6, 6),
        last=nn.Linear(6, 3),
        block=nn.Sequential(nn.Linear(6, 6), Plant(kind, 6), nn.Linear(6, 6)),
    )
)
def Checkpointed(self, x):
    x = self.first(x)
    x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
    return self.last(x)


def made(kind, reentrant):
    torch.manual_seed(0)
    batches = [(torch.randn(4, 6) * (10.0 if kind == "forward" else 1.0), torch.randn(4, 3)) for _ in range(2)]
    factor = 4000.0 if kind == "backward" else 1.0
    return Checkpointed(kind, reentrant), batches, lambda out, y: F.mse_loss(out, y) * factor


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_what_is_inside_is_found_as_without_a_checkpoint(kind, reentrant):
    planted = {f"block.1:{key.partition(':')[2]}" for key in (FORWARD if kind == "forward" else BACKWARD)}
    found = {}
    for how in (None, reentrant):
        model, batches, loss_fn = made(kind, how)
        calibrated = amp_graph.calibrate(model, batches, loss_fn)
        compared = amp_graph.compare(model, batches, loss_fn, policy="fp16")
        found[how] = calibrated.values, {one.key: one.introduced for one in compared.operations}
    assert found[None] == found[reentrant]
    if kind == "forward":
        assert set(calibrated.out_of_range()) == planted
    scale = 1.0 if kind == "forward" else 2.0**16
    located = amp_graph.locate(model, batches[0], loss_fn, policy="fp16", scale=scale, try_fix=False)
    assert located.kind == "overflow"
    if kind == "forward":
        assert (located.module, located.operation) == ("block.1", "mul")


def test_gradients_of_the_user_and_hooks_of_an_optimizer_in_backward_stay():
    model, batches, loss_fn = made("forward", True)
    loss_fn(model(batches[0][0]), batches[0][1]).backward()
    before = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    called = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(called.append)
    amp_graph.locate(model, batches[0], loss_fn, policy="fp16", try_fix=False)
    policy = amp_graph.bisect(model, batches, loss_fn, tolerance=0.05, policy="fp16")
    assert policy.error <= 0.05
    assert not called
    assert all(p.grad is before[n][0] and torch.equal(p.grad, before[n][1]) for n, p in model.named_parameters())
    loss_fn(model(batches[0][0]), batches[0][1]).backward()
    assert len(called) == len(before)
