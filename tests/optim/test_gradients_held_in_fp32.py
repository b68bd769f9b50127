"""A model at O2 whose gradients were unscaled in fp32 can be reverted while they are there."""

import pytest
import torch

import amp_graph


@pytest.mark.parametrize("keep", [True, False])
def test_revert_after_an_unscaled_step(keep):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    amp_graph.convert(model, "fp16-O2")
    optimizer, scaler = torch.optim.AdamW(model.parameters()), amp_graph.GradScaler()
    scaler.scale(model(torch.ones(3, 8)).square().mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer, None)  # accelerate passes its closure, None
    scaler.update()
    if not keep:
        optimizer.zero_grad()
    amp_graph.revert(model)
    model(torch.ones(3, 8)).square().mean().backward()
    assert all(p.grad.dtype is p.dtype is torch.float32 for p in model.parameters())
    model.half()
    assert all(p.dtype is torch.float16 for p in model.parameters())
