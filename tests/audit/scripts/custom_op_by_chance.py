"""A kernel of a library runs low because a layer before it does."""

import sys

import torch
from torch import nn

word = sys.argv[1]
if not hasattr(torch.ops.audit_tests, f"gate_{word}"):
    name = f"audit_tests::gate_{word}"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "default", lambda x: x * 2)
    torch.library.register_autograd(name, lambda ctx, g: g * 2)
    if word == "right":
        for device in ("cpu", "cuda"):
            torch.library.register_autocast(name, device, torch.bfloat16)


def gated(x):
    return getattr(torch.ops.audit_tests, f"gate_{word}")(x)  # expect: AMP802


def main():
    first, last = nn.Linear(16, 64), nn.Linear(64, 4)
    optimizer = torch.optim.Adam([*first.parameters(), *last.parameters()])
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = last(gated(first(torch.randn(8, 16))))
        loss = nn.functional.cross_entropy(logits.float(), torch.randint(4, (8,)))
        loss.backward()
        optimizer.step()
        print(loss.item())


main()
