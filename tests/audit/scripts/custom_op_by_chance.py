"""A kernel of a library runs low because a layer before it does."""

import sys

import torch
from torch import nn

from tests.audit.descend import train

word = sys.argv[1]
if not hasattr(torch.ops.audit_tests, f"gate_{word}"):
    name = f"audit_tests::gate_{word}"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "default", lambda x: x * 2)
    torch.library.register_autograd(name, lambda ctx, g: g * 2)
    for device in ("cpu", "cuda") if word == "right" else ():
        torch.library.register_autocast(name, device, torch.bfloat16)


def gated(x):
    return getattr(torch.ops.audit_tests, f"gate_{word}")(x)  # expect: AMP802


first, last = nn.Linear(16, 64), nn.Linear(64, 4)
train(
    torch.optim.Adam([*first.parameters(), *last.parameters()]),
    lambda: (torch.randn(8, 16), torch.randint(4, (8,))),
    lambda x, y: nn.functional.cross_entropy(last(gated(first(x))).float(), y),
)
