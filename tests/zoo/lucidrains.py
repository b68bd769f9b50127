"""lucidrains' packages: transformers and image models, written with einops, in many styles."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.model import Batch, Table, args, built, noise

TABLE = Table()
WORDS = 64
VIT = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}


def _ids(size: int, length: int = 8) -> Batch:
    return args(torch.randint(0, WORDS, (size, length * size)))


def _fixed(size: int) -> Batch:
    return args(torch.randint(0, WORDS, (size, 16)))


ROWS = noise(16, 32)
IMAGES = {
    "vit_pytorch.vit.ViT": VIT, "vit_pytorch.simple_vit.SimpleViT": VIT,
    "vit_pytorch.deepvit.DeepViT": VIT, "vit_pytorch.parallel_vit.ViT": VIT | {"num_parallel_branches": 2},
    "vit_pytorch.cait.CaiT": VIT | {"cls_depth": 1}, "vit_pytorch.simple_vit_with_register_tokens.SimpleViT": VIT,
    "vit_pytorch.vit_for_small_dataset.ViT": VIT, "vit_pytorch.simple_vit_with_qk_norm.SimpleViT": VIT,
    "vit_pytorch.rvt.RvT": VIT, "vit_pytorch.learnable_memory_vit.ViT": VIT,
    "vit_pytorch.cct.CCT": {
        "img_size": 32, "embedding_dim": 32, "n_conv_layers": 1, "kernel_size": 3, "stride": 2, "padding": 1,
        "pooling_kernel_size": 3, "pooling_stride": 2, "pooling_padding": 1, "num_layers": 2, "num_heads": 2,
        "mlp_ratio": 2.0, "num_classes": 10,
    },
    "vit_pytorch.t2t.T2TViT": {
        "dim": 32, "image_size": 32, "depth": 2, "heads": 2, "mlp_dim": 64, "num_classes": 10,
        "t2t_layers": ((3, 2), (3, 2)),
    },
    "vit_pytorch.max_vit.MaxViT": {
        "num_classes": 10, "dim_conv_stem": 8, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4,
        "mbconv_expansion_rate": 2, "mbconv_shrinkage_rate": 0.25, "dropout": 0.1,
    },
    "mlp_mixer_pytorch.MLPMixer": {
        "image_size": 32, "channels": 3, "patch_size": 8, "dim": 32, "depth": 2, "num_classes": 10,
    },
    "g_mlp_pytorch.gMLPVision": {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2},
    "efficientnet_pytorch.EfficientNet.from_name": {"model_name": "efficientnet-b0", "num_classes": 10},
}  # fmt: skip
SEQUENCES: dict[str, tuple[dict[str, Any], Callable[[int], Batch]]] = {
    "performer_pytorch.PerformerLM": (
        {"num_tokens": WORDS, "max_seq_len": 32, "dim": 32, "depth": 2, "heads": 2, "dim_head": 16, "causal": False},
        _ids,
    ),
    "linformer.LinformerLM": ({"num_tokens": WORDS, "dim": 32, "seq_len": 16, "depth": 2, "heads": 2, "k": 8},
    _fixed),
    "reformer_pytorch.ReformerLM": (
        {"num_tokens": WORDS, "dim": 32, "depth": 2, "max_seq_len": 32, "heads": 2, "bucket_size": 4,
        "n_hashes": 2}, _ids,
    ),
    "linear_attention_transformer.LinearAttentionTransformerLM": (
        {"num_tokens": WORDS, "dim": 32, "heads": 2, "depth": 2, "max_seq_len": 32}, _ids,
    ),
    "nystrom_attention.Nystromformer": ({"dim": 32, "dim_head": 16, "heads": 2, "depth": 2, "num_landmarks": 8},
    ROWS),
    "g_mlp_pytorch.gMLP": ({"num_tokens": WORDS, "dim": 32, "depth": 2, "seq_len": 16}, _fixed),
    "conformer.Conformer": (
        {"dim": 32, "depth": 2, "dim_head": 16, "heads": 2, "ff_mult": 2, "conv_kernel_size": 7}, ROWS,
    ),
    "local_attention.LocalTransformer": (
        {"num_tokens": WORDS, "dim": 32, "depth": 2, "max_seq_len": 32, "causal": True, "local_attn_window_size": 4,
        "dim_head": 16, "heads": 2},
        _ids,
    ),
    "perceiver_pytorch.Perceiver": (
        {"num_freq_bands": 2, "depth": 2, "max_freq": 10.0, "input_channels": 3, "num_latents": 8, "latent_dim": 32,
        "num_classes": 10, "cross_dim_head": 16, "latent_dim_head": 16, "latent_heads": 2},
        noise(16, 16, 3),
    ),
    "axial_attention.AxialImageTransformer": (
        {"dim": 16, "depth": 2, "heads": 2, "reversible": False}, noise(16, 8, 8),
    ),
    "tab_transformer_pytorch.TabTransformer": (
        {"mlp_act": nn.ReLU(), "categories": (10, 5, 6), "num_continuous": 4, "dim": 16, "dim_out": 1, "depth": 2,
        "heads": 2},
        lambda size: args(torch.randint(0, 5, (4 * size, 3)), torch.randn(4 * size, 4)),
    ),
    "tab_transformer_pytorch.FTTransformer": (
        {"categories": (10, 5, 6), "num_continuous": 4, "dim": 16, "dim_out": 1, "depth": 2, "heads": 2},
        lambda size: args(torch.randint(0, 5, (4 * size, 3)), torch.randn(4 * size, 4)),
    ),
    "egnn_pytorch.EGNN": (
        {"dim": 16}, lambda size: args(torch.randn(size, 8, 16), torch.randn(size, 8, 3)),
    ),
    "vector_quantize_pytorch.VectorQuantize": ({"dim": 32, "codebook_size": 16}, ROWS),
}  # fmt: skip
STYLES = {  # of x-transformers' attention layers
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True},
    "t5_bias": {"rel_pos_bias": True},
    "rmsnorm": {"use_rmsnorm": True}, "glu": {"ff_glu": True, "ff_swish": True},
    "talking": {"attn_pre_talking_heads": True},
    "qk_norm": {"attn_qk_norm": True}, "sandwich": {"sandwich_norm": True}, "macaron": {"macaron": True},
    "multiquery": {"attn_one_kv_head": True}, "flash": {"attn_flash": True}, "scalenorm": {"use_scalenorm": True},
}  # fmt: skip


def _x_transformer(style: str) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **STYLES[style])
    return TransformerWrapper(num_tokens=WORDS, max_seq_len=32, attn_layers=layers)


def _mamba() -> nn.Module:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=32, n_layers=2))


for _path, (_how, _batch) in ({path: (how, noise(3, 32, 32)) for path, how in IMAGES.items()} | SEQUENCES).items():
    _name = _path.removesuffix(".from_name").replace(".", "/", 1)
    TABLE.add(_path.partition(".")[0], _name, partial(built, _path, **_how), _batch)
TABLE.add("mambapy", "mambapy/mamba.Mamba", _mamba, ROWS)
for _style in STYLES:
    TABLE.add("x_transformers", f"x_transformers/{_style}", partial(_x_transformer, _style), _ids)
