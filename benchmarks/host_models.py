"""Models of no size, for the benchmark of host time: each kernel takes a few microseconds, so calls are all there is.

Before: a name, ``"bert"``. After: ``Case(model, batch, loss, infer)``, as of the larger models in ``models.py``.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from model_case import Case, classes, scores
from torch import Tensor, nn

WIDTH, ROWS, TOKENS, WORDS = 32, 8, 8, 64


def _near(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), y)


def linear() -> Case:
    """One linear of width 32, 8 rows."""
    return Case(nn.Linear(WIDTH, WIDTH), (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)), _near, scores)


def linears() -> Case:
    """12 linears of width 32, each with a GELU behind it, 8 rows."""
    layers = (layer for _ in range(12) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
    return Case(nn.Sequential(*layers), (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)), _near, scores)


def cnn() -> Case:
    """3 convolutions of 16 channels with batch norm and relu, 2 images of 8 pixels, a linear at the end."""
    layers: list[nn.Module] = []
    for channels in (3, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(16, 10))
    return Case(model, (torch.randn(2, 3, 8, 8), torch.randint(10, (2,))), classes, scores)


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


def unet() -> Case:
    """That U-Net on one image of 16 pixels."""
    return Case(Unet(), (torch.randn(1, 3, 16, 16), torch.randn(1, 3, 16, 16)), _near, scores)


class Lstm(nn.Module):
    """An embedding, one LSTM layer of 32, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, length, words]."""
        return self.head(self.lstm(self.words(ids))[0])


def lstm() -> Case:
    """That LSTM on 2 texts of 8 tokens."""
    ids = torch.randint(WORDS, (2, TOKENS))
    targets = ids.roll(-1, 1).flatten()
    return Case(Lstm(), (ids, targets), lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y), lambda m, x, _: m(x))


def bert() -> Case:
    """Hugging Face's BERT for masked words: 4 layers of width 32, 2 heads, 2 texts of 8 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=2, intermediate_size=4 * WIDTH,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=TOKENS,
    )  # fmt: skip
    return _of_words(BertForMaskedLM(config))


def llama() -> Case:
    """Hugging Face's Llama: 2 layers of width 32, 2 heads, 2 texts of 8 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=2 * WIDTH,
        max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return _of_words(LlamaForCausalLM(config))


def _of_words(model: nn.Module) -> Case:
    ids = torch.randint(WORDS, (2, TOKENS))
    return Case(model, (ids,), lambda m, x: m(input_ids=x, labels=x).loss, lambda m, x: m(input_ids=x).logits)


MODELS: dict[str, Callable[[], Case]] = {
    "linear": linear,
    "linears": linears,
    "cnn": cnn,
    "unet": unet,
    "lstm": lstm,
    "bert": bert,
    "llama": llama,
}
