"""Nine models to measure speed on, each with a batch, a loss and an inference call.

Before: a name, ``"vit"``. After: ``Case(model, batch, loss, infer)``; ``loss(model, *batch)`` is what trains. ``scale``
multiplies batches and depths, never widths, lengths or image sizes, which decide what pays.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from adapters import with_adapters
from image_models import ghostnet, resnet50, unet, vgg11
from large_models import LARGE
from library_models import LIBRARY
from memory_models import MEMORY
from model_case import Case, classes, scaled, scores
from torch import Tensor, nn


def case(name: str, scale: float = 1.0, device: str = "cpu") -> Case:
    """Build the model ``name`` and its batch on ``device``, the same ones at every call."""
    torch.manual_seed(0)
    with torch.device(device):
        return (MODELS | MORE)[name](scale)


# -- mlp, dlrm -------------------------------------------------------------------------------------------


def mlp(scale: float) -> Case:
    """Three layers of 256 at batch 32: where call overhead is all there is."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    x = torch.randn(32, 256)
    return Case(model, (x,), lambda m, x: m(x).square().mean(), lambda m, x: m(x))


class Dlrm(nn.Module):
    """8 tables of 20,000 x 64, two towers of linears, and the products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20_000, 64, mode="sum") for _ in range(8))
        self.bottom = _tower(13, 512, 256, 64)
        self.top = _tower(64 + 36, 512, 256, 1)
        self.register_buffer("pairs", torch.tril_indices(9, 9, -1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Return logits [batch] for ``dense`` [batch, 13] and ``sparse`` [batch, 8, 4]."""
        bottom = F.relu(self.bottom(dense))
        features = torch.stack([bottom, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = features @ features.transpose(1, 2)
        chosen = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, chosen], 1)).squeeze(1)


