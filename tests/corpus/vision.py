"""Image models: residual, depthwise, dense, encoder-decoder, windowed and mixing architectures."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers

from .core import Inputs, add, args
from .losses import classify, segment


def _image(batch: int = 4, size: int = 16) -> Inputs:
    return args(torch.randn(batch, 3, size, size))


def _resized(cin, cout, stride):
    """Return what a block adds to its input: the input itself (None), or a projection of it."""
    if stride == 1 and cin == cout:
        return None
    return nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))


@layers(
    lambda cin, planes, stride=1: dict(
        conv1=nn.Conv2d(cin, planes, 3, stride, 1, bias=False),
        bn1=nn.BatchNorm2d(planes),
        conv2=nn.Conv2d(planes, planes, 3, 1, 1, bias=False),
        bn2=nn.BatchNorm2d(planes),
        relu=nn.ReLU(inplace=True),
        downsample=_resized(cin, planes, stride),
    )
)
def BasicBlock(self, x):
    identity = x if self.downsample is None else self.downsample(x)
    out = self.relu(self.bn1(self.conv1(x)))
    out = self.bn2(self.conv2(out))
    out += identity
    return self.relu(out)


@layers(
    lambda cin, planes, stride=1, expansion=2: dict(
        conv1=nn.Conv2d(cin, planes, 1, bias=False),
        bn1=nn.BatchNorm2d(planes),
        conv2=nn.Conv2d(planes, planes, 3, stride, 1, bias=False),
        bn2=nn.BatchNorm2d(planes),
        conv3=nn.Conv2d(planes, planes * expansion, 1, bias=False),
        bn3=nn.BatchNorm2d(planes * expansion),
        relu=nn.ReLU(inplace=True),
        downsample=_resized(cin, planes * expansion, stride),
    )
)
def Bottleneck(self, x):
    out = self.relu(self.bn1(self.conv1(x)))
    out = self.relu(self.bn2(self.conv2(out)))
    out = self.bn3(self.conv3(out))
    out += x if self.downsample is None else self.downsample(x)
    return self.relu(out)


@layers(
    lambda block, expansion=1, width=8, classes=5: dict(
        stem=nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        pool=nn.MaxPool2d(3, 2, 1),
        layer1=block(width, width),
        layer2=block(width * expansion, 2 * width, 2),
        fc=nn.Linear(2 * width * expansion, classes),
    )
)
def ResNet(self, x):
    x = self.layer2(self.layer1(self.pool(self.stem(x))))
    return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


add("resnet_basic", _image, classify, "cnn", "inplace", "kinks")(lambda: ResNet(BasicBlock))
add("resnet_bottleneck", _image, classify, "cnn", "inplace", "kinks")(lambda: ResNet(Bottleneck, 2))
add("resnet_eval", _image, classify, "cnn", "inplace", "eval", "kinks")(lambda: ResNet(BasicBlock).eval())


@layers(
    lambda cin, cout, stride: dict(
        skip=stride == 1 and cin == cout,
        conv=nn.Sequential(
            nn.Conv2d(cin, 3 * cin, 1, bias=False),
            nn.BatchNorm2d(3 * cin),
            nn.Hardswish(inplace=True),
            nn.Conv2d(3 * cin, 3 * cin, 3, stride, 1, groups=3 * cin, bias=False),
            nn.BatchNorm2d(3 * cin),
            nn.ReLU6(inplace=True),
            nn.Conv2d(3 * cin, cout, 1, bias=False),
            nn.BatchNorm2d(cout),
        ),
    )
)
def InvertedResidual(self, x):
    return x + self.conv(x) if self.skip else self.conv(x)


@add("mobilenet", _image, classify, "cnn", "inplace", "sequential_root", "kinks")
def _mobilenet() -> nn.Module:
    blocks = nn.Sequential(InvertedResidual(8, 8, 1), InvertedResidual(8, 16, 2), InvertedResidual(16, 16, 1))
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish())
    return nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


@add("densenet", _image, classify, "cnn", "kinks")
@layers(
    lambda growth=6, layers=4: dict(
        stem=nn.Conv2d(3, 8, 3, padding=1),
        layers=nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(8 + i * growth),
                nn.ReLU(),
                nn.Conv2d(8 + i * growth, growth, 3, padding=1, bias=False),
            )
            for i in range(layers)
        ),
        head=nn.Linear(8 + layers * growth, 5),
    )
)
def DenseNet(self, x):
    features = [self.stem(x)]
    for layer in self.layers:
        features.append(layer(torch.cat(features, 1)))
    return self.head(F.avg_pool2d(torch.cat(features, 1), 4).amax((2, 3)))


def _double(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


@add("unet", _image, segment, "cnn", "kinks")
@layers(
    lambda width=8, classes=3: dict(
        enc1=_double(3, width),
        enc2=_double(width, 2 * width),
        mid=_double(2 * width, 4 * width),
        up2=nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2),
        dec2=_double(4 * width, 2 * width),
        up1=nn.ConvTranspose2d(2 * width, width, 2, stride=2),
        dec1=_double(2 * width, width),
        out=nn.Conv2d(width, classes, 1),
    )
)
def UNet(self, x):
    a = self.enc1(x)
    b = self.enc2(F.max_pool2d(a, 2))
    c = self.mid(F.max_pool2d(b, 2))
    b = self.dec2(torch.cat([self.up2(c), b], 1))
    return self.out(self.dec1(torch.cat([self.up1(b), a], 1)))


@add("squeeze_excite", _image, classify, "cnn")
@layers(
    lambda channels=12: dict(
        conv=nn.Conv2d(3, channels, 3, padding=1),
        gn=nn.GroupNorm(3, channels),
        reduce=nn.Conv2d(channels, 4, 1),
        expand=nn.Conv2d(4, channels, 1),
        head=nn.Linear(channels, 5),
    )
)
def SqueezeExcite(self, x):
    x = F.silu(self.gn(self.conv(x)))
    scale = x.mean((2, 3), keepdim=True)
    x = x * torch.sigmoid(self.expand(F.relu(self.reduce(scale))))
    return self.head(x.mean((2, 3)))


def _mlp(width, hidden):
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


@add("mlp_mixer", _image, classify, "mlp")
@layers(
    lambda width=24, patches=16, depth=2: dict(
        patch=nn.Conv2d(3, width, 4, 4),
        tokens=nn.ModuleList(_mlp(patches, 32) for _ in range(depth)),
        channels=nn.ModuleList(_mlp(width, 48) for _ in range(depth)),
        norms=nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth)),
        head=nn.Linear(width, 5),
    )
)
def Mixer(self, x):
    x = self.patch(x).flatten(2).transpose(1, 2)
    for i, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
        x = x + tokens(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
        x = x + channels(self.norms[2 * i + 1](x))
    return self.head(x.mean(1))


def _places(window):
    """Return the number of the relative position of each pair of a window's pixels."""
    grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
    offset = grid[:, :, None] - grid[:, None, :] + window - 1
    return offset[0] * (2 * window - 1) + offset[1]


