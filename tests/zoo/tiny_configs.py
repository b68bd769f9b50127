"""Tiny configurations of transformers' models: what one sets for nearly all of them, where a configuration has it."""

from typing import Any

import torch
from torch import nn

from tests.zoo.model import Batch, args

WORDS = 96
TINY = {
    "vocab_size": WORDS, "hidden_size": 32, "d_model": 32, "n_embd": 32, "embedding_size": 32, "dim": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "intermediate_size": 64, "d_ff": 64, "d_inner": 64, "n_inner": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "ffn_dim": 64, "hidden_dim": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_num_experts": 4,
    "n_group": 1, "topk_group": 1, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "sliding_window": 8, "image_size": 32, "state_size": 8, "rotary_dim": 4,
}  # fmt: skip


def tiny(model_type: str, **extra: Any) -> Any:
    """Return the configuration of a model type, tiny; ``extra`` is what else it needs."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    default = cls()
    names = set(default.to_dict()) | set(getattr(cls, "attribute_map", {}))
    return cls(**({k: v for k, v in TINY.items() if k in names} | extra))


def built(auto: str, model_type: str, **extra: Any) -> nn.Module:
    """Build the model of a class, an Auto class or another."""
    import transformers

    cls = getattr(transformers, auto)
    make = cls.from_config if auto.startswith("Auto") else cls._from_config
    return make(tiny(model_type, **extra))


def words(size: int) -> Batch:
    """Return token ids: batches and lengths differ with the size."""
    return args(input_ids=torch.randint(3, WORDS, (size, 8 * size)))


def pairs(size: int) -> Batch:
    """Return token ids of a source and a target."""
    ids = torch.randint(3, WORDS, (size, 8 * size))
    return args(input_ids=ids, decoder_input_ids=torch.randint(3, WORDS, (size, 6 * size)))


def images(size: int, pixels: int = 32) -> Batch:
    """Return images."""
    return args(pixel_values=torch.randn(size, 3, pixels, pixels))
