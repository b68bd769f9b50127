"""The demo's models: plain user code that knows nothing of mixed precision.

Before: ``ResNet()(images)``. After: the very same, since conversion asks for no change.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A small residual network for grey images."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128), classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)
        )
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.Sequential(*[BasicBlock(a, b, 1 if i == 0 else 2) for i, (a, b) in enumerate(pairs)])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each position reads from those before it."""
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (p.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and an MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after the block."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class CharGPT(nn.Module):
    """A character-level GPT, as one writes it by hand."""

    def __init__(
        self,
        symbols: int,
        length: int = 128,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(symbols, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next character at every position."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def narrow_stack(inputs: int = 256, width: int = 32, layers: int = 4, classes: int = 10) -> nn.Module:
    """Return a stack of narrow linear layers and tanhs, whose gradients are never zero but by rounding."""
    sizes = (inputs, *[width] * layers)
    hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))


def hf_gpt2(symbols: int, length: int = 128, width: int = 128, layers: int = 3, heads: int = 4) -> nn.Module:
    """Return Hugging Face's GPT-2, unmodified and small, with random weights; nothing is downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: Any = {"n_positions": length, "n_embd": width, "n_layer": layers, "n_head": heads}
    config = GPT2Config(vocab_size=symbols, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes)
    return GPT2LMHeadModel(config)
