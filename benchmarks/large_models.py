"""Models at the sizes that people train on one GPU, where the GPU is the bottleneck and not Python.

Before: ``MODELS`` of ``models.py``, which wait for Python on a GPU. After: ``LARGE``, for ``speed.py --models``. As
there, ``scale`` multiplies batches and depths, never widths, lengths or image sizes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from image_models import resnet50
from model_case import Case, classes, scaled, scores
from torch import Tensor, nn


def bert_base(scale: float, texts: int = 64, length: int = 512) -> Case:
    """Hugging Face's BERT-base for masked words, with its own dropout."""
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(num_hidden_layers=scaled(12, scale)))
    return _words(model, torch.randint(30_522, (scaled(texts, scale), length)))


def gpt2_medium(scale: float, texts: int = 8, length: int = 1024) -> Case:
    """Hugging Face's GPT-2 medium, with its own dropout."""
    return gpt2(scale, texts, length, width=1024, layers=24, heads=16)


def gpt2(scale: float, texts: int, length: int, width: int, layers: int, heads: int) -> Case:
    """Hugging Face's GPT-2 of any size, with its own dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=width, n_layer=scaled(layers, scale), n_head=heads, use_cache=False)
    return _words(GPT2LMHeadModel(config), torch.randint(50_257, (scaled(texts, scale), length)))


def llama_1b(scale: float) -> Case:
    """Hugging Face's Llama with the sizes of Llama 3.2 1B: a step of 8 micro-batches of one text of 2,048 tokens."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(_llama(scaled(16, scale)))
    return _words(model, torch.randint(128_256, (1, 2048)), micro_batches=scaled(8, scale))


def llama_block(scale: float, texts: int = 4, length: int = 2048) -> Case:
    """One block of that model, on texts that are embedded already."""
    from transformers import LlamaModel

    model = LlamaModel(_llama(1))
    model.embed_tokens = None  # its table would be most of the optimizer's work
    x = torch.randn(scaled(texts, scale), length, 2048)
    return Case(
        model,
        (x,),
        lambda m, x: m(inputs_embeds=x).last_hidden_state.square().mean(),
        lambda m, x: m(inputs_embeds=x).last_hidden_state,
    )


def _llama(layers: int):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True, use_cache=False,
        max_position_embeddings=4096,
    )  # fmt: skip


def _words(model: nn.Module, ids: Tensor, micro_batches: int = 1) -> Case:
    return Case(
        model,
        (ids,),
        lambda m, ids: m(input_ids=ids, labels=ids).loss,
        lambda m, ids: m(input_ids=ids).logits,
        micro_batches=micro_batches,
    )


def vit_base(scale: float, images: int = 128) -> Case:
    """ViT-B/16 on images of 224 px."""
    from models import Vit

    batch = scaled(images, scale)
    x, y = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    return Case(Vit(scaled(12, scale), width=768, heads=12), (x, y), classes, scores, images=True)


# -- a U-Net as that of Stable Diffusion 1.5 ---------------------------------------------------------------


