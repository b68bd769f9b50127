"""Models of the `transformers` library with tiny random configurations, imported only when built.

Some get labels and compute the loss inside; for the others the loss is made of the logits outside.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .core import Inputs, add, args, normal
from .losses import classify, of, own, project

VOCAB, WIDTH, LAYERS, HEADS, TOKENS = 101, 32, 2, 4, 12
# Larger than the libraries' 0.02: at this width the attention would be uniform and its gradients nothing.
INIT = {"initializer_range": 0.15}
SIZES = dict(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=64, **INIT)
TEXT = dict(SIZES, vocab_size=VOCAB, max_position_embeddings=32)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def built(name: str, task: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return what builds a model, ``"Bert"`` with the head ``"ForMaskedLM"``, of random weights."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, name + task)(getattr(transformers, f"{name}Config")(**sizes))

    return build


def _ids(batch: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, tokens))


def _padding(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return mask


def _masked_lm() -> Inputs:
    ids = _ids()
    return args(input_ids=ids, attention_mask=_padding(ids), labels=ids.roll(1, 1))


def _causal_lm() -> Inputs:
    ids = _ids()
    return args(input_ids=ids, labels=ids)


def _classification() -> Inputs:
    ids = _ids(4)
    return args(input_ids=ids, attention_mask=_padding(ids))


def _image_and_text() -> Inputs:
    ids = _ids(4, 8)
    ids[:, -1] = 2
    return args(input_ids=ids, pixel_values=torch.randn(4, 3, 16, 16), return_loss=True)


for _attention in ("sdpa", "eager"):
    add(f"bert_{_attention}", _masked_lm, own, "transformers", "loss_inside")(
        built("Bert", "ForMaskedLM", **TEXT, **NO_DROPOUT, attn_implementation=_attention)
    )
add("gpt2", lambda: args(input_ids=_ids()), of("logits", classify), "transformers", "tied")(built(
    "GPT2", "LMHeadModel", vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=32,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=1, **INIT,
))  # fmt: skip
add("llama_gqa", _causal_lm, own, "transformers", "loss_inside", "rms_norm")(
    built("Llama", "ForCausalLM", **TEXT, num_key_value_heads=2, use_cache=False)
)
# Its GELU is an ``autograd.Function`` of the library's own, its positions are biases of the scores.
add("bloom", _causal_lm, own, "transformers", "loss_inside", "tied", "autograd_function")(built(
    "Bloom", "ForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=False,
    hidden_dropout=0.0, attention_dropout=0.0, bos_token_id=0, eos_token_id=1, pad_token_id=2, **INIT,
))  # fmt: skip
add("t5", lambda: args(input_ids=_ids(), labels=_ids(2, 7)), own, "transformers", "loss_inside", "rms_norm")(built(
    "T5", "ForConditionalGeneration", vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=LAYERS,
    num_heads=HEADS, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, feed_forward_proj="gated-gelu",
))  # fmt: skip
add("vit", normal((4, 3, 16, 16)), of("logits", classify), "transformers", "vision")(
    built("ViT", "ForImageClassification", **SIZES, **NO_DROPOUT, image_size=16, patch_size=4, num_labels=5)
)
add("distilbert", _classification, of("logits", classify), "transformers")(built(
    "DistilBert", "ForSequenceClassification", vocab_size=VOCAB, dim=WIDTH, n_layers=LAYERS, n_heads=HEADS,
    hidden_dim=64, num_labels=3, max_position_embeddings=32, dropout=0.0, attention_dropout=0.0,
    seq_classif_dropout=0.0, **INIT,
))  # fmt: skip
for _experts, _tag in (("eager", "data_dependent"), ("grouped_mm", "no_fp64")):
    _name = f"mixtral_{_experts.removesuffix('_mm')}"
    add(_name, _causal_lm, own, "transformers", "loss_inside", "moe", "rms_norm", _tag)(built(
        "Mixtral", "ForCausalLM", **{**TEXT, "intermediate_size": 32}, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, use_cache=False, output_router_logits=True, router_aux_loss_coef=0.1,
        experts_implementation=_experts,
    ))  # fmt: skip
add(
    "whisper", lambda: args(input_features=torch.randn(2, 8, 40), labels=_ids(2, 7)), own, "transformers",
    "loss_inside", "audio",
)(built(
    "Whisper", "ForConditionalGeneration", vocab_size=VOCAB, d_model=WIDTH, encoder_layers=1, decoder_layers=1,
    encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=64, decoder_ffn_dim=64,
    num_mel_bins=8, max_source_positions=20, max_target_positions=16, dropout=0.0, use_cache=False, init_std=0.15,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
))  # fmt: skip
add("convnext", normal((4, 3, 32, 32)), of("logits", classify), "transformers", "cnn", "vision")(built(
    "ConvNext", "ForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5,
    image_size=32, layer_scale_init_value=0.5, **INIT,
))  # fmt: skip
add("albert", _masked_lm, own, "transformers", "loss_inside", "tied", "repeated")(
    built("Albert", "ForMaskedLM", **{**TEXT, "num_hidden_layers": 3}, embedding_size=16, num_hidden_groups=1)
)
_part = dict(hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1, num_attention_heads=HEADS)
add("clip", _image_and_text, own, "transformers", "loss_inside", "vision")(built(
    "CLIP", "Model", projection_dim=16, vision_config=dict(_part, image_size=16, patch_size=8),
    text_config=dict(
        _part, vocab_size=VOCAB, max_position_embeddings=16, eos_token_id=2, bos_token_id=1, pad_token_id=0
    ),
))  # fmt: skip
add("wav2vec2", normal((2, 400)), of("last_hidden_state", project), "transformers", "audio")(built(
    "Wav2Vec2", "Model", **{**SIZES, "num_hidden_layers": 1}, conv_dim=(16, 16), conv_stride=(4, 2),
    conv_kernel=(8, 3), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, hidden_dropout=0.0,
    attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0,
    apply_spec_augment=False,
))  # fmt: skip
