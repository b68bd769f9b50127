"""A custom operator gets activations in bfloat16 and a table in float32."""

import sys

import torch
from torch import Tensor, nn

from tests.audit.descend import descend
from tests.layers import layers

faulty = sys.argv[1] == "faulty"
name = f"audit_tests::add_table_{sys.argv[1]}"


def add_table(x: Tensor, table: Tensor) -> Tensor:
    return x * 0.5 + table.to(x.dtype)


def backward(ctx, gradient):
    return gradient * 0.5, gradient.sum(0).float() if faulty else gradient.sum(0)


if not hasattr(torch.ops.audit_tests, name.partition("::")[2]):
    operator = torch.library.custom_op(name, add_table, mutates_args=())
    operator.register_autograd(backward)
    if not faulty:
        for device in ("cpu", "cuda"):
            torch.library.register_autocast(name, device, torch.bfloat16)


@layers(lambda width: dict(inside=nn.Linear(width, width), table=nn.Parameter(torch.zeros(width))))
def Block(self, x):
    operator = getattr(torch.ops.audit_tests, name.partition("::")[2])
    return operator(self.inside(x), self.table)  # expect: AMP801


model = nn.Sequential(Block(32), Block(32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x).float() - x).square().mean()
    descend(optimizer, loss)