class Resnet(nn.Module):
    """Two convolutions behind group norms, the time's embedding added between them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, before), nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(1280, after)
        self.norm2, self.conv2 = nn.GroupNorm(32, after), nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return [batch, after, height, width]."""
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class CrossAttention(nn.Module):
    """Attention of 8 heads over a text, or over the image itself."""

    def __init__(self, width: int, over: int) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = nn.Linear(over, width, bias=False), nn.Linear(over, width, bias=False)

    def forward(self, x: Tensor, over: Tensor) -> Tensor:
        """Return [batch, positions, width]."""
        q, k, v = (t.unflatten(-1, (8, -1)).transpose(1, 2) for t in (self.q(x), self.k(over), self.v(over)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Self-attention, attention over the text, and a gated MLP, for each pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.before = nn.GroupNorm(32, width), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.text = CrossAttention(width, width), CrossAttention(width, 768)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.after = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """Return a tensor of the image's shape."""
        h = self.before(self.norm(x)).flatten(2).transpose(1, 2)
        normed = self.norms[0](h)
        h = h + self.own(normed, normed)
        h = h + self.text(self.norms[1](h), text)
        value, gate = self.up(self.norms[2](h)).chunk(2, -1)
        h = h + self.down(value * F.gelu(gate))
        return x + self.after(h.transpose(1, 2).unflatten(2, x.shape[2:]))


class Level(nn.Module):
    """A resnet, and a transformer behind it where there is attention."""

    def __init__(self, before: int, after: int, attention: bool) -> None:
        super().__init__()
        self.resnet, self.transformer = Resnet(before, after), Transformer(after) if attention else None

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """Return [batch, after, height, width]."""
        x = self.resnet(x, time)
        return x if self.transformer is None else self.transformer(x, text)


class DiffusionUnet(nn.Module):
    """Levels of 320, 640, 1280 and 1280 channels, attention on the first three."""

    WIDTHS = (320, 640, 1280, 1280)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.time = nn.Conv2d(4, 320, 3, padding=1), nn.Sequential(nn.Linear(320, 1280), nn.SiLU())
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        kept, width = [320], 320
        for i, after in enumerate(self.WIDTHS):
            self.down.append(nn.ModuleList([Level(width, after, i < 3), Level(after, after, i < 3)]))
            self.shrink.append(nn.Conv2d(after, after, 3, 2, 1) if i < 3 else nn.Identity())
            kept += [after, after] + [after] * (i < 3)
            width = after
        self.middle = nn.ModuleList([Level(1280, 1280, True), Level(1280, 1280, False)])
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for i, after in reversed(list(enumerate(self.WIDTHS))):
            parts = []
            for _ in range(3):
                parts.append(Level(width + kept.pop(), after, i < 3))
                width = after
            self.up.append(nn.ModuleList(parts))
            self.grow.append(nn.Conv2d(after, after, 3, padding=1) if i else nn.Identity())
        self.norm, self.last = nn.GroupNorm(32, 320), nn.Conv2d(320, 4, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """Return the noise [batch, 4, 64, 64] in ``x``, at ``time`` [batch, 320] for ``text`` [batch, 77, 768]."""
        time, x = self.time(time), self.first(x)
        kept = [x]
        for parts, shrink in zip(self.down, self.shrink, strict=True):
            for part in parts:
                x = part(x, time, text)
                kept.append(x)
            if isinstance(shrink, nn.Conv2d):
                x = shrink(x)
                kept.append(x)
        for part in self.middle:
            x = part(x, time, text)
        for parts, grow in zip(self.up, self.grow, strict=True):
            for part in parts:
                x = part(torch.cat([x, kept.pop()], 1), time, text)
            if isinstance(grow, nn.Conv2d):
                x = grow(F.interpolate(x, scale_factor=2.0))
        return self.last(F.silu(self.norm(x)))


def diffusion_unet(scale: float) -> Case:
    """A U-Net of Stable Diffusion 1.5's sizes, 8 latents of 64 x 64 and texts of 77 words."""
    batch = scaled(8, scale)
    x, noise = torch.randn(2, batch, 4, 64, 64)
    time, text = torch.randn(batch, 320), torch.randn(batch, 77, 768)
    return Case(
        DiffusionUnet(),
        (x, time, text, noise),
        lambda m, x, time, text, noise: F.mse_loss(m(x, time, text), noise),
        lambda m, x, time, text, _: m(x, time, text),
        images=True,
    )


LARGE: dict[str, Callable[[float], Case]] = {
    "gpt2_medium": gpt2_medium,
    "bert_base": bert_base,
    "resnet50_256": lambda scale: resnet50(scale, images=256, side=224),
    "vit_base": vit_base,
    "llama_block": llama_block,
    "llama_1b": llama_1b,
    "diffusion_unet": diffusion_unet,
}