def _tower(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def dlrm(scale: float) -> Case:
    """A recommendation model: embedding bags and small linears over a large batch."""
    batch = scaled(2048, scale)
    dense, sparse, y = torch.randn(batch, 13), torch.randint(20_000, (batch, 8, 4)), torch.rand(batch).round()
    return Case(
        Dlrm(),
        (dense, sparse, y),
        lambda m, dense, sparse, y: F.binary_cross_entropy_with_logits(m(dense, sparse), y),
        lambda m, dense, sparse, y: m(dense, sparse),
    )


# -- transformers ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, width] for ``x`` of that shape."""
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, width]."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """Patches of 16 of a 224 px image, a class token, blocks of width 384 with 6 heads unless told otherwise."""

    def __init__(self, layers: int, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 197, width) / 50)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, 1000] for ``x`` [batch, 3, 224, 224]."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit(scale: float) -> Case:
    """A vision transformer, width 384, 6 layers, 8 images of 224 px."""
    batch = scaled(8, scale)
    x, y = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    return Case(Vit(scaled(6, scale)), (x, y), classes, scores, images=True)


class Gpt(nn.Module):
    """nanoGPT: tied head, loss inside, width 768, 12 heads, 256 tokens, 16,384 words."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(16_384, 768), nn.Embedding(256, 768)
        self.blocks = nn.Sequential(*(Block(768, 12, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 16_384, bias=False)
        self.apply(_small)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return logits and the loss; without targets the logits of the last token, as nanoGPT does."""
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.norm(self.blocks(x))
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def _small(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def gpt(scale: float) -> Case:
    """A GPT of 4 layers x 768, 4 texts of 256 tokens."""
    ids = torch.randint(16_384, (scaled(4, scale), 256))
    batch = (ids, ids.roll(-1, 1))
    return Case(Gpt(scaled(4, scale)), batch, lambda m, ids, targets: m(ids, targets)[1], lambda m, ids, _: m(ids)[0])


def gpt_decoding(length: int) -> Case:
    """The same GPT where one text of ``length`` tokens is continued: inference at batch 1; trains on that text, too."""
    ids = torch.randint(16_384, (1, length))
    batch = (ids, ids.roll(-1, 1))
    return Case(Gpt(4), batch, lambda m, ids, targets: m(ids, targets)[1], lambda m, ids, _: m(ids)[0])


def bert(scale: float, attention: str, dropout: float = 0.0) -> Case:
    """Hugging Face's BERT for masked words: 4 layers x 768, 8 texts of 128 tokens; its own dropout is 0.1."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=10_240,
        num_hidden_layers=scaled(4, scale),
        attn_implementation=attention,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    ids = torch.randint(10_240, (scaled(8, scale), 128))
    return Case(
        BertForMaskedLM(config),
        (ids,),
        lambda m, ids: m(input_ids=ids, labels=ids).loss,
        lambda m, ids: m(input_ids=ids).logits,
    )


def swin(scale: float) -> Case:
    """Hugging Face's Swin, whose windows' scores have a bias that is learned: 8 layers, 8 images of 112 px."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=112, embed_dim=96, depths=[2, 2, scaled(4, scale)], num_heads=[3, 6, 12], num_labels=1000
    )
    batch = scaled(8, scale)
    x, y = torch.randn(batch, 3, 112, 112), torch.randint(1000, (batch,))
    return Case(
        SwinForImageClassification(config),
        (x, y),
        lambda m, x, y: m(pixel_values=x, labels=y).loss,
        lambda m, x, _: m(pixel_values=x).logits,
        images=True,
    )


# -- lstm ------------------------------------------------------------------------------------------------


class Lstm(nn.Module):
    """Two layers of 512 over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(8192, 512), nn.LSTM(512, 512, 2, batch_first=True)
        self.head = nn.Linear(512, 8192)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, length, 8192]."""
        return self.head(self.lstm(self.words(ids))[0])


def lstm(scale: float) -> Case:
    """A language model of two LSTM layers, 32 texts of 64 tokens."""
    ids = torch.randint(8192, (scaled(32, scale), 64))
    targets = ids.roll(-1, 1).flatten()
    return Case(
        Lstm(),
        (ids, targets),
        lambda m, ids, targets: F.cross_entropy(m(ids).flatten(0, 1), targets),
        lambda m, ids, _: m(ids),
    )


def bloom(scale: float) -> Case:
    """Hugging Face's BLOOM, with attention written out and a GELU of its own: 4 layers of 768, 4 x 128 tokens."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=4000, hidden_size=768, n_layer=scaled(4, scale), n_head=12, use_cache=False)
    ids = torch.randint(10, 4000, (4, 128))
    return Case(
        BloomForCausalLM(config),
        (ids,),
        lambda m, x: m(input_ids=x, labels=x).loss,
        lambda m, x: m(input_ids=x).logits,
    )


def wav2vec2(scale: float) -> Case:
    """Hugging Face's wav2vec2: 7 convolutions of 4 times a second of sound, and 3 layers of 256."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        hidden_size=256, num_hidden_layers=scaled(3, scale), num_attention_heads=4, intermediate_size=1024,
        apply_spec_augment=False, layerdrop=0.0, num_labels=10,
    )  # fmt: skip
    x, y = torch.randn(4, 16_000), torch.randint(10, (4,))
    return Case(
        Wav2Vec2ForSequenceClassification(config),
        (x, y),
        lambda m, x, y: m(input_values=x, labels=y).loss,
        lambda m, x, _: m(input_values=x).logits,
    )


# Not measured unless named: ``--models gpt_1 --modes inference``.
MORE: dict[str, Callable[[float], Case]] = {
    **{f"gpt_{length}": lambda scale, length=length: gpt_decoding(length) for length in (1, 16, 64)},
    "gpt_lora": lambda scale: with_adapters(gpt(scale)),
    "bert_dropout": lambda scale: bert(scale, "sdpa", 0.1),
    "swin": swin,
    "bloom": bloom,
    "wav2vec2": wav2vec2,
    "vgg11": vgg11,
    "ghostnet": ghostnet,
    **LIBRARY,
    **LARGE,
    **MEMORY,
}
MODELS: dict[str, Callable[[float], Case]] = {
    "mlp": mlp,
    "dlrm": dlrm,
    "vit": vit,
    "gpt": gpt,
    "bert_sdpa": lambda scale: bert(scale, "sdpa"),
    "bert_eager": lambda scale: bert(scale, "eager"),
    "resnet50": resnet50,
    "unet": unet,
    "lstm": lstm,
}
