"""The convolutional models of the benchmark of speed: ResNet-50 and a U-Net; if named, VGG-11 and GhostNet.

Before: ``resnet50(scale)``. After: a ``Case``.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from model_case import Case, classes, scaled, scores
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with batch norms, and a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            if stride > 1 or before != after
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, 4 * width, height / stride, width / stride]."""
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        h += self.shortcut(x)
        return self.relu(h)


def resnet50(scale: float, images: int = 16, side: int = 112) -> Case:
    """ResNet-50 on ``images`` of ``side`` px."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = 64
    for stage, (width, blocks) in enumerate(zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True)):
        for index in range(scaled(blocks, scale)):
            layers.append(Bottleneck(before, width, 2 if stage and not index else 1))
            before = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(2048, 1000))
    batch = scaled(images, scale)
    x, y = torch.randn(batch, 3, side, side), torch.randint(1000, (batch,))
    return Case(model, (x, y), classes, scores, images=True)


def _double(before: int, after: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for a in (before, after):
        parts += [nn.Conv2d(a, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts)


class Unet(nn.Module):
    """Three levels down and up, 32 channels at the top."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_double(3, 32), _double(32, 64), _double(64, 128)])
        self.middle = _double(128, 256)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in (128, 64, 32))
        self.join = nn.ModuleList(_double(2 * c, c) for c in (128, 64, 32))
        self.last = nn.Conv2d(32, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, 2, height, width]."""
        kept = []
        for part in self.down:
            x = part(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return self.last(x)


def unet(scale: float) -> Case:
    """A U-Net, 4 images of 128 px."""
    batch = scaled(4, scale)
    x, y = torch.randn(batch, 3, 128, 128), torch.randint(2, (batch, 128, 128))
    return Case(Unet(), (x, y), classes, scores, images=True)


def vgg11(scale: float) -> Case:
    """VGG-11 with batch norms on 8 images of 224 px, its first two linears written as convolutions, as in timm."""
    layers: list[nn.Module] = []
    before = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            before = width
        else:
            layers.append(nn.MaxPool2d(2))
    head = [nn.Conv2d(512, 4096, 7), nn.ReLU(inplace=True), nn.Conv2d(4096, 4096, 1), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, *head, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(4096, 1000))
    batch = scaled(8, scale)
    x, y = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    return Case(model, (x, y), classes, scores, images=True)


class GhostModule(nn.Module):
    """Half of the channels by a 1x1 convolution, the others from those by a depthwise one."""

    def __init__(self, before: int, after: int, relu: bool) -> None:
        super().__init__()
        half = -(-after // 2)
        self.first = nn.Sequential(nn.Conv2d(before, half, 1, bias=False), nn.BatchNorm2d(half))
        self.cheap = nn.Sequential(nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False), nn.BatchNorm2d(half))
        self.activation = nn.ReLU(inplace=True) if relu else nn.Identity()
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, after, height, width]."""
        one = self.activation(self.first(x))
        return torch.cat([one, self.activation(self.cheap(one))], 1)[:, : self.after]


class GhostBottleneck(nn.Module):
    """Two ghost modules around a depthwise convolution where there is a stride, and a shortcut."""

    def __init__(self, before: int, middle: int, after: int, stride: int) -> None:
        super().__init__()
        self.wide, self.narrow = GhostModule(before, middle, True), GhostModule(middle, after, False)
        down = nn.Conv2d(middle, middle, 3, stride, 1, groups=middle, bias=False)
        self.down = nn.Sequential(down, nn.BatchNorm2d(middle)) if stride > 1 else nn.Identity()
        beside = [nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False), nn.BatchNorm2d(before)]
        beside += [nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after)]
        self.shortcut = nn.Sequential(*beside) if stride > 1 or before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, after, height / stride, width / stride]."""
        out = self.narrow(self.down(self.wide(x)))
        out += self.shortcut(x)
        return out


def ghostnet(scale: float) -> Case:
    """GhostNet (Han et al., 2020) without its squeeze and excitation, 8 images of 128 px."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    before = 16
    for middle, after, stride in (
        *((16, 16, 1), (48, 24, 2), (72, 24, 1), (72, 40, 2), (120, 40, 1), (240, 80, 2), (200, 80, 1), (184, 80, 1)),
        *((184, 80, 1), (480, 112, 1), (672, 112, 1), (672, 160, 2), *((960, 160, 1),) * 4),
    ):
        layers.append(GhostBottleneck(before, middle, after, stride))
        before = after
    layers += [nn.Conv2d(160, 960, 1, bias=False), nn.BatchNorm2d(960), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(960, 1000))
    batch = scaled(8, scale)
    x, y = torch.randn(batch, 3, 128, 128), torch.randint(1000, (batch,))
    return Case(model, (x, y), classes, scores, images=True)


class Vae(nn.Module):
    """PyTorch-VAE's "vanilla VAE": five stages down to 2 x 2 pixels, five transposed convolutions with biases up."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256, 512), codes: int = 128) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(_stage(nn.Conv2d(a, b, 3, 2, 1)) for a, b in pairwise((3, *widths))))
        self.mean, self.log_variance = nn.Linear(4 * widths[-1], codes), nn.Linear(4 * widths[-1], codes)
        self.first = nn.Linear(codes, 4 * widths[-1])
        up = (*widths[::-1], widths[0])
        self.decoder = nn.Sequential(*(_stage(nn.ConvTranspose2d(a, b, 3, 2, 1, 1)) for a, b in pairwise(up)))
        self.last = nn.Sequential(nn.Conv2d(widths[0], 3, 3, padding=1), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return images, and the mean and log variance of their codes."""
        coded = self.encoder(x).flatten(1)
        mean, log_variance = self.mean(coded), self.log_variance(coded)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.last(self.decoder(self.first(code).unflatten(1, (-1, 2, 2)))), mean, log_variance


def _stage(convolution: nn.Module) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels), nn.LeakyReLU())


def vae(scale: float) -> Case:
    """A variational autoencoder of images of 64 px, in batches of 64."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        made, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.mse_loss(made, x) + 0.00025 * divergence

    return Case(Vae(), (torch.randn(scaled(64, scale), 3, 64, 64),), loss, lambda m, x: m(x)[0], images=True)
