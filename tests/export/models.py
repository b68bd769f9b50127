"""Small models to export, and a way to run code where amp_graph cannot be imported."""

import subprocess
import sys

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers

WITHOUT = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("amp_graph", "passes", "lists"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
try:
    import amp_graph
except ImportError:
    pass
else:
    raise SystemExit("amp_graph can be imported")
"""


def run_without_amp_graph(code, folder):
    """Run ``code`` in ``folder``, in a process that cannot import amp_graph."""
    words = [sys.executable, "-c", WITHOUT + code]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@layers(lambda: dict(up=nn.Linear(32, 128), norm=nn.LayerNorm(128), down=nn.Linear(128, 8)))
def Mlp(self, x):
    """Linears, a layer norm, a GELU written out and a softmax."""
    h = self.norm(self.up(x))
    return self.down(0.5 * h * (1 + torch.erf(h * 0.7071067811865476))).softmax(-1)


@layers(
    lambda: dict(
        stem=nn.Conv2d(3, 16, 3, padding=1),
        norm=nn.BatchNorm2d(16),
        conv=nn.Conv2d(16, 16, 3, padding=1),
        last=nn.BatchNorm2d(16),
        head=nn.Linear(16, 8),
    )
)
def Cnn(self, x):
    """Convolutions with batch norms, whose parameters and statistics stay fp32, and a skip connection."""
    h = F.max_pool2d(self.norm(self.stem(x)).relu(), 2)
    return self.head((self.last(self.conv(h)) + h).relu().mean((2, 3)))


@layers(lambda: dict(qkv=nn.Linear(32, 96), out=nn.Linear(32, 32), weight=nn.Parameter(torch.rand(32) + 0.5)))
def Attention(self, x):
    """Attention written out, with an additive mask; a residual stream; an RMS norm written out."""
    normed = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(normed).chunk(3, -1))
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
    scores = (q @ k.transpose(-2, -1) / 8**0.5 + mask).softmax(-1)
    return x + self.out((scores @ v).transpose(1, 2).flatten(2))


@layers(lambda: dict(lstm=nn.LSTM(16, 32), gru=nn.GRU(32, 16), out=nn.Linear(16, 4)))
def Recurrent(self, x):
    """An LSTM and a GRU."""
    return self.out(self.gru(self.lstm(x)[0])[0])


@layers(lambda: dict(one=nn.Linear(16, 16), two=nn.Linear(16, 16)))
def Branches(self, x):
    """A condition, whose branches are graphs of their own."""
    return torch.cond(x.sum() > 0, lambda x: self.one(x).relu(), lambda x: self.two(x).sin(), (x,))


@layers(lambda: dict(linear=nn.Linear(16, 16), norm=nn.LayerNorm(16), groups=nn.GroupNorm(4, 16)))
def Writes(self, x):
    """Writes in place between dtypes, and a scalar tensor beside a low-precision one."""
    h = self.linear(x)
    h += self.norm(x)
    h[:, 0] = x[:, 0]
    y = torch.zeros(x.shape)
    y.copy_(h)
    return self.groups(y) * torch.tensor(0.3) + h.clamp_(min=0)


SHAPES = {Mlp: (4, 32), Cnn: (2, 3, 16, 16), Attention: (2, 6, 32)} | {
    Recurrent: (5, 2, 16),
    Branches: (4, 16),
    Writes: (4, 16),
}


def made(kind):
    """Return a model in evaluation, with batch norm statistics of data, and its input."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(SHAPES[kind])
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(SHAPES[kind]) * 2 + 1)
    return model.eval(), x


def error(got, want):
    """Return the distance of ``got`` to ``want`` relative to the size of ``want``."""
    return float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())
