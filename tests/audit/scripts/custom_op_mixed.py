"""A custom operator gets activations in bfloat16 and a table in float32."""

import sys

import torch
from torch import Tensor, nn

from tests.audit.descend import train
from tests.layers import layers

faulty, word = sys.argv[1] == "faulty", f"add_table_{sys.argv[1]}"


def add_table(x: Tensor, table: Tensor) -> Tensor:
    return x * 0.5 + table.to(x.dtype)


def backward(ctx, gradient):
    return gradient * 0.5, gradient.sum(0).float() if faulty else gradient.sum(0)


if not hasattr(torch.ops.audit_tests, word):
    torch.library.custom_op(f"audit_tests::{word}", add_table, mutates_args=()).register_autograd(backward)
    for device in () if faulty else ("cpu", "cuda"):
        torch.library.register_autocast(f"audit_tests::{word}", device, torch.bfloat16)


@layers(lambda width: dict(inside=nn.Linear(width, width), table=nn.Parameter(torch.zeros(width))))
def Block(self, x):
    return getattr(torch.ops.audit_tests, word)(self.inside(x), self.table)  # expect: AMP801


model = nn.Sequential(Block(32), Block(32))
train(
    torch.optim.SGD(model.parameters(), lr=0.1),
    lambda: [torch.randn(8, 32)],
    lambda x: (model(x).float() - x).square().mean(),
)
