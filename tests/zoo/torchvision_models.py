"""torchvision's models of classification, segmentation and video, as the library has them, on small inputs."""

from functools import partial

from tests.zoo.model import Table, built, noise

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


BUILD = partial(built, num_classes=10)
for _name in IMAGES:
    _build = partial(BUILD, f"torchvision.models:{_name}", weights=None, **HOW.get(_name, {}))
    TABLE.add("torchvision", f"torchvision/{_name}", _build, noise(3, *[PIXELS.get(_name, 64)] * 2))
for _name in SEGMENTATION:
    _build = partial(BUILD, f"torchvision.models.segmentation:{_name}", weights=None, weights_backbone=None)
    TABLE.add("torchvision", f"torchvision/{_name}", _build, noise(3, 64, 64))
for _name in VIDEO:
    _build = partial(BUILD, f"torchvision.models.video:{_name}", weights=None)
    TABLE.add("torchvision", f"torchvision/{_name}", _build, noise(3, 16, 32, 32))
_vit = partial(BUILD, "torchvision.models:VisionTransformer", 32, 8, 2, 4, 32, 64, dropout=0.1)
TABLE.add("torchvision", "torchvision/vit", _vit, noise(3, 32, 32))
_maxvit = partial(BUILD, "torchvision.models:MaxVit", (64, 64), 16, 2, [16, 16], [1, 1], 8, 0.1)
TABLE.add("torchvision", "torchvision/maxvit", _maxvit, noise(3, 64, 64))
