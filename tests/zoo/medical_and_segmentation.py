"""MONAI's networks and those of segmentation-models-pytorch."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.zoo.model import Batch, Table, built, noise

TABLE = Table()


SQUARE, LARGER, CUBE = noise(1, 32, 32), noise(1, 64, 64), noise(1, 16, 16, 16)
FLAT_UNET = {"spatial_dims": 2, "in_channels": 1, "out_channels": 3}
MONAI: dict[str, tuple[dict[str, Any], Callable[[int], Batch]]] = {
    "UNet": (FLAT_UNET | {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1}, SQUARE),
    "AttentionUnet": (FLAT_UNET | {"channels": (8, 16, 32), "strides": (2, 2)}, SQUARE),
    "BasicUNet": (FLAT_UNET | {"features": (8, 8, 16, 16, 32, 8)}, SQUARE),
    "BasicUNetPlusPlus": (FLAT_UNET | {"features": (8, 8, 16, 16, 32, 8)}, SQUARE),
    "DynUNet": (
        FLAT_UNET | {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [8,
        16, 32]},
        SQUARE,
    ),
    "SegResNet": ({"spatial_dims": 3, "init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)}, CUBE),
    "VNet": ({"spatial_dims": 3}, CUBE),
    "UNETR": (
        {"in_channels": 1, "out_channels": 2, "img_size": (16, 16, 16), "feature_size": 8, "hidden_size": 32,
        "mlp_dim": 64,
        "num_heads": 2},
        CUBE,
    ),
    "SwinUNETR": ({"in_channels": 1, "out_channels": 2, "feature_size": 12, "spatial_dims": 2, "depths": (1, 1, 1,
    1)}, LARGER),
    "ViT": (
        {"in_channels": 1, "img_size": 32, "patch_size": 8, "hidden_size": 32, "mlp_dim": 64, "num_layers": 2,
        "num_heads": 2,
        "classification": True, "spatial_dims": 2},
        SQUARE,
    ),
    "DenseNet": (
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 3, "init_features": 8, "growth_rate": 4,
        "block_config": (2, 2)},
        SQUARE,
    ),
    "HighResNet": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 3}, SQUARE),
    "AHNet": ({"spatial_dims": 2, "layers": (1, 1, 1, 1), "out_channels": 2, "upsample_mode": "transpose",
    "psp_block_num": 0}, LARGER),
    "AutoEncoder": (FLAT_UNET | {"channels": (8, 16), "strides": (2, 2)}, SQUARE),
    "VarAutoEncoder": (
        {"spatial_dims": 2, "in_shape": (1, 32, 32), "out_channels": 1, "latent_size": 4, "channels": (8, 16),
        "strides": (2, 2)},
        SQUARE,
    ),
    "FlexibleUNet": (
        {"in_channels": 1, "out_channels": 2, "backbone": "efficientnet-b0", "spatial_dims": 2}, LARGER,
    ),
    "MILModel": ({"num_classes": 2, "pretrained": False, "mil_mode": "att"}, noise(2, 3, 64, 64)),
    "GlobalNet": ({"image_size": (32, 32), "spatial_dims": 2, "in_channels": 1, "num_channel_initial": 8,
    "depth": 2}, SQUARE),
    "LocalNet": (
        {"spatial_dims": 2, "in_channels": 1, "num_channel_initial": 8, "extract_levels": (0, 1), "out_channels": 2,
        "out_kernel_initializer": "kaiming_uniform", "out_activation": None},
        SQUARE,
    ),
}  # fmt: skip
ARCHITECTURES = (
    *("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus"),
    *("UPerNet", "Segformer"),
)


for _name, (_how, _batch) in MONAI.items():
    TABLE.add("monai", f"monai/{_name}", partial(built, f"monai.networks.nets:{_name}", **_how), _batch)
for _name in ARCHITECTURES:
    _encoder = "mobilenet_v2" if _name == "PAN" else "resnet18"
    _build = partial(built, f"segmentation_models_pytorch:{_name}", _encoder, encoder_weights=None, classes=3)
    TABLE.add(
        "segmentation_models_pytorch", f"segmentation_models_pytorch/{_name}", _build, noise(3, 64, 64),
    )  # fmt: skip
