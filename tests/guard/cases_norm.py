"""Norms between guard pages: residual norms, batch norms, group norms."""

import torch
import torch.nn.functional as F

from tests.guard.case import FP32, LOWS, SIZES, drawn, op, over, same

LAST = torch.channels_last
ROWS = (0, 1, 3, 130)


def _norm(total, weight, bias, centered):
    mean = total.mean(-1, keepdim=True) if centered else torch.zeros_like(total[..., :1])
    rstd = ((total - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normed = (total - mean) * rstd
    normed = normed if weight is None else normed * weight.double()
    return normed if bias is None else normed + bias.double()


@over(
    rows=ROWS, width=(*SIZES, 4099), low=LOWS, full_x=(True, False), branch=(True, False), affine=(True, False),
    centered=(True, False),
)  # fmt: skip
def residual_norm(rows, width, low, full_x, branch, affine, centered):
    x = drawn(rows, width, dtype=FP32 if full_x else low)
    other = drawn(rows, width, dtype=low, scale=0.5) if branch else None
    weight, bias = (drawn(width, dtype=FP32), drawn(width, dtype=FP32)) if affine else (None, None)
    full = rows % 2 == 1
    stats, *made = op("residual_norm")(x, other, weight, bias, width, 1e-5, low, True, full, centered)
    total = x.double() if other is None else x.double() + other.double()
    if other is not None:
        same(made[0], total)
        total = made.pop(0).double()
    wanted = _norm(total, weight, bias, centered)
    same(made[0], wanted)
    if full:
        same(made[1], wanted)
    _backward(total, stats, weight, bias, low, made[0], full, centered, width)


def _backward(total, stats, weight, bias, low, like, full, centered, width):
    grads = [drawn(*like.shape, dtype=low, scale=0.3)] + [drawn(*like.shape, dtype=FP32)] * full
    grad_sum = drawn(*like.shape, dtype=FP32, scale=2) if full else None
    seen = total.float()
    found = op("residual_norm_backward")(
        grads, grad_sum, seen, stats, weight, width, low, True, True, weight is not None, bias is not None, centered
    )
    inputs = [t.detach().double().requires_grad_() for t in (seen, weight, bias) if t is not None]
    with torch.enable_grad():
        out = _norm(inputs[0], *(inputs[1:] or (None, None)), centered)
        wanted = list(torch.autograd.grad(out, inputs, sum(g.double() for g in grads)))
    wanted[0] = wanted[0] if grad_sum is None else wanted[0] + grad_sum.double()
    for one, other in zip(found, [wanted[0], wanted[0], *wanted[1:]], strict=True):
        same(one, other, 2.0**-7 if one.dtype == low else 2.0**-12)


IMAGES, CHANNELS, PLACES = (0, 1, 3), (1, 3, 17, 31, 33), ((0, 3), (1, 1), (3, 5), (12, 11))


def _image(images, channels, places, low, scale=1.0):
    return drawn(images, channels, *places, dtype=low, scale=scale).contiguous(memory_format=LAST)


def _by_torch(x, other, weight, bias, relu):
    inputs = [t.detach().double().requires_grad_() for t in (x, other, weight, bias) if t is not None]
    rest = inputs[1:] if other is None else inputs[2:]
    with torch.enable_grad():
        wide = inputs[0]
        mean = wide.mean((0, 2, 3), keepdim=True)
        rstd = ((wide - mean).square().mean((0, 2, 3), keepdim=True) + 1e-5).rsqrt()
        out = (wide - mean) * rstd * rest[0][:, None, None] + rest[1][:, None, None]
        out = out if other is None else out + inputs[1]
        return inputs, F.relu(out) if relu else out


@over(images=IMAGES, channels=CHANNELS, places=PLACES, low=LOWS, form=("alone", "relu", "sum"))
def batch_norm(images, channels, places, low, form):
    x = _image(images, channels, places, low)
    other = _image(images, channels, places, low, 0.5) if form == "sum" else None
    weight, bias = drawn(channels, dtype=FP32), drawn(channels, dtype=FP32, scale=0.1)
    running = [torch.zeros(channels), torch.ones(channels)] if x.numel() > channels or not x.numel() else [None, None]
    relu = form != "alone"
    if other is None:
        out, stats = op("batch_norm_relu")(x, *running, weight, bias, 0.1, 1e-5, relu)
    else:
        out, stats = op("batch_norm_add_relu")(x, other, *running, weight, bias, 0.1, 1e-5)
    inputs, wanted = _by_torch(x, other, weight, bias, relu)
    same(out, wanted.detach())
    same(op("batch_norm_relu_again")(x, other, weight, bias, stats, relu), out, 0.0)
    if running[0] is not None:
        _running(x, running)
    grad = _image(images, channels, places, low, 0.7)
    masked = grad.double() * (out.double() > 0) if relu else grad.double()
    if other is None:
        found = op("batch_norm_relu_backward")(grad, x, weight, bias, stats, relu, True)
    else:
        found = op("batch_norm_add_relu_backward")(grad, x, out, weight, bias, stats, True)
        same(found.pop(2), masked)
    with torch.enable_grad():
        _, plain = _by_torch(x, other, weight, bias, False)
    inputs, plain = _by_torch(x, other, weight, bias, False)
    dx, *_, dweight, dbias = torch.autograd.grad(plain, inputs, masked)
    for one, exact in zip(found, (dweight, dbias, dx), strict=True):
        same(one, exact, 2.0**-5 if one.dtype == low else 2.0**-9)


def _running(x, running):
    if not x.numel():  # as torch's, which leaves them alone
        same(running[0], torch.zeros_like(running[0]), 0.0)
        same(running[1], torch.ones_like(running[1]), 0.0)
        return
    same(running[0], 0.1 * x.double().mean((0, 2, 3)), 2.0**-14)
    same(running[1], 0.9 + 0.1 * x.double().var((0, 2, 3)), 2.0**-14)


@over(images=IMAGES, channels=(4, 12, 34, 66), places=PLACES, low=LOWS, groups=(1, 2), wants=(True, False))
def group_norm(images, channels, places, low, groups, wants):
    x, grad = _image(images, channels, places, low), _image(images, channels, places, low, 0.5)
    weight = drawn(channels, dtype=FP32)
    deep = x.double().unflatten(1, (groups, channels // groups))
    mean = deep.mean((2, 3, 4))
    invstd = ((deep - mean[:, :, None, None, None]).square().mean((2, 3, 4)) + 1e-5).rsqrt()
    found = op("group_norm_backward")(grad, x, weight, mean.float(), invstd.float(), groups, wants)
    inputs = [t.detach().double().requires_grad_() for t in (x, weight, torch.zeros(channels))]
    with torch.enable_grad():
        out = F.group_norm(inputs[0], groups, *inputs[1:], 1e-5)
        dx, dweight, dbias = torch.autograd.grad(out, inputs, grad.double())
    if images and not x.numel():
        dweight = found[0].double()  # of no places torch makes NaN or zero, by the kernel
    for one, exact in zip(found, (dweight, dbias, dx)[: len(found)], strict=True):
        same(one, exact, 2.0**-6 if one.dtype == low else 2.0**-10)
