"""Every function of ours with a backward of its own, under all ways to differentiate that torch has: as torch's own.

``is_grads_batched=True``, ``create_graph=True``, forward mode, ``torch.func.vmap`` and ``torch.func.grad``.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.backends.cpu.attention.attention_functions import attention_low
from amp_graph.passes.backends.cpu.convolution.conv_functions import (
    depthwise_low,
    depthwise_rows,
)
from amp_graph.passes.backends.cpu.convolution.lower_pointwise_conv import pointwise_conv
from amp_graph.passes.backends.cpu.linear.lower_linears import linear_low
from amp_graph.passes.backends.cpu.loss.cross_entropy_functions import cross_entropy_low
from amp_graph.passes.backends.cpu.norm.batch_norm_functions import norm_add_relu, norm_and_relu
from amp_graph.passes.backends.recurrent import lstm_functions
from amp_graph.passes.backends.recurrent.gru_functions import gru_layer
from amp_graph.passes.casts.low_layer_norm import layer_norm_low
from amp_graph.passes.casts.share_casts import shared_cast
from amp_graph.passes.layout.global_avg_pool_gradient import pooled
from amp_graph.passes.memory.gradient_buffers import table_rows

LOW, WIDE, LAST = torch.bfloat16, torch.float32, torch.channels_last
CLASSES = torch.tensor([1, -100, 3])  # the second does not count
IDS = torch.tensor([[1, 0, 3], [2, 2, 1]])


def drawn(*shape, dtype=LOW, layout=torch.contiguous_format, seed=0):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)
    return made.contiguous(memory_format=layout)


def image(*shape):
    return drawn(*shape, layout=LAST)


def attention(q, k, v, bias=0.0):
    """As it is written out: torch's kernel has no second and no forward derivatives."""
    return ((q @ k.mT).float() * q.shape[-1] ** -0.5 + bias).softmax(-1).to(v.dtype) @ v


def lstm(by_kernel, *given):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lstm_functions, "is_faster_than_onednn", lambda *shape: by_kernel)
        return lstm_functions.lstm_layer(*given, False, True, False)


def torchs_lstm(x, wi, wh, bi, bh, h, c):
    out, *last = torch.lstm(x, (h[None], c[None]), [wi, wh, bi, bh], True, 1, 0.0, False, False, False)
    return [out, *(t.squeeze(-3) for t in last)]


