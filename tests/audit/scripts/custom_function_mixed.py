"""An autograd function saves an activation in bfloat16 and a weight in float32, and multiplies them in backward."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend
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
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, weight):
        return Plain.forward(ctx, x, weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        return Plain.backward(ctx, gradient)


@layers(
    lambda width, function: dict(
        layer=nn.Linear(width, width), weight=nn.Parameter(torch.ones(width)), function=function
    )
)
def Scaled(self, x):
    return self.function.apply(self.layer(x), self.weight)  # expect: AMP804


model = Scaled(32, Plain if sys.argv[1] == "faulty" else Careful)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x).float() - x).square().mean()
    descend(optimizer, loss)