@add("swin_window", _image, classify, "attention")
@layers(
    lambda width=16, heads=2, window=4: dict(
        heads=heads,
        window=window,
        embed=nn.Conv2d(3, width, 2, 2),
        norm=nn.LayerNorm(width),
        qkv=nn.Linear(width, 3 * width),
        proj=nn.Linear(width, width),
        table=nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.2),
        index=nn.Buffer(_places(window), persistent=False),
        head=nn.Linear(width, 5),
    )
)
def WindowAttention(self, x):
    """Swin: attention in windows, shifted by roll, with a learned bias per relative position."""
    x = self.embed(x).permute(0, 2, 3, 1)
    b, h, w, c = x.shape
    n = self.window
    y = torch.roll(self.norm(x), (-n // 2, -n // 2), dims=(1, 2))
    y = y.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)
    q, k, v = self.qkv(y).reshape(-1, n * n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
    attn = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
    attn = attn + self.table[self.index.view(-1)].view(n * n, n * n, -1).permute(2, 0, 1)
    y = (attn.softmax(-1) @ v).transpose(1, 2).reshape(-1, n * n, c)
    y = self.proj(y).view(b, h // n, w // n, n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
    x = x + torch.roll(y, (n // 2, n // 2), dims=(1, 2))
    return self.head(x.mean((1, 2)))
