"""transformers' models of images, sounds, series, and of images with text."""

from functools import partial
from typing import Any

import torch

from tests.zoo.model import Batch, Table, args, noise
from tests.zoo.tiny_configs import TINY, WORDS, built, images

TABLE = Table()
STAGES = {"num_attention_heads": [1, 2, 4, 4], "hidden_sizes": [16, 32, 32, 64]}
SMALL_STAGES = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
WINDOWS = {
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "num_attention_heads": [2, 2],
    "window_size": 4,
    "image_size": 32,
}

IMAGES: dict[str, dict[str, Any]] = {
    "vit": {}, "vit_msn": {}, "deit": {"architectures": ["DeiTForImageClassification"]},
    "beit": {"image_size": 32}, "data2vec-vision": {}, "dinov2": {}, "ijepa": {},
    "dinov2_with_registers": {}, "mobilenet_v2": {"depth_multiplier": 0.35},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "pp_lcnet": {}, "swiftformer": {}, "resnet": SMALL_STAGES, "regnet": SMALL_STAGES | {"groups_width": 8},
    "bit": SMALL_STAGES | {"num_groups": 4},
    "convnext": {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "convnextv2": {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "swin": WINDOWS, "swinv2": WINDOWS, "donut-swin": WINDOWS, "focalnet": {"embed_dim": 16, "depths": [1, 1]},
    "poolformer": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "segformer": STAGES | {"depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4]},
    "pvt": {"num_attention_heads": [1, 2, 4, 4], "hidden_sizes": [16, 32, 32, 64], "image_size": 64},
    "pvt_v2": {"num_attention_heads": [1, 2, 4, 4], "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]},
    "mobilevit": {"hidden_sizes": [32, 32, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 32, 32], "image_size": 64},
    "levit": {"hidden_sizes": [32, 32, 64], "num_attention_heads": [2, 2, 4], "key_dim": [8, 8, 8],
    "architectures": ["LevitForImageClassification"], "image_size": 64,
        "depths": [1, 1, 1]},
}  # fmt: skip
PIXELS = {"pvt": 64, "mobilevit": 64, "levit": 64, "mobilenet_v2": 64, "mobilenet_v1": 64,
          "swiftformer": 64, "pp_lcnet": 64, "segformer": 64, "pvt_v2": 64, "resnet": 64, "regnet": 64, "bit": 64,
          "convnext": 64, "convnextv2": 64, "poolformer": 64}  # fmt: skip

for _name, _extra in IMAGES.items():
    TABLE.add(
        "transformers", f"transformers-vision/{_name}", partial(built, "AutoModelForImageClassification", _name,
        **_extra),
        partial(images, pixels=PIXELS.get(_name, 32)),
    )  # fmt: skip


def _waves(size: int) -> Batch:
    return args(input_values=torch.randn(size, 2000 * size))


WAVES = {"conv_dim": [16, 16, 16], "conv_stride": [5, 4, 4], "conv_kernel": [8, 4, 4], "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "num_feat_extract_layers": 3}  # fmt: skip
for _name in (
    "wav2vec2",
    "hubert",
    "wavlm",
    "unispeech",
    "unispeech-sat",
    "sew",
    "data2vec-audio",
    "wav2vec2-conformer",
):
    _extra = WAVES | ({"squeeze_factor": 1} if _name == "sew" else {})
    TABLE.add("transformers", f"transformers-audio/{_name}", partial(built, "AutoModel", _name, **_extra), _waves)

NESTED = {name: TINY[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
TEXT = NESTED | {
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
VISION = NESTED | {"image_size": 32, "patch_size": 8}


def _seen_and_read(size: int) -> Batch:
    ids = torch.randint(3, WORDS - 1, (size, 8))
    ids[:, -1] = 2
    return args(input_ids=ids, pixel_values=torch.randn(size, 3, 32, 32))


for _name in ("clip", "siglip", "chinese_clip", "altclip", "clipseg", "metaclip_2"):
    _build = partial(built, "AutoModel", _name, text_config=TEXT, vision_config=VISION, projection_dim=32)
    TABLE.add("transformers", f"transformers-pairs/{_name}", _build, _seen_and_read)


def _mel(size: int) -> Batch:
    return args(
        input_features=torch.randn(size, 16, 40), decoder_input_ids=torch.randint(3, WORDS, (size, 4 * size)),
    )  # fmt: skip


TABLE.add(
    "transformers", "transformers-audio/whisper",
    partial(built, "AutoModel", "whisper", num_mel_bins=16, max_source_positions=20, max_target_positions=32), _mel,
)  # fmt: skip
TABLE.add(
    "transformers", "transformers-audio/audio-spectrogram-transformer",
    partial(built, "AutoModel", "audio-spectrogram-transformer", max_length=64, num_mel_bins=32), noise(64, 32),
)  # fmt: skip


def _clips(size: int) -> Batch:
    return args(pixel_values=torch.randn(size, 4, 3, 32, 32))


for _name in ("timesformer", "vivit"):
    _extra = {"num_frames": 4} | ({"tubelet_size": [2, 8, 8]} if _name == "vivit" else {"patch_size": 8})
    TABLE.add("transformers", f"transformers-video/{_name}", partial(built, "AutoModel", _name, **_extra), _clips)


def _series(size: int) -> Batch:
    return args(past_values=torch.randn(size, 32, 3))


for _name, _class in (("patchtst", "PatchTSTForPrediction"), ("patchtsmixer", "PatchTSMixerForPrediction")):
    _extra = {
        "context_length": 32,
        "patch_length": 8,
        "patch_stride": 8,
        "num_input_channels": 3,
        "prediction_length": 8,
    }
    _build = partial(built, _class, _name, **_extra)
    TABLE.add("transformers", f"transformers-series/{_name}", _build, _series)
