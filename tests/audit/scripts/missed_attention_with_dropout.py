"""Dropout inside of an attention on a CPU: torch has no fused kernel for that, and computes in float32."""

import sys

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)  # expect: AMP607
        return self.out(y.transpose(1, 2).flatten(2))


torch.manual_seed(0)
model = Attention(64, 0.1 if sys.argv[1] == "faulty" else 0.0)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    x = torch.randn(2, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x) - x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
