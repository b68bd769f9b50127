"""A vision transformer under bf16 autocast: drop path, a warmup, an average of weights in float32, and a metric."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.layers import layers


class Block(nn.Module):
    def __init__(self, width, heads, drop):
        super().__init__()
        self.heads, self.drop = heads, drop
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def path(self, x):
        keep = 1 - self.drop
        return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(keep) / keep if self.training else x

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.path(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.path(self.mlp(self.norm2(x)))


@layers(
    lambda width=48: dict(
        patches=nn.Conv2d(3, width, 8, 8),
        token=nn.Parameter(torch.zeros(1, 1, width)),
        positions=nn.Parameter(0.02 * torch.randn(1, 17, width)),
        blocks=nn.ModuleList(Block(width, 3, 0.1 * i) for i in range(3)),
        norm=nn.LayerNorm(width),
        head=nn.Linear(width, 10),
    )
)
def ViT(self, images):
    x = self.patches(images).flatten(2).transpose(1, 2)
    x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
    for block in self.blocks:
        x = block(x)
    return self.head(self.norm(x)[:, 0])


model = ViT()
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
right = 0
for _ in range(5):
    images, labels = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    right += (logits.argmax(-1) == labels).sum().item()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warmup.step()
    average.update_parameters(model)
    print(loss.item(), right)
