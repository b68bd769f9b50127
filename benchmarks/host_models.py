"""Models of no size, for the benchmark of host time: each kernel takes a few microseconds, so calls are all there is.

Before: a name, ``"bert_16"``. After: ``Case(model, batch, loss, infer)``, as of the larger models in ``models.py``.
The number is that of rows, tokens, steps or pixels. The least of each multiplies up to 4,096 times in a product, which
torch computes itself; with more it calls oneDNN, which takes 10 to 20 us longer.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from model_case import Case, classes, scores
from torch import Tensor, nn

WIDTH, WORDS = 32, 64


def _near(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), y)


def linear(rows: int) -> Case:
    """One linear of width 32."""
    return Case(nn.Linear(WIDTH, WIDTH), (torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)), _near, scores)


def linears(rows: int) -> Case:
    """12 linears of width 32, each with a GELU behind it."""
    layers = (layer for _ in range(12) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
    return Case(nn.Sequential(*layers), (torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)), _near, scores)


def cnn(size: int) -> Case:
    """3 convolutions of 16 channels with batch norm and relu on 2 images, a linear at the end."""
    layers: list[nn.Module] = []
    for channels in (3, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(16, 10))
    return Case(model, (torch.randn(2, 3, size, size), torch.randint(10, (2,))), classes, scores)


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU(),
    )  # fmt: skip


class Unet(nn.Module):
    """Two levels down and up, 8 channels at the top, group norms and SiLUs as in diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_double(3, 8), _double(8, 16)])
        self.middle = _double(16, 32)
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.join = nn.ModuleList([_double(32, 16), _double(16, 8)])
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of the size of ``x``."""
        kept = []
        for part in self.down:
            kept.append(part(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return self.last(x)


def unet(size: int) -> Case:
    """That U-Net on one image."""
    return Case(Unet(), (torch.randn(1, 3, size, size), torch.randn(1, 3, size, size)), _near, scores)


class Lstm(nn.Module):
    """An embedding, one LSTM layer of 32, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, length, words]."""
        return self.head(self.lstm(self.words(ids))[0])


def lstm(steps: int) -> Case:
    """That LSTM on 2 texts."""
    ids = torch.randint(WORDS, (2, steps))
    targets = ids.roll(-1, 1).flatten()
    return Case(Lstm(), (ids, targets), lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y), lambda m, x, _: m(x))


def bert(tokens: int) -> Case:
    """Hugging Face's BERT for masked words: 4 layers of width 32, 2 heads, 2 texts."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=2, intermediate_size=4 * WIDTH,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=WORDS,
    )  # fmt: skip
    return _of_words(BertForMaskedLM(config), tokens)


def llama(tokens: int) -> Case:
    """Hugging Face's Llama: 2 layers of width 32, 2 heads, 2 texts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=2 * WIDTH,
        max_position_embeddings=WORDS, use_cache=False,
    )  # fmt: skip
    return _of_words(LlamaForCausalLM(config), tokens)


def _of_words(model: nn.Module, tokens: int) -> Case:
    ids = torch.randint(WORDS, (2, tokens // 2))
    return Case(model, (ids,), lambda m, x: m(input_ids=x, labels=x).loss, lambda m, x: m(input_ids=x).logits)


SIZES: dict[Callable[[int], Case], tuple[int, ...]] = {
    linear: (4, 32),
    linears: (4, 32),
    cnn: (4, 8),
    unet: (8, 16),
    lstm: (2, 8),
    bert: (4, 16),
    llama: (4, 16),
}
MODELS: dict[str, Callable[[], Case]] = {
    f"{make.__name__}_{size}": partial(make, size) for make, sizes in SIZES.items() for size in sizes
}
