"""A custom operator has a rule for autocast on CUDA, and the training runs on the CPU."""

import argparse

import torch
from torch import Tensor, nn

from tests.audit.descend import train
from tests.layers import layers

parser = argparse.ArgumentParser()
parser.add_argument("state")
state = parser.parse_args().state

if not hasattr(torch.ops.audit_tests, f"norm_{state}"):

    @torch.library.custom_op(f"audit_tests::norm_{state}", mutates_args=())
    def norm(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    norm.register_autograd(lambda ctx, g: g)
    for device in ["cuda"] if state == "faulty" else ["cuda", "cpu"]:
        norm.register_autocast(device, torch.float32)


@layers(lambda width: dict(layer=nn.Linear(width, width)))
def Normed(self, x):
    y = self.layer(x)
    return getattr(torch.ops.audit_tests, f"norm_{state}")(y)  # expect: AMP803


model = nn.Sequential(Normed(24), Normed(24))
train(
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    lambda: [torch.randn(8, 24)],
    lambda x: (model(x).float() - x).abs().mean(),
)
