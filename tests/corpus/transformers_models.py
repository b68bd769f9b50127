"""Models of the `transformers` library with tiny random configurations, imported only when built.

Some get labels and compute the loss inside; for the others the loss is made of the logits outside.
"""

import torch
from torch import nn

from .core import Inputs, add, args
from .losses import classify, of, own, project

VOCAB, WIDTH, LAYERS, HEADS, TOKENS = 101, 32, 2, 4, 12
# Larger than the libraries' 0.02: at this width the attention would be uniform and its gradients nothing.
INIT = {"initializer_range": 0.15}


def _ids(batch: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, tokens))


def _padding(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return mask


def _masked_lm() -> Inputs:
    ids = _ids()
    return args(input_ids=ids, attention_mask=_padding(ids), labels=ids.roll(1, 1))


def _bert(attention: str) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=64, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation=attention, **INIT,
    )  # fmt: skip
    return BertForMaskedLM(config)


add("bert_sdpa", lambda: _bert("sdpa"), _masked_lm, own, "transformers", "loss_inside")
add("bert_eager", lambda: _bert("eager"), _masked_lm, own, "transformers", "loss_inside")


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=1, **INIT,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


add("gpt2", _gpt2, lambda: args(input_ids=_ids()), of("logits", classify), "transformers", "tied")


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=2, intermediate_size=64, max_position_embeddings=32, use_cache=False, **INIT,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _causal_lm() -> Inputs:
    ids = _ids()
    return args(input_ids=ids, labels=ids)


add("llama_gqa", _llama, _causal_lm, own, "transformers", "loss_inside", "rms_norm")


def _bloom() -> nn.Module:
    """Its GELU is an ``autograd.Function`` of the library's own, its positions are biases of the scores."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=False, hidden_dropout=0.0,
        attention_dropout=0.0, bos_token_id=0, eos_token_id=1, pad_token_id=2, **INIT,
    )  # fmt: skip
    return BloomForCausalLM(config)


add("bloom", _bloom, _causal_lm, own, "transformers", "loss_inside", "tied", "autograd_function")


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=LAYERS, num_heads=HEADS,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


add(
    "t5",
    _t5,
    lambda: args(input_ids=_ids(), labels=_ids(2, 7)),
    own,
    "transformers",
    "loss_inside",
    "rms_norm",
)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=64,
        image_size=16, patch_size=4, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        **INIT,
    )  # fmt: skip
    return ViTForImageClassification(config)


add("vit", _vit, lambda: args(torch.randn(4, 3, 16, 16)), of("logits", classify), "transformers", "vision")


def _distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=VOCAB, dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=64, num_labels=3,
        max_position_embeddings=32, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, **INIT,
    )  # fmt: skip
    return DistilBertForSequenceClassification(config)


def _classification() -> Inputs:
    ids = _ids(4)
    return args(input_ids=ids, attention_mask=_padding(ids))


add("distilbert", _distilbert, _classification, of("logits", classify), "transformers")


def _mixtral(experts: str) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=2, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=32, use_cache=False, output_router_logits=True, router_aux_loss_coef=0.1,
        experts_implementation=experts, **INIT,
    )  # fmt: skip
    return MixtralForCausalLM(config)


MOE = ("transformers", "loss_inside", "moe", "rms_norm")
add("mixtral_eager", lambda: _mixtral("eager"), _causal_lm, own, *MOE, "data_dependent")
add("mixtral_grouped", lambda: _mixtral("grouped_mm"), _causal_lm, own, *MOE, "no_fp64")


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCAB, d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=20, max_target_positions=16, dropout=0.0, use_cache=False, init_std=0.15,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def _speech() -> Inputs:
    return args(input_features=torch.randn(2, 8, 40), labels=_ids(2, 7))


add("whisper", _whisper, _speech, own, "transformers", "loss_inside", "audio")


def _convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5, image_size=32,
        layer_scale_init_value=0.5, **INIT,
    )  # fmt: skip
    return ConvNextForImageClassification(config)


def _photo() -> Inputs:
    return args(torch.randn(4, 3, 32, 32))


add("convnext", _convnext, _photo, of("logits", classify), "transformers", "cnn", "vision")


def _albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=VOCAB, embedding_size=16, hidden_size=WIDTH, num_hidden_layers=3, num_hidden_groups=1,
        num_attention_heads=HEADS, intermediate_size=64, max_position_embeddings=32, **INIT,
    )  # fmt: skip
    return AlbertForMaskedLM(config)


add("albert", _albert, _masked_lm, own, "transformers", "loss_inside", "tied", "repeated")


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1,
        "pad_token_id": 0,
    }  # fmt: skip
    image = {
        "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    return CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=16))


def _image_and_text() -> Inputs:
    ids = _ids(4, 8)
    ids[:, -1] = 2
    return args(input_ids=ids, pixel_values=torch.randn(4, 3, 16, 16), return_loss=True)


add("clip", _clip, _image_and_text, own, "transformers", "loss_inside", "vision")


def _wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=64,
        conv_dim=(16, 16), conv_stride=(4, 2), conv_kernel=(8, 3), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0, apply_spec_augment=False, **INIT,
    )  # fmt: skip
    return Wav2Vec2Model(config)


def _waveform() -> Inputs:
    return args(torch.randn(2, 400))


add("wav2vec2", _wav2vec2, _waveform, of("last_hidden_state", project), "transformers", "audio")
