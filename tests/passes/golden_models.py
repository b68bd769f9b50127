"""The small models whose rewritten graphs are kept as text."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers


@layers(
    lambda: dict(
        ln_1=nn.LayerNorm(8),
        ln_2=nn.LayerNorm(8),
        qkv=nn.Linear(8, 24),
        proj=nn.Linear(8, 8),
        fc=nn.Linear(8, 32),
        out=nn.Linear(32, 8),
    )
)
def Block(self, x):
    """A pre-norm block as in GPT-2, of width 8."""
    q, k, v = (a.view(2, 3, 2, 4).transpose(1, 2) for a in self.qkv(self.ln_1(x)).chunk(3, -1))
    weights = (q @ k.transpose(-1, -2) / 2.0).softmax(-1)
    x = x + self.proj((weights @ v).transpose(1, 2).reshape(2, 3, 8))
    return x + self.out(F.gelu(self.fc(self.ln_2(x))))


@layers(lambda: dict(patch=nn.Linear(8, 8), block=Block(), head=nn.Linear(8, 8)))
def Inside(self, x):
    """A block as most blocks are: in the middle of a residual stream."""
    return self.head(self.block(self.patch(x)))


@layers(lambda: dict(embed=nn.Embedding(5, 8), ln=nn.LayerNorm(8), fc=nn.Linear(8, 8)))
def Stacked(self, ids):
    """The two ends of a residual stream."""
    x = self.embed(ids)
    x = x + self.fc(self.ln(x))
    return x + self.fc(self.ln(x))


@layers(
    lambda: dict(
        conv1=nn.Conv2d(4, 4, 3, padding=1, bias=False),
        conv2=nn.Conv2d(4, 4, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(4),
        bn2=nn.BatchNorm2d(4),
        relu=nn.ReLU(inplace=True),
    )
)
def Residual(self, x):
    """conv-bn-relu twice, with the in-place operations of torchvision."""
    h = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
    h += x
    return self.relu(h)


@layers(lambda: dict(lstm=nn.LSTM(4, 8, batch_first=True), fc=nn.Linear(8, 2)))
def Recurrent(self, x):
    return self.fc(self.lstm(x)[0][:, -1])


@layers(lambda: dict(a=nn.Linear(8, 16), b=nn.Linear(16, 4)))
def WithLoss(self, x, y):
    return F.cross_entropy(self.b(torch.relu(self.a(x))), y)


@layers(lambda: dict(a=nn.Linear(8, 8), b=nn.Linear(8, 8)))
def WritesToView(self, x):
    h = self.a(x)
    before = self.b(h)
    h[:, :4].add_(1.0)
    return self.b(h) - before


X = (2, 3, 8)
CASES = {
    "block": (Block, lambda: (torch.randn(X),)),
    "inside": (Inside, lambda: (torch.randn(X),)),
    "stacked": (Stacked, lambda: (torch.tensor([[0, 1, 2]]),)),
    "residual": (Residual, lambda: (torch.randn(2, 4, 5, 5),)),
    "with_loss": (WithLoss, lambda: (torch.randn(3, 8), torch.tensor([0, 1, 2]))),
    "writes_to_view": (WritesToView, lambda: (torch.randn(2, 8),)),
    "recurrent": (Recurrent, lambda: (torch.randn(2, 3, 4),)),
}
