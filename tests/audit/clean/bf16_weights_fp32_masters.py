"""bfloat16 weights whose float32 masters are kept by hand, and a rotary transformer with an RMS norm in float32."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers


@layers(lambda width: dict(weight=nn.Parameter(torch.ones(width))))
def RMSNorm(self, x):
    wide = x.float()
    return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(*size, bias=False) for size in ((width, 96), (width, 96), (96, width))
        )

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@layers(
    lambda words=80, width=48, heads=3: dict(
        embed=nn.Embedding(words, width),
        norm=RMSNorm(width),
        blocks=nn.ModuleList(Block(width, heads) for _ in range(2)),
        head=nn.Linear(width, words, bias=False),
        per_head=width // heads,
    )
)
def Llama(self, tokens):
    frequencies = 10_000.0 ** (-torch.arange(0, self.per_head, 2).float() / self.per_head)
    angles = torch.arange(tokens.shape[1]).float()[:, None] * frequencies
    x = self.embed(tokens)
    for block in self.blocks:
        x = block(x, angles.cos(), angles.sin())
    return self.head(self.norm(x))


model = Llama().bfloat16()
weights = list(model.parameters())
masters = [p.detach().float() for p in weights]
optimizer = torch.optim.AdamW(masters, lr=1e-3, betas=(0.9, 0.95))
for _ in range(4):
    tokens = torch.randint(80, (2, 301))
    loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    for master, p in zip(masters, weights, strict=True):
        master.grad, p.grad = p.grad.float(), None
    norm = nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    with torch.no_grad():
        torch._foreach_copy_(weights, masters)
    print(loss.item(), norm.item())
