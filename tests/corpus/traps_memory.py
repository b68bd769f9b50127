"""Traps of memory: in-place operations, views, aliases, buffers and inputs that are written to."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import forward_of, layers

from .core import add, args, normal
from .losses import classify, project, regress

WIDTH = 16


_rows = normal((6, WIDTH))


_steps = normal((3, 8, WIDTH))


@add("inplace_on_views", _steps, classify, "trap", "inplace")
@layers(lambda: dict(net=nn.Linear(WIDTH, WIDTH), token=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, 4)))
def ViewsWritten(self, x):
    x = self.net(x)
    second = self.token(x[:, 1].clone())
    x[:, 0] += second
    x[:, 2:4].mul_(0.5)
    last = x.view(x.shape[0], -1)[:, -x.shape[2] :]
    last.add_(1.0)
    x[:, 4] = second
    return self.head(x)


@add("inplace_chain", _rows, regress, "trap", "inplace")
@layers(lambda: dict(first=nn.Linear(WIDTH, 24), second=nn.Linear(24, WIDTH), bias=nn.Parameter(torch.randn(24) * 0.1)))
def InplaceChain(self, x):
    h = self.first(x)
    h.add_(self.bias).mul_(1.5)
    h = F.relu(h, inplace=True)
    y = x.clone()
    y += self.second(h)
    return y.clamp_(-3, 3)


@add("buffer_written", _rows, classify, "trap", "mutation", "inplace")
@layers(
    lambda: dict(
        net=nn.Linear(WIDTH, 8),
        head=nn.Linear(8, 4),
        mean=nn.Buffer(torch.zeros(8)),
        count=nn.Buffer(torch.zeros((), dtype=torch.long)),
        queue=nn.Buffer(torch.zeros(12, 8)),
    )
)
def BufferWritten(self, x):
    """Statistics kept by hand, a step counter, and a queue that forward writes into."""
    x = self.net(x)
    with torch.no_grad():
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.queue[: len(x)] = x
        self.count += 1
    return self.head(x - self.mean + self.queue.mean(0))


@add("kv_cache", lambda: args(torch.randn(3, 8, WIDTH), torch.arange(2, 10)), regress, "trap", "inplace")
@layers(
    lambda: dict(
        qkv=nn.Linear(WIDTH, 3 * WIDTH),
        out=nn.Linear(WIDTH, WIDTH),
        keys=nn.Buffer(torch.zeros(3, 12, WIDTH), persistent=False),
    )
)
def KeyValueCache(self, x, position):
    q, k, v = self.qkv(x).chunk(3, -1)
    keys = self.keys.clone()
    keys.index_copy_(1, position, k.to(keys.dtype))
    keys = keys.index_select(1, position)
    return self.out((q @ keys.transpose(1, 2) * 0.25).softmax(-1) @ v)


@add("input_written", lambda: args(torch.randn(6, WIDTH), torch.zeros(WIDTH)), regress, "trap", "mutation", "inplace")
@layers(lambda: dict(net=nn.Linear(WIDTH, WIDTH)))
def InputWritten(self, x, total):
    """The caller holds `x` and `total`, and must see both changed."""
    x.mul_(0.5)
    y = self.net(x)
    total += y.detach().sum(0)
    return y


@add("aliased_outputs", _rows, project, "trap", "outputs", "alias")
@layers(lambda: dict(net=nn.Linear(WIDTH, WIDTH)))
def Aliases(self, x):
    """Outputs that alias each other and an input."""
    y = self.net(x)
    return y, y.view(2, 3, WIDTH), y.t(), x[:2]


@add("tied_weights", lambda: args(torch.randperm(20).view(4, 5)), classify, "trap", "tied")
class TiedWeights(nn.Module):
    """One parameter as an embedding, as a head, and transposed as a layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.head = nn.Linear(WIDTH, 20)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        logits = self.head(torch.tanh(self.embed(ids)))
        return logits + F.linear(F.linear(logits.softmax(-1), self.embed.weight.t()), self.head.weight)


@add("expand_bmm", _steps, regress, "trap", "expand")
@layers(lambda: dict(weight=nn.Parameter(torch.randn(WIDTH, 8) * 0.3), anchors=nn.Linear(WIDTH, 8)))
def ExpandedBmm(self, x):
    """A small matrix expanded over the batch: cast after the expansion, it costs the whole batch."""
    a = x.bmm(self.weight.expand(x.shape[0], -1, -1))
    anchors = self.anchors(x.mean((0, 1)))
    return a + torch.bmm(a, (anchors[:, None] * anchors).expand(x.shape[0], -1, -1))


def _chosen_rows():
    return args(torch.randn(6, WIDTH), torch.tensor([1, 3, 4]))


@add("index_put_mixed", _chosen_rows, classify, "trap", "inplace", "scatter")
@layers(
    lambda: dict(net=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, 4), mask_token=nn.Parameter(torch.randn(WIDTH)))
)
def MixedIndexPut(self, x, rows):
    """A full-precision destination that receives a matrix product: under autocast the dtypes do not meet."""
    y = self.net(x)
    out = x.clone()
    out[rows] = y[rows].to(out.dtype)
    out = out.index_put((rows[:1],), self.mask_token)
    out = out.scatter(1, rows[:, None] % WIDTH, 0.5)
    return self.head(out.index_add(0, rows, y[rows].to(out.dtype)))


@add("index_put_uncast", _chosen_rows, classify, "trap", "inplace", "scatter", "no_autocast", "no_autocast_fp16")
@forward_of(MixedIndexPut)
def UncastIndexPut(self, x, rows):
    """The same without `.to(out.dtype)`: right in fp32, an error under autocast."""
    y = self.net(x)
    out = x.clone()
    out[rows] = y[rows]
    out.index_add_(0, rows, y[rows])
    return self.head(out + self.mask_token)


@add("out_argument", _rows, regress, "trap", "inplace", "graph_break")
@layers(lambda: dict(net=nn.Linear(WIDTH, WIDTH)))
def OutArgument(self, x):
    """Writes into memory of its own making: `out=`, `copy_`, and a list filled by position."""
    y = self.net(x)
    canvas = x.new_zeros(len(x) + 2, WIDTH)
    canvas[1:-1].copy_(y)
    with torch.no_grad():
        mean = torch.empty(WIDTH, dtype=x.dtype, device=x.device)
        torch.mean(x, 0, out=mean)
    return canvas - mean
