"""Models of libraries in which passes fire that the other models have no use for; the ablation measures them.

A tied table beside a tanh GELU (GPT-2), pooled images (EfficientNet), products written as einsums (XLNet), experts
(Mixtral), images of normalized groups (BiT), and sequences before batches (``nn.TransformerEncoder``).
"""

from collections.abc import Callable

import torch
from model_case import Case, scaled
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
}
