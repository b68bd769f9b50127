"""Traps of kernels: operations that have none in 16 bits, or one that loses digits."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers

from .core import add, normal
from .losses import classify, regress

WIDTH = 16


_rows = normal((6, WIDTH))


_image = normal((2, 3, 8, 8))


@add("grid_sample", _image, regress, "trap", "cnn", "no_kernel")
@layers(lambda: dict(conv=nn.Conv2d(3, 4, 3, padding=1), theta=nn.Linear(3, 6)))
def SpatialTransformer(self, x):
    theta = self.theta(x.mean((2, 3))).view(-1, 2, 3) * 0.2 + torch.eye(2, 3, device=x.device, dtype=x.dtype)
    grid = F.affine_grid(theta, [*x.shape], align_corners=False)
    return self.conv(F.grid_sample(x, grid.to(x.dtype), align_corners=False))


@add("cdist", _rows, classify, "trap", "no_kernel", "norms")
@layers(lambda: dict(net=nn.Linear(WIDTH, 8), centres=nn.Parameter(torch.randn(5, 8))))
def Distances(self, x):
    x = self.net(x)
    near = torch.cdist(x, self.centres.to(x.dtype))
    return -near + torch.quantile(x.float(), 0.25, dim=-1, keepdim=True).to(near.dtype)


@add("batch_norm_train", _image, classify, "trap", "cnn", "sequential_root")
def _bn():
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=True), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


add("batch_norm_eval", _image, classify, "trap", "cnn", "sequential_root", "eval")(lambda: _bn().eval())


@add("long_layer_norm", normal((2, 1024, 8)), classify, "trap", "long_norm")
@layers(lambda: dict(first=nn.Linear(8, WIDTH), norm=nn.LayerNorm(WIDTH), second=nn.Linear(WIDTH, 4)))
def LongNorm(self, x):
    """2,048 rows in one LayerNorm: its kernel's dweight and dbias lose digits when the input is bf16."""
    return self.second(self.norm(self.first(x)))


@add("interpolate", _image, regress, "trap", "cnn")
@layers(lambda: dict(conv=nn.Conv2d(3, 6, 3, padding=1), out=nn.Conv2d(6, 3, 1)))
def Interpolated(self, x):
    y = F.interpolate(self.conv(x), scale_factor=2, mode="bilinear", align_corners=False)
    y = y + F.interpolate(self.conv(x), size=y.shape[-2:], mode="nearest")
    return self.out(F.interpolate(y, size=(9, 9), mode="bicubic", align_corners=True))
