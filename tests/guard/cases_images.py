"""Convolutions between guard pages: the gradients of depthwise ones."""

import torch

from tests.guard.case import LOWS, drawn, op, over, same

LAST = torch.channels_last


@over(
    images=(0, 1, 3), channels=(1, 3, 16, 17, 33), size=((1, 1), (5, 7), (9, 6)),
    kernel=((1, 1), (3, 3), (5, 2), (7, 7)), stride=((1, 1), (2, 3)), low=LOWS,
)  # fmt: skip
def depthwise(images, channels, size, kernel, stride, low):
    padding = [kernel[0] // 2, kernel[1] // 2]
    x = drawn(images, channels, *size, dtype=low).contiguous(memory_format=LAST)
    weight = drawn(channels, 1, *kernel, dtype=low)
    geometry = [list(stride), padding, [1, 1], False, [0, 0], channels]
    made = torch.convolution(x.double(), weight.double(), None, *geometry)
    grad = drawn(*made.shape, dtype=low, scale=0.5).contiguous(memory_format=LAST)
    dx, dweight, _ = kernel_of(torch.ops.aten.convolution_backward, grad, x, weight, geometry)
    found = op("depthwise_weight_gradient")(grad, x, list(kernel), list(stride), padding)
    same(found, dweight, what="weight")
    same(op("depthwise_input_gradient")(grad, weight, list(x.shape), list(stride), padding), dx, what="input")


def kernel_of(kind, grad, x, weight, geometry):
    """Call torch's backward in fp64; it has none for an empty batch, whose gradients are nothing and zeros."""
    if not x.numel():
        return x.double(), torch.zeros_like(weight, dtype=torch.float64), None
    return kind(grad.double(), x.double(), weight.double(), None, *geometry, [True, True, False])
