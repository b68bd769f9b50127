"""Networks by name, with sizes that are zero: batches, sequences, features, places, keys, groups of rows."""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers

WORDS = 50


@layers(lambda function, **parts: dict(function=function, **parts))
def Written(self, *inputs):
    """What ``function`` computes of a module, which has the given parts, and its inputs."""
    return self.function(self, *inputs)


def attention(how, width=32, heads=4, **options):
    """Self-attention of [batch, length, width]; ``how``: of query, key and value, [batch, heads, length, width]."""

    def function(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(how(q, k, v, **options).transpose(1, 2).reshape(batch, length, width))

    return Written(function, qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width))


def by_hand(q, k, v):
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def grouped(self, x):
    batch, length, _ = x.shape
    q = self.q(x).view(batch, length, 4, 8).transpose(1, 2)
    k, v = (part(x).view(batch, length, 2, 8).transpose(1, 2) for part in (self.k, self.v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def sequential(*parts):
    return lambda: nn.Sequential(*(part() for part in parts))


def written(function, **parts):
    return lambda: Written(function, **{name: part() for name, part in parts.items()})


def linear(inputs, outputs, **options):
    return lambda: nn.Linear(inputs, outputs, **options)


def conv(*given, **options):
    return lambda: nn.Conv2d(*given, **options)


def recurrent(kind, *given, ways=1, state=False, **options):
    def function(self, x):
        out, last = self.layer(x)
        return self.out(last[0] if state else out)

    size = given[1] * (1 if state else ways)
    return written(
        function,
        layer=lambda: kind(*given, batch_first=True, bidirectional=ways == 2, **options),
        out=linear(size, 4),
    )


def loss(function, outputs=32):
    return written(lambda self, *given: function(self.linear(given[0]), *given[1:]), linear=linear(16, outputs))


def several_losses(h, x):
    found = F.mse_loss(h, x, reduction="sum") + F.l1_loss(h, x) + F.smooth_l1_loss(h, x, reduction="sum")
    return found + F.huber_loss(h, x) + F.kl_div(h.log_softmax(-1), x.softmax(-1), reduction="sum")


# What a network is made by, and the sizes of its inputs: of numbers, or of whole numbers below one.
IMAGES, ROWS, SEQUENCES, IDS = (0, 8, 10, 10), (0, 16), (0, 5, 16), (WORDS, 0, 6)
NETWORKS = {
    "linears": (sequential(linear(16, 32), nn.ReLU, linear(32, 8)), ROWS),
    "linears without bias": (sequential(linear(16, 32, bias=False), nn.GELU, linear(32, 8, bias=False)), ROWS),
    "linears of sequences": (sequential(linear(16, 32), nn.Tanh, linear(32, 8)), SEQUENCES),
    "larger linears": (sequential(linear(256, 512), nn.GELU, linear(512, 256)), (0, 16, 256)),
    "sequences of no steps": (
        sequential(linear(16, 32), nn.GELU, lambda: nn.LayerNorm(32), linear(32, 8)),
        (3, 0, 16),
    ),
    "rows of no features": (sequential(linear(0, 16), nn.ReLU, linear(16, 8)), (3, 0)),
    "steps of no features": (sequential(linear(0, 16, bias=False), nn.ReLU, linear(16, 8)), (2, 3, 0)),
    "layer norm": (sequential(linear(16, 32), lambda: nn.LayerNorm(32), linear(32, 8)), SEQUENCES),
    "layer norm of nothing": (
        written(lambda s, x: s.out(s.norm(s.linear(x)[..., :0])), linear=linear(16, 16), norm=lambda: nn.LayerNorm(0),
                out=linear(0, 4)),
        (2, 3, 16),
    ),
    "residual norm": (
        written(lambda s, x: s.out(s.norm(x + s.linear(x))), linear=linear(16, 16), norm=lambda: nn.LayerNorm(16),
                out=linear(16, 4)),
        SEQUENCES,
    ),
    "residual norm of nothing": (
        written(lambda s, x: s.out(s.norm(x[..., :0] + s.linear(x)[..., :0])), linear=linear(16, 16),
                norm=lambda: nn.LayerNorm(0), out=linear(0, 4)),
        (2, 3, 16),
    ),
    "rms norm": (sequential(linear(16, 32), lambda: nn.RMSNorm(32), nn.SiLU, linear(32, 8)), SEQUENCES),
    "rms norm by hand": (
        written(lambda s, x: s.out((h := s.linear(x)) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)),
                linear=linear(16, 32), out=linear(32, 4)),
        SEQUENCES,
    ),
    "batch norm of rows": (sequential(linear(16, 32), lambda: nn.BatchNorm1d(32), nn.ReLU, linear(32, 8)), ROWS),
    "batch norm": (
        sequential(conv(8, 16, 3, padding=1, bias=False), lambda: nn.BatchNorm2d(16), nn.ReLU, conv(16, 8, 3)),
        IMAGES,
    ),
    "batch norm of no places": (
        written(lambda s, x: s.norm(s.conv(x)[:, :, :0]).relu(), conv=conv(8, 16, 3), norm=lambda: nn.BatchNorm2d(16)),
        (3, 8, 10, 10),
    ),
    "group norm": (
        sequential(conv(8, 16, 3, padding=1), lambda: nn.GroupNorm(4, 16), nn.SiLU, conv(16, 8, 3)),
        IMAGES,
    ),
    "group norm of no places": (
        written(lambda s, x: s.norm(s.conv(x)[:, :, :0]), conv=conv(8, 16, 3), norm=lambda: nn.GroupNorm(4, 16)),
        (3, 8, 10, 10),
    ),
    "conv1d": (
        sequential(lambda: nn.Conv1d(8, 16, 3, padding=1), nn.GELU, lambda: nn.Conv1d(16, 8, 3, stride=2)),
        (0, 8, 20),
    ),
    "conv1d of long sequences": (
        sequential(lambda: nn.Conv1d(64, 64, 25, padding=1), nn.GELU, lambda: nn.Conv1d(64, 32, 9, stride=2)),
        (0, 64, 1200),
    ),
    "conv2d 1x1": (sequential(conv(8, 16, 1), nn.ReLU, conv(16, 8, 1)), IMAGES),
    "conv2d 1x1 stride": (
        sequential(conv(8, 16, 1, stride=2), nn.ReLU, conv(16, 8, 1, stride=2, bias=False)),
        IMAGES,
    ),
    "conv2d of patches": (sequential(conv(8, 16, 5, stride=5), lambda: nn.Flatten(2)), IMAGES),
    "conv2d of all": (sequential(conv(8, 16, 10), lambda: nn.Flatten(1)), IMAGES),
    "conv2d in groups": (sequential(conv(8, 16, 3, groups=2), nn.ReLU), IMAGES),
    "depthwise": (
        sequential(conv(8, 16, 1), conv(16, 16, 3, padding=1, groups=16), nn.ReLU6, conv(16, 8, 1)),
        IMAGES,
    ),
    "depthwise stride": (
        sequential(conv(8, 16, 1), conv(16, 16, 5, padding=2, stride=2, groups=16), nn.Hardswish, conv(16, 8, 1)),
        IMAGES,
    ),
    "conv transpose": (
        sequential(lambda: nn.ConvTranspose2d(8, 16, 2, stride=2), nn.ReLU, lambda: nn.ConvTranspose2d(16, 8, 3)),
        IMAGES,
    ),
    "conv transpose 1d": (sequential(lambda: nn.ConvTranspose1d(8, 16, 4, stride=2), nn.ReLU), (0, 8, 20)),
    "conv3d": (sequential(lambda: nn.Conv3d(4, 8, 3), nn.ReLU, lambda: nn.Conv3d(8, 4, 1)), (0, 4, 6, 6, 6)),
    "squeeze": (
        written(lambda s, x: s.out((h := s.conv(x)) * s.wide(s.few(h.mean((2, 3), keepdim=True)).relu()).sigmoid()),
                conv=conv(8, 16, 3), few=conv(16, 4, 1), wide=conv(4, 16, 1), out=conv(16, 4, 1)),
        IMAGES,
    ),
    "residual block": (
        written(lambda s, x: s.out(F.relu(s.norm(s.conv(x)) + s.other(s.down(x)))),
                conv=conv(8, 16, 3, stride=2, padding=1, bias=False), norm=lambda: nn.BatchNorm2d(16),
                down=conv(8, 16, 1, stride=2, bias=False), other=lambda: nn.BatchNorm2d(16), out=conv(16, 4, 1)),
        IMAGES,
    ),
    "global pool": (
        sequential(conv(8, 16, 3), lambda: nn.AdaptiveAvgPool2d(1), lambda: nn.Flatten(1), linear(16, 4)),
        IMAGES,
    ),
    "pools": (sequential(conv(8, 16, 3), lambda: nn.MaxPool2d(2), lambda: nn.AvgPool2d(2), conv(16, 4, 1)), IMAGES),
    "interpolate": (
        written(lambda s, x: s.out(F.interpolate(s.conv(x), scale_factor=2, mode="bilinear")), conv=conv(8, 16, 3),
                out=conv(16, 4, 1)),
        IMAGES,
    ),
    "interpolate nearest": (
        written(lambda s, x: s.out(F.interpolate(s.conv(x), scale_factor=2)), conv=conv(8, 16, 3), out=conv(16, 4, 1)),
        IMAGES,
    ),
    "attention by hand": (lambda: attention(by_hand), (0, 7, 32)),
    "attention": (lambda: attention(F.scaled_dot_product_attention), (0, 7, 32)),
    "causal attention": (lambda: attention(F.scaled_dot_product_attention, is_causal=True), (0, 7, 32)),
    "attention with dropout": (lambda: attention(F.scaled_dot_product_attention, dropout_p=0.5), (0, 7, 32)),
    "attention of no steps": (lambda: attention(F.scaled_dot_product_attention), (2, 0, 32)),
    "causal attention of no steps": (lambda: attention(F.scaled_dot_product_attention, is_causal=True), (2, 0, 32)),
    "attention of groups": (written(grouped, q=linear(32, 32), k=linear(32, 16), v=linear(32, 16)), (0, 3, 32)),
    "attention to nothing": (
        written(lambda s, x, y: s.cross(x, y, y, need_weights=False)[0],
                cross=lambda: nn.MultiheadAttention(32, 4, batch_first=True)),
        (2, 7, 32), (2, 0, 32),
    ),
    "attention of nothing": (
        written(lambda s, x, y: s.cross(x, y, y, need_weights=False)[0],
                cross=lambda: nn.MultiheadAttention(32, 4, batch_first=True)),
        (2, 0, 32), (2, 9, 32),
    ),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), (0, 7, 32)),
    "embedding": (sequential(lambda: nn.Embedding(WORDS, 16), linear(16, 8)), IDS),
    "embedding with padding": (sequential(lambda: nn.Embedding(WORDS, 16, padding_idx=0), linear(16, 8)), IDS),
    "embedding of nothing": (
        written(lambda s, x: s.out(torch.cat([s.none(x), s.some(x)], -1)), none=lambda: nn.Embedding(WORDS, 0),
                some=lambda: nn.Embedding(WORDS, 16), out=linear(16, 8)),
        (WORDS, 2, 6),
    ),
    "bags": (sequential(lambda: nn.EmbeddingBag(WORDS, 16), linear(16, 8)), IDS),
    "bags that are sums": (sequential(lambda: nn.EmbeddingBag(WORDS, 16, mode="sum"), linear(16, 8)), IDS),
    "lstm": (recurrent(nn.LSTM, 16, 16), SEQUENCES),
    "lstm of two ways": (recurrent(nn.LSTM, 16, 16, num_layers=2, ways=2), SEQUENCES),
    "gru": (recurrent(nn.GRU, 16, 16), SEQUENCES),
    "gru of two ways": (recurrent(nn.GRU, 16, 16, num_layers=2, ways=2), SEQUENCES),
    "last state of a gru": (recurrent(nn.GRU, 16, 16, state=True), SEQUENCES),
    "rnn": (recurrent(nn.RNN, 16, 16), SEQUENCES),
    "lstm cell": (written(lambda s, x: s.out(s.cell(x)[0]), cell=lambda: nn.LSTMCell(16, 16), out=linear(16, 4)), ROWS),
    "dropout": (sequential(linear(16, 32), lambda: nn.Dropout(0.5), linear(32, 8)), ROWS),
    "activations": (
        sequential(linear(16, 32), lambda: nn.GELU("tanh"), linear(32, 32), nn.SiLU, linear(32, 32), nn.Mish,
                   linear(32, 32), nn.ELU, linear(32, 32), nn.Softplus, linear(32, 32), nn.GLU, linear(16, 4)),
        ROWS,
    ),
    "einsum": (
        written(lambda s, x: torch.einsum("bnd,bmd->bnm", s.a(x), s.b(x)), a=linear(16, 16), b=linear(16, 16)),
        SEQUENCES,
    ),
    "einsum over nothing": (
        written(lambda s, x: torch.einsum("bnd,bmd->bnm", s.a(x)[..., :0], s.b(x)[..., :0]), a=linear(16, 16),
                b=linear(16, 16)),
        (2, 5, 16),
    ),
    "products over nothing": (
        written(lambda s, x: torch.bmm(s.a(x)[..., :0], s.b(x)[..., :0].mT), a=linear(16, 16), b=linear(16, 16)),
        (2, 5, 16),
    ),
    "mean over a batch": (written(lambda s, x: s.linear(x).mean(0), linear=linear(16, 16)), ROWS),
    "no rows chosen": (
        written(lambda s, x: s.out(s.norm(F.gelu(s.linear(x[x[:, 0] > 9])))), linear=linear(16, 32),
                norm=lambda: nn.LayerNorm(32), out=linear(32, 4)),
        (4, 16),
    ),
    "cross entropy": (loss(F.cross_entropy), ROWS, (32, 0)),
    "cross entropy summed": (loss(lambda h, t: F.cross_entropy(h, t, reduction="sum")), ROWS, (32, 0)),
    "cross entropy of each": (loss(lambda h, t: F.cross_entropy(h, t, reduction="none")), ROWS, (32, 0)),
    "cross entropy smoothed": (
        loss(lambda h, t: F.cross_entropy(h, t, reduction="sum", label_smoothing=0.1)),
        ROWS, (32, 0),
    ),
    "cross entropy of words": (
        loss(lambda h, t: F.cross_entropy(h.float().flatten(0, 1), t.flatten(), reduction="sum"), 5000),
        (0, 6, 16), (5000, 0, 6),
    ),
    "mse": (written(lambda s, x: F.mse_loss(s.linear(x), x), linear=linear(16, 16)), ROWS),
    "mse behind a batch norm": (
        written(lambda s, x: F.mse_loss(s.norm(s.conv(x)), x), conv=conv(8, 8, 3, padding=1),
                norm=lambda: nn.BatchNorm2d(8)),
        IMAGES,
    ),
    "several losses": (written(lambda s, x: several_losses(s.linear(x), x), linear=linear(16, 16)), ROWS),
    "binary cross entropy": (
        loss(lambda h, t: F.binary_cross_entropy_with_logits(h[:, 0], t.float()), 1),
        ROWS, (2, 0),
    ),
}  # fmt: skip


def network_of(name):
    """The network, always of the same numbers."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        return NETWORKS[name][0]()


def inputs_of(name, layout=torch.contiguous_format):
    """Its inputs; those of embeddings and of losses are whole numbers below their first size."""
    torch.manual_seed(1)
    first, *rest = NETWORKS[name][1:]
    made = [torch.randint(first[0], first[1:]) if "embedding" in name or "bags" in name else torch.randn(first)]
    for sizes in rest:
        made.append(torch.randn(sizes) if "attention" in name else torch.randint(sizes[0], sizes[1:]))
    return [x.contiguous(memory_format=layout) if x.dim() == 4 else x for x in made]
