"""An autograd function saves an activation in bfloat16 and a weight in float32, and multiplies them in backward."""

import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import layers


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Careful(Plain):
    forward = staticmethod(torch.amp.custom_fwd(Plain.forward, device_type="cpu", cast_inputs=torch.float32))
    backward = staticmethod(torch.amp.custom_bwd(Plain.backward, device_type="cpu"))


@layers(lambda width: dict(layer=nn.Linear(width, width), weight=nn.Parameter(torch.ones(width))))
def Scaled(self, x):
    return (Plain if sys.argv[1] == "faulty" else Careful).apply(self.layer(x), self.weight)  # expect: AMP804


model = Scaled(32)
train(
    torch.optim.SGD(model.parameters(), lr=0.1),
    lambda: [torch.randn(8, 32)],
    lambda x: (model(x).float() - x).square().mean(),
)