LSTM = (
    drawn(3, 2, 4), drawn(20, 4), drawn(20, 5), drawn(20), drawn(20, seed=1), drawn(2, 5), drawn(2, 5, seed=1),
)  # fmt: skip
# name: (ours, torch's, operands). Both are asked for the same in every mode.
FUNCTIONS = {
    "attention": (
        lambda q, k, v: attention_low(q, k, v, is_causal=True),
        lambda q, k, v: attention(q, k, v, torch.full((6, 6), -torch.inf).triu(1)),
        (drawn(2, 2, 6, 8), drawn(2, 2, 6, 8, seed=1), drawn(2, 2, 6, 8, seed=2)),
    ),
    "attention of itself": (
        lambda x: attention_low(x, x, x),
        lambda x: attention(x, x, x),
        (drawn(2, 2, 6, 8),),
    ),
    "pointwise conv": (
        lambda x, w, b: pointwise_conv(x, w, b, (1, 1), False),
        F.conv2d,
        (image(2, 4, 5, 5), drawn(6, 4, 1, 1), drawn(6)),
    ),
    "pointwise conv of few": (
        lambda x, w, b: pointwise_conv(x, w, b, (2, 2), True),
        lambda x, w, b: F.conv2d(x, w, b, 2),
        (image(2, 4, 5, 5), drawn(6, 4, 1, 1), drawn(6)),
    ),
    "depthwise": (
        lambda x, w, b: depthwise_low(x, w, b, (1, 1), (1, 1), True, True),
        lambda x, w, b: F.conv2d(x, w, b, 1, 1, groups=4),
        (image(2, 4, 5, 5), drawn(4, 1, 3, 3), drawn(4)),
    ),
    "depthwise rows": (
        lambda x, w, b: depthwise_rows(x, w, b, (1,), (1,), True, True),
        lambda x, w, b: F.conv1d(x, w, b, 1, 1, groups=4),
        (drawn(2, 4, 7), drawn(4, 1, 3), drawn(4)),
    ),
    "layer norm": (
        lambda x, w, b: layer_norm_low(x, (8,), w, b),
        lambda x, w, b: F.layer_norm(x.float(), (8,), w, b).to(LOW),
        (drawn(5, 8), drawn(8, dtype=WIDE), drawn(8, dtype=WIDE)),
    ),
    "layer norm of a vector": (
        lambda x, w, b: layer_norm_low(x, (8,), w, b),
        lambda x, w, b: F.layer_norm(x.float(), (8,), w, b).to(LOW),
        (drawn(8), drawn(8, dtype=WIDE), drawn(8, dtype=WIDE)),
    ),
    "norm and relu": (
        lambda x, w, b: norm_and_relu(x, None, None, w, b, 0.1, 1e-5, True),
        lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, True)),
        (image(2, 4, 5, 5), drawn(4, dtype=WIDE), drawn(4, dtype=WIDE)),
    ),
    "norm, sum and relu": (
        lambda x, y, w, b: norm_add_relu(x, y, None, None, w, b, 0.1, 1e-5),
        lambda x, y, w, b: F.relu(F.batch_norm(x, None, None, w, b, True) + y),
        (image(2, 4, 5, 5), image(2, 4, 5, 5).flip(0), drawn(4, dtype=WIDE), drawn(4, dtype=WIDE)),
    ),
    "shared cast": (
        lambda x: shared_cast(x, LOW, 2, True),
        lambda x: (x, x.to(LOW), x.to(LOW)),
        (drawn(3, 4, dtype=WIDE),),
    ),
    "pooled": (
        lambda x: pooled(x, True, x.dtype),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        (image(2, 4, 5, 5),),
    ),
    "pooled in fp32": (
        lambda x: pooled(x, False, WIDE),
        lambda x: x.mean((2, 3), dtype=WIDE),
        (image(2, 4, 5, 5),),
    ),
    "linear": (linear_low, F.linear, (drawn(5, 4), drawn(6, 4), drawn(6))),
    "linear of a vector": (linear_low, F.linear, (drawn(4), drawn(6, 4), drawn(6))),
    "cross entropy": (
        lambda x: cross_entropy_low(x, CLASSES),
        lambda x: F.cross_entropy(x.float(), CLASSES),
        (drawn(3, 5),),
    ),
    "rows": (
        lambda w: table_rows(w, IDS, None, False),
        lambda w: F.embedding(IDS, w),
        (drawn(4, 6, dtype=WIDE),),
    ),
    "bags": (
        lambda w: table_rows(w, IDS, None, True),
        lambda w: F.embedding(IDS, w).sum(1),
        (drawn(4, 6, dtype=WIDE),),
    ),
    "gru": (
        lambda x, *rest: gru_layer(x, *rest, False),
        lambda x, wi, wh, bi, bh, h: [
            t.reshape(t.shape[-3:] if i == 0 else t.shape[-2:])
            for i, t in enumerate(torch.gru(x, h[None], [wi, wh, bi, bh], True, 1, 0.0, False, False, False))
        ],
        (drawn(3, 2, 4), drawn(15, 4), drawn(15, 5), drawn(15), drawn(15, seed=1), drawn(2, 5)),
    ),
    "gru, backwards": (
        lambda x, *rest: gru_layer(x, *rest, True),
        lambda x, wi, wh, bi, bh, h: [
            t.reshape(t.shape[-3:]).flip(0) if i == 0 else t.reshape(t.shape[-2:])
            for i, t in enumerate(torch.gru(x.flip(0), h[None], [wi, wh, bi, bh], True, 1, 0.0, False, False, False))
        ],
        (drawn(3, 2, 4), drawn(15, 4), drawn(15, 5), drawn(15), drawn(15, seed=1), drawn(2, 5)),
    ),
    "lstm": (functools.partial(lstm, False), torchs_lstm, LSTM),
    "lstm by our kernel": (functools.partial(lstm, True), torchs_lstm, LSTM),
}


