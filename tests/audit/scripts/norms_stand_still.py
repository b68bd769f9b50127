"""A ViT-like model in bfloat16: its weights move, and its norms at 1.0 do not."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        for part in (self.qkv, self.out, self.mlp[0], self.mlp[2]):
            nn.init.normal_(part.weight, std=0.02)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


@layers(
    lambda: dict(
        patches=nn.Conv2d(3, 32, 4, 4), blocks=nn.Sequential(Block(32, 2), Block(32, 2)), head=nn.Linear(32, 10)
    )
)
def ViT(self, images):
    return self.head(self.blocks(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


model = ViT().bfloat16()
if sys.argv[1] == "right":
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
for _ in range(4):
    images, labels = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    loss = F.cross_entropy(model(images.bfloat16()).float(), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # expect: AMP302
    print(loss.item())
