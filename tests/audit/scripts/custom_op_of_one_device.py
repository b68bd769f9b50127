"""A custom operator has a rule for autocast on CUDA, and the training runs on the CPU."""

import argparse

import torch
from torch import Tensor, nn

from tests.audit.descend import descend
from tests.layers import layers

parser = argparse.ArgumentParser()
parser.add_argument("state")
state = parser.parse_args().state
devices = ["cuda"] if state == "faulty" else ["cuda", "cpu"]

if not hasattr(torch.ops.audit_tests, f"norm_{state}"):

    @torch.library.custom_op(f"audit_tests::norm_{state}", mutates_args=())
    def norm(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    norm.register_autograd(lambda ctx, g: g)
    for device in devices:
        norm.register_autocast(device, torch.float32)


@layers(lambda width: dict(layer=nn.Linear(width, width)))
def Normed(self, x):
    y = self.layer(x)
    return getattr(torch.ops.audit_tests, f"norm_{state}")(y)  # expect: AMP803


model = nn.ModuleList(Normed(24) for _ in range(2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    x = torch.randn(8, 24)
    with torch.autocast("cpu", torch.bfloat16):
        y = x
        for part in model:
            y = part(y)
    loss = (y.float() - x).abs().mean()
    descend(optimizer, loss)
