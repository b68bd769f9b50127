"""Models small enough for a test to count the kernels of a step: one of each kind.

Before: a name, ``"tiny gpt"``. After: a model, a batch, and a loss of both.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from models import Block
from torch import Tensor, nn

Step = Callable[..., Tensor]


class Transformer(nn.Module):
    """Embeddings, blocks and logits; ``norm``: of the result. Small enough for a test."""

    def __init__(self, causal: bool, norm: nn.Module) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(50, 32), norm, nn.Linear(32, 50)
        self.blocks = nn.Sequential(*(Block(32, 2, causal) for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, length, 50]."""
        return self.head(self.norm(self.blocks(self.words(ids))))


class Separate(nn.Module):
    """Attention with projections of their own for queries, keys and values, normed heads, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.second = nn.Embedding(50, 32), nn.RMSNorm(32), nn.RMSNorm(32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.qn, self.gate, self.up, self.down = nn.RMSNorm(16), nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        """Return hidden states [batch, length, 32]."""
        x = self.words(ids)
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (2, 16)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.qn(q), self.qn(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Joined(nn.Module):
    """Casts by hand in front of a concat, which only the elimination of casts removes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return [2 * batch, 8]."""
        return self.last(torch.cat([self.first(x).to(torch.float32)] * 2))


def _convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def _ids() -> Tensor:
    return torch.randint(50, (2, 8))


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Step]] = {
    "tiny mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), lambda: torch.randn(2, 8),
                 lambda m, x: m(x).square().mean()),
    "tiny gpt": (lambda: Transformer(True, nn.LayerNorm(32)), _ids, _logits),
    "tiny bert": (lambda: Transformer(False, nn.LayerNorm(32)), _ids, _logits),
    "tiny llama": (Separate, _ids, lambda m, ids: m(ids).square().mean()),
    "tiny concat": (Joined, lambda: torch.randn(8, 8), lambda m, x: m(x).square().mean()),
    "tiny cnn": (_convolutions, lambda: torch.randn(2, 3, 8, 8), lambda m, x: m(x).logsumexp(-1).mean()),
}  # fmt: skip