# Ways to call a function that is there already, left to the long sweeps.
VARIANTS = {
    "attention of itself", "pointwise conv of few", "depthwise rows", "linear of a vector", "gru",
}  # fmt: skip
# Of kernels that a pass calls only where they can be made.
COMPILED = {"depthwise", "norm and relu", "norm, sum and relu", "lstm by our kernel"}


def marks(name):
    found = [pytest.mark.slow] * (name in VARIANTS) + [pytest.mark.compiled] * (name in COMPILED)
    return [*found, *[pytest.mark.onednn] * name.startswith("lstm")]


CASES = [pytest.param(n, marks=marks(n)) for n in FUNCTIONS]


def parts(found):
    return [found] if isinstance(found, torch.Tensor) else list(found)


def leaves_of(name, dtype=None):
    """Operands as leaves, as low as they are or of ``dtype``, in the layout they have."""
    return [t.detach().to(dtype or t.dtype).requires_grad_() for t in FUNCTIONS[name][2]]


def cotangents(results, seed=5):
    return [drawn(*r.shape, dtype=WIDE, seed=seed + i).to(LOW).to(r.dtype) for i, r in enumerate(results)]


def batched(function, given):
    outs = parts(function(*given))
    many = [torch.stack([g, -2 * g.flip(0), 0 * g]) for g in cotangents(outs)]
    return torch.autograd.grad(outs, given, many, is_grads_batched=True)


def twice(function, given):
    outs = parts(function(*given))
    first = torch.autograd.grad([o.float().sin() for o in outs], given, cotangents(outs), create_graph=True)
    total = sum((g.float() * drawn(*g.shape, dtype=WIDE, seed=9)).sum() for g in first)
    return [g for g in torch.autograd.grad(total, given, allow_unused=True) if g is not None]


def forward_mode(function, given):
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(t.detach(), drawn(*t.shape, seed=3).to(t.dtype)) for t in given]
        return [torch.autograd.forward_ad.unpack_dual(r).tangent for r in parts(function(*duals))]


def over_batches(function, given):
    stacked = [torch.stack([t.detach(), t.detach().flip(0)]) for t in given]
    return parts(torch.func.vmap(lambda *g: tuple(parts(function(*g))))(*stacked))


def functional(function, given):
    inside = [t.detach() for t in given]
    total = lambda *g: sum((r.float() * c.float()).sum() for r, c in zip(parts(function(*g)), seeds, strict=True))  # noqa: E731
    seeds = cotangents(parts(function(*inside)))
    return torch.func.grad(total, tuple(range(len(inside))))(*inside)


MODES = {f.__name__: f for f in (batched, twice, forward_mode, over_batches, functional)}


def error(got, true):
    size = true.norm().item()
    return (got.double() - true).norm().item() / (size if size > 1e-12 else 1.0)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore:.*vmap.*:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # forward mode's own
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_as_torch_in_every_mode(name, mode):
    if (name, mode) == ("bags", "forward_mode"):  # outside a backward it is torch's embedding_bag, which has none
        return
    ours, torchs, _ = FUNCTIONS[name]
    try:
        true = [t.double() for t in MODES[mode](torchs_in_fp32(torchs), leaves_of(name, WIDE))]
    except (NotImplementedError, RuntimeError):  # torch has no such derivative of it in fp32
        if not name.startswith(("gru", "lstm")):
            raise
        return
    try:
        theirs = list(MODES[mode](torchs, leaves_of(name)))
    except (
        NotImplementedError,
        RuntimeError,
    ):  # torch has no formula for it in low precision: the best of ours is a rounding or two
        theirs = [t.to(LOW) for t in true]
    got = list(MODES[mode](ours, leaves_of(name)))
    assert [g.shape for g in got] == [t.shape for t in true]
    worst = [(error(g, t), 1.5 * error(o, t) + 0.02) for g, t, o in zip(got, true, theirs, strict=True)]
    assert all(mine <= allowed for mine, allowed in worst), worst


def torchs_in_fp32(function):
    """The same function of fp32 operands, whose casts to low precision do nothing."""
    return lambda *given: [r.float() for r in parts(function(*given))]
