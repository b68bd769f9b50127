"""ResNets: torchvision's where it is installed, else the ResNet-18 and -34 below, which are the same networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}


def make_model(arch: str, classes: int, norm: str = "batch") -> tuple[nn.Module, str]:
    """Return the network, and where it is from. norm: "batch", or "group" (16 channels each, no running statistics)."""
    layer = nn.BatchNorm2d if norm == "batch" else _group_norm
    try:
        from torchvision import models
    except ImportError as error:
        if arch not in DEPTHS:
            legal = ", ".join(DEPTHS)
            raise SystemExit(f"--arch {arch} needs torchvision: {error}\n  legal without it: {legal}") from None
        return ResNet(DEPTHS[arch], classes, layer), "examples/parts/resnet.py, as torchvision is not installed"
    return models.get_model(arch, num_classes=classes, norm_layer=layer), "torchvision"


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(channels // 16, channels)


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """The residual networks of He et al., 2015, for RGB images; the keys of ``state_dict`` are torchvision's."""

    def __init__(self, depths: tuple[int, ...], classes: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        inputs = 64
        for i, depth in enumerate(depths):
            outputs = 64 * 2**i
            blocks = [
                Block(inputs if j == 0 else outputs, outputs, 2 if i and j == 0 else 1, norm) for j in range(depth)
            ]
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
            inputs = outputs
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(x.mean((2, 3)), 1))
