"""torchvision's models of classification, segmentation and video, as the library has them, on small inputs."""

from functools import partial

import torch
from torch import nn

from tests.zoo.model import Batch, Table, args

TABLE = Table()
IMAGES = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "mnasnet0_5", "mobilenet_v2"),
    *("mobilenet_v3_small", "regnet_y_400mf", "resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0"),
    *("swin_t", "swin_v2_t", "vgg11_bn", "inception_v3", "wide_resnet50_2"),
)
HOW = {"googlenet": {"init_weights": False}, "inception_v3": {"init_weights": False}}
PIXELS = {"inception_v3": 96}
SEGMENTATION = ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "fcn_resnet50")
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d")


def _built(folder: str, name: str, **how: object) -> nn.Module:
    from torchvision import models

    holder = getattr(models, folder) if folder else models
    return getattr(holder, name)(weights=None, num_classes=10, **how)


def _segmentation(name: str) -> nn.Module:
    return _built("segmentation", name, weights_backbone=None)


def _vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 4, 32, 64, dropout=0.1, num_classes=10)


def _maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((64, 64), 16, 2, [16, 16], [1, 1], 8, 0.1, num_classes=10)


def _images(pixels: int, size: int) -> Batch:
    return args(torch.randn(size, 3, pixels, pixels))


def _clips(size: int) -> Batch:
    return args(torch.randn(size, 3, 16, 32, 32))


for _name in IMAGES:
    _batch = partial(_images, PIXELS.get(_name, 64))
    TABLE.add("torchvision", f"torchvision/{_name}", partial(_built, "", _name, **HOW.get(_name, {})), _batch)
for _name in SEGMENTATION:
    TABLE.add("torchvision", f"torchvision/{_name}", partial(_segmentation, _name), partial(_images, 64))
for _name in VIDEO:
    TABLE.add("torchvision", f"torchvision/{_name}", partial(_built, "video", _name), _clips)
TABLE.add("torchvision", "torchvision/vit", _vit, partial(_images, 32))
TABLE.add("torchvision", "torchvision/maxvit", _maxvit, partial(_images, 64))
