"""Models of libraries in which passes fire that the other models have no use for; the ablation measures them.

A tied table beside a tanh GELU (GPT-2), pooled images (EfficientNet), products written as einsums (XLNet), experts
(Mixtral), images of normalized groups (BiT), sequences before batches (``nn.TransformerEncoder``), a frozen one behind
prompts that train, attention as CompVis writes it, and transposed convolutions (a VAE).
"""

from collections.abc import Callable

import torch
from image_models import vae
from model_case import Case, classes, scaled, scores
from torch import Tensor, nn


def hf_gpt2(scale: float) -> Case:
    """Hugging Face's GPT-2 at its smallest size: 12 layers of 768, 50,257 words whose table is the head, 2 x 256."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=scaled(12, scale), use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return _language_model(GPT2LMHeadModel(config), 50_257, (2, 256))


def xlnet(scale: float) -> Case:
    """Hugging Face's XLNet, whose attention is written as einsums: 12 layers of 768, 4 x 128 tokens."""
    from transformers import XLNetConfig, XLNetForSequenceClassification

    config = XLNetConfig(n_layer=scaled(12, scale), dropout=0.0, use_mems_eval=False, use_mems_train=False)
    return _classifier(XLNetForSequenceClassification(config), torch.randint(0, 32_000, (4, 128)))


def mixtral(scale: float) -> Case:
    """Hugging Face's Mixtral, made narrow: 4 layers of 512, 8 experts of which 2 answer, 4 x 128 tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=8000, hidden_size=512, intermediate_size=1024, num_hidden_layers=scaled(4, scale),
        num_attention_heads=8, num_key_value_heads=2, use_cache=False, experts_implementation="grouped_mm",
    )  # fmt: skip
    return _language_model(MixtralForCausalLM(config), 8000, (4, 128))


def efficientnet(scale: float) -> Case:
    """Hugging Face's EfficientNet-B0, images of 128 px, in batches of 16."""
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, dropout_rate=0.0)
    return _image_classifier(EfficientNetForImageClassification(config), scaled(16, scale))


def bit(scale: float) -> Case:
    """Hugging Face's BiT, a ResNet-50 with group norms, images of 128 px, in batches of 16."""
    from transformers import BitConfig, BitForImageClassification

    return _image_classifier(BitForImageClassification(BitConfig()), scaled(16, scale))


def sequences_first(scale: float) -> Case:
    """PyTorch's own ``nn.TransformerEncoder`` as its tutorial has it: [tokens, batch, width], 4 layers of 512."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0)
    model = nn.TransformerEncoder(layer, scaled(4, scale), enable_nested_tensor=False)
    x = torch.randn(128, 8, 512)
    return Case(model, (x,), lambda m, x: m(x).square().mean(), lambda m, x: m(x))


class Prompted(nn.Module):
    """Visual prompt tuning: a frozen encoder that takes batches first, before which prompts train, and a head."""

    def __init__(self, layers: int, width: int = 384) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.requires_grad_(False)
        self.prompts, self.head = nn.Parameter(torch.randn(1, 10, width) / 50), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, 1000] for images."""
        patches = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.encoder(torch.cat([self.prompts.expand(len(x), -1, -1), patches], 1))[:, 0])


def prompt_tuning(scale: float) -> Case:
    """Prompts before a frozen ``nn.TransformerEncoder(batch_first=True)``: 6 layers of 384, 8 images of 224 px."""
    batch = scaled(8, scale)
    x, y = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    return Case(Prompted(scaled(6, scale)), (x, y), classes, scores, images=True)


class EinsumAttention(nn.Module):
    """Attention as CompVis' latent diffusion, and many a model after it, writes it: two Einstein sums."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, width] for ``x`` of that shape."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        weights = (torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale).softmax(-1)
        return self.to_out(torch.einsum("b h i j, b h j d -> b h i d", weights, v).transpose(1, 2).flatten(2))


class EinsumBlock(nn.Module):
    """A transformer block around that attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = EinsumAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, width]."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def einsum_attention(scale: float) -> Case:
    """Such blocks as in the middle of a diffusion model: 6 layers of 320, 8 heads, 4 images of 16 x 16 pixels."""
    blocks = nn.Sequential(*(EinsumBlock(320, 8) for _ in range(scaled(6, scale))))
    x, noise = torch.randn(scaled(4, scale), 256, 320), torch.randn(scaled(4, scale), 256, 320)
    return Case(blocks, (x, noise), lambda m, x, y: (m(x) - y).square().mean(), lambda m, x, _: m(x))


def _language_model(model: nn.Module, words: int, shape: tuple[int, int]) -> Case:
    ids = torch.randint(0, words, shape)
    return Case(model, (ids,), lambda m, x: m(input_ids=x, labels=x).loss, lambda m, x: m(input_ids=x).logits)


def _classifier(model: nn.Module, ids: Tensor) -> Case:
    labels = torch.randint(0, 2, ids.shape[:1])
    return Case(
        model, (ids, labels),
        lambda m, x, y: m(input_ids=x, labels=y).loss, lambda m, x, y: m(input_ids=x).logits,
    )  # fmt: skip


def _image_classifier(model: nn.Module, count: int) -> Case:
    images, labels = torch.randn(count, 3, 128, 128), torch.randint(0, 2, (count,))
    return Case(
        model, (images, labels),
        lambda m, x, y: m(x, labels=y).loss, lambda m, x, y: m(x).logits, images=True,
    )  # fmt: skip


LIBRARY: dict[str, Callable[[float], Case]] = {
    "hf_gpt2": hf_gpt2,
    "xlnet": xlnet,
    "mixtral": mixtral,
    "efficientnet": efficientnet,
    "bit": bit,
    "sequences_first": sequences_first,
    "prompt_tuning": prompt_tuning,
    "einsum_attention": einsum_attention,
    "vae": vae,
}
