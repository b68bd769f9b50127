"""Batch norms between guard pages."""

import torch
import torch.nn.functional as F

from tests.guard.case import FP32, LOWS, drawn, op, over, same

LAST = torch.channels_last


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
    out, stats = op("batch_norm_relu")(x, other, *running, weight, bias, 0.1, 1e-5, relu)
    inputs, wanted = _by_torch(x, other, weight, bias, relu)
    same(out, wanted.detach())
    same(op("batch_norm_relu_again")(x, other, weight, bias, stats, relu), out, 0.0)
    if running[0] is not None:
        _running(x, running)
    grad = _image(images, channels, places, low, 0.7)
    masked = grad.double() * (out.double() > 0) if relu else grad.double()
    added = None if other is None else out
    found = op("batch_norm_relu_backward")(grad, x, added, weight, bias, stats, relu, True)
    if other is not None:
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
