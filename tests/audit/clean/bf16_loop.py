"""A plain loop under bf16 autocast: a small transformer on random tokens."""

import torch
from torch import nn

from tests.layers import layers


@layers(
    lambda width: dict(
        attention=nn.MultiheadAttention(width, 4, batch_first=True),
        mlp=nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        norms=nn.ModuleList(nn.LayerNorm(width) for _ in range(2)),
    )
)
def Block(self, x):
    y = self.norms[0](x)
    x = x + self.attention(y, y, y, need_weights=False)[0]
    return x + self.mlp(self.norms[1](x))


model = nn.Sequential(nn.Embedding(100, 64), Block(64), Block(64), nn.LayerNorm(64), nn.Linear(64, 100))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    tokens = torch.randint(100, (4, 17))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(loss.item())
