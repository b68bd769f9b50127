"""diffusers' denoisers and autoencoders, in tiny configurations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.zoo.model import Batch, Table, args, built, noise

TABLE = Table()


def _noisy(size: int, channels: int = 4, pixels: int = 16) -> Batch:
    return args(torch.randn(size, channels, pixels, pixels), torch.randint(0, 1000, (size,)))


def _with_text(size: int, pixels: int = 16, width: int = 32) -> Batch:
    positional, _ = _noisy(size, 4, pixels)
    return (*positional, torch.randn(size, 4 * size, width)), {}


def _labelled(size: int) -> Batch:
    return args(torch.randn(size, 4, 8, 8), timestep=torch.randint(0, 1000, (size,)), class_labels=torch.arange(size))


BLOCKS = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
DOWN_UP = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
MODELS: dict[str, tuple[dict[str, Any], Callable[[int], Batch]]] = {
    "UNet2DModel": (
        BLOCKS | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D",
        "UpBlock2D"),
                  "sample_size": 16, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4},
        _noisy,
    ),
    "UNet2DConditionModel": (
        BLOCKS | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 32,
                  "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 4, "sample_size": 16},
        _with_text,
    ),
    "AutoencoderKL": (BLOCKS | DOWN_UP | {"latent_channels": 4}, noise(3, 32, 32)),
    "VQModel": (BLOCKS | DOWN_UP | {"latent_channels": 4, "num_vq_embeddings": 16}, noise(3, 32, 32)),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
        "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)},
        noise(3, 32, 32),
    ),
    "DiTTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8, "in_channels": 4,
        "norm_num_groups": 8, "num_embeds_ada_norm": 10},
        _labelled,
    ),
    "Transformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 32, "norm_num_groups": 8,
        "num_layers": 1},
        noise(32, 8, 8),
    ),
    "PriorTransformer": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "embedding_dim": 32,
        "num_embeddings": 8,
        "additional_embeddings": 4},
        lambda size: args(
            torch.randn(size, 32), torch.randint(0, 1000, (size,)), proj_embedding=torch.randn(size, 32),
            encoder_hidden_states=torch.randn(size, 8, 32),
        ),
    ),
    "SD3Transformer2DModel": (
        {"sample_size": 16, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
        "joint_attention_dim": 32,
        "caption_projection_dim": 32, "pooled_projection_dim": 32, "pos_embed_max_size": 16, "in_channels": 4,
        "out_channels": 4},
        lambda size: args(
            torch.randn(size, 4, 16, 16), torch.randn(size, 4 * size, 32), torch.randn(size, 32),
            torch.randint(0, 1000, (size,)),
        ),
    ),
    "UNet1DModel": (
        {"block_out_channels": (8, 8), "in_channels": 4, "out_channels": 4, "extra_in_channels": 0,
        "down_block_types": ("DownResnetBlock1D", "DownResnetBlock1D"), "mid_block_type": "MidResTemporalBlock1D",
        "up_block_types": ("UpResnetBlock1D",), "out_block_type": "OutConv1DBlock", "use_timestep_embedding": True,
        "layers_per_block": 1, "act_fn": "swish", "downsample_each_block": False, "freq_shift": 1.0},
        lambda size: args(torch.randn(size, 4, 16), torch.randint(0, 1000, (size,))),
    ),
}  # fmt: skip

for _name, (_how, _batch) in MODELS.items():
    TABLE.add("diffusers", f"diffusers/{_name}", partial(built, f"diffusers:{_name}", **_how), _batch)
