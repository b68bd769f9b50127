"""The transformer block of the picture in README.md: ``build`` gives it and an input to ``amp-graph dump``."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A pre-norm block of a GPT: causal attention and a two-layer MLP, each added to the residual stream."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream behind the block."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def build() -> tuple[nn.Module, torch.Tensor]:
    """Return the block and a batch of 4 sequences of 128 tokens."""
    return Block(), torch.randn(4, 128, 256)
