"""Thresholds for image rewrites: convolutions, norms and memory layout. Numbers are measured unless stated otherwise.

Before: a pass that can rewrite ``conv2d``. After: ``channels_last_is_profitable("cpu", torch.bfloat16, 3)``.
"""

from __future__ import annotations

import torch

from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.torch_compat.cpu import multiplies_bf16

# One convolution alone does not recover the cost of a layout change before and after it.
FEWEST_CONVOLUTIONS = 2


def channels_last_is_profitable(device: str, dtype: torch.dtype, convolutions: int) -> bool:
    """Say whether a graph with so many ``convolutions`` of ``dtype`` runs faster in channels_last on ``device``.

    bf16 on CPU: torch's norms and poolings are up to 15 times slower on contiguous images than on channels_last ones,
    convolutions up to 8 times (1x1, AMX). ResNet-50 and a U-Net: autocast on channels_last takes 0.7 to 0.97 of the
    time. CUDA, low precision: tensor cores read channels_last, and cuDNN transposes other images before and after each
    convolution. On an H200, autocast on channels_last took 0.82 to 1.0 of the time (ResNet-50, U-Net, training and
    inference, eager and compiled).
    """
    if convolutions < FEWEST_CONVOLUTIONS:
        return False
    if device == "cuda":
        return dtype in HALVES
    return device == "cpu" and dtype == torch.bfloat16 and multiplies_bf16()


def channels_last_weights_are_profitable(device: str) -> bool:
    """Say whether a convolution's weight should be cast into channels_last: else cuDNN transposes it in each call.

    oneDNN reorders weights into its own layout in any case.
    """
    return device == "cuda"


def casting_into_layout_is_profitable(device: str) -> bool:
    """Say whether one copy into another dtype and into channels_last is faster than two separate copies.

    On the CPU it takes 1.7 to 2.2 times as long for more than one channel: torch's fast transposing copy needs equal
    dtypes. Elsewhere it reads and writes half as much.
    """
    return device != "cpu"


# Smallest patch side (CPU, GPU) for which a linear over rows is faster; and if the result is used as an image.
LEAST_PATCH, LEAST_PATCH_ON_GPUS, LEAST_PATCH_OF_AN_IMAGE = 4, 2, 8


def patches_are_profitable(device: str, channels: int, kernel: tuple[int, int], in_rows: bool) -> bool:
    """Say whether a convolution over non-overlapping patches is faster as a linear over rows.

    ``in_rows``: the result is read as [batch, places, channels]. Speedups over the convolution, bf16 on CPU, 3
    channels: kernel sides of 14 to 32: training 3.6 to 10, inference 1.9 to 3.6; side 4: training 1.7, inference 1. If
    the result is read as an image, a side of 4 loses its gain to the layout change (ConvNeXt 0.99).
    bf16 on an H100, 3 and 4 channels, 8 to 64 images, CUDA graph: sides of 14 to 32: training 2.6 to 16, inference 2.7
    to 27; 4 and 8: 2.3 to 2.8 and 2.2 to 4.6; 2: 3.1 and 3.6. Read as images: sides of 8 to 32: training 1.5 to 13;
    side 4: inference 0.8. With 96 and 192 channels, convolutions in channels_last are as fast or faster.
    """
    least = LEAST_PATCH_OF_AN_IMAGE if not in_rows else LEAST_PATCH if device == "cpu" else LEAST_PATCH_ON_GPUS
    return device in ("cpu", "cuda") and channels <= 4 and min(kernel) >= least


# Kernel side up to which oneDNN JIT-compiles the weight gradient of a depthwise convolution.
MOST_COMPILED = 3


def depthwise_weight_gradient_is_profitable(device: str, dtype: torch.dtype, kernel: tuple[int, int]) -> bool:
    """Say whether our C kernel beats oneDNN's weight gradient of a depthwise convolution.

    Speedups, bf16 on CPU with dot products, 8 images, channels_last (``benchmarks/depthwise.py``): 12 to 45 for 7x7
    kernels, 11 to 30 for 5x5, 0.7 for 3x3, which oneDNN JIT-compiles too.
    """
    return device == "cpu" and dtype == torch.bfloat16 and max(kernel) > MOST_COMPILED and multiplies_bf16()


def depthwise_input_gradient_is_profitable(device: str, dtype: torch.dtype, stride: tuple[int, int]) -> bool:
    """Say whether our C kernel beats oneDNN's input gradient of a depthwise convolution.

    Speedups, bf16 on CPU with dot products, 8 images, channels_last (``benchmarks/depthwise.py``): 15 to 67 with a
    stride, for which oneDNN has no bf16 kernel; 0.4 to 0.5 without.
    """
    return device == "cpu" and dtype == torch.bfloat16 and max(stride) > 1 and multiplies_bf16()


# Kernel size up to which oneDNN JIT-compiles depthwise convolutions of sequences in their own layout.
MOST_OF_A_SEQUENCE = 11


def depthwise_by_images_is_profitable(device: str, dtype: torch.dtype, kernel: int) -> bool:
    """Say whether a depthwise convolution of sequences is faster as one of channels_last images of height 1.

    Speedups, bf16 on CPU with dot products, copies included: 5 to 21 for kernel sizes of 15 to 128, 0.4 to 0.6 for 4
    to 11.
    """
    return device == "cpu" and dtype == torch.bfloat16 and kernel > MOST_OF_A_SEQUENCE and multiplies_bf16()


def folding_is_profitable(device: str, dtype: torch.dtype) -> bool:
    """Say whether a batch norm in eval mode should be folded into its convolution on ``device``.

    bf16 on CPU with dot products: the norm and the relu after a convolution take 5 % (3x3, 128 channels) to 60 % (1x1,
    256 channels) of its time. With folded norms, a ResNet-50 takes 0.7 to 0.8 of the time.
    """
    return device == "cpu" and dtype == torch.bfloat16 and multiplies_bf16()


# Pixels of the whole batch up to which the weight reordering of a 1x1 convolution makes it slower than a matmul.
FEW_PLACES = 512


def pointwise_product_is_profitable(device: str, dtype: torch.dtype, places: int, trains: bool) -> bool:
    """Say whether a 1x1 convolution of channels_last images is faster as a matmul, in forward or in a gradient.

    ``places``: pixels of the batch. Speedups, bf16 on CPU with dot products, ResNet-50's shapes, also stride 2 (which
    copies its input): weight gradient 0.96 to 1.3 from 1,500 pixels on, 1.2 to 2.8 below; forward and input gradient
    1.07 to 1.6 at 200 to 400 pixels, 0.94 to 1.13 above, where they stay convolutions. With AMX all three took 0.55 to
    0.60 of the time at 784 pixels, and 0.77 (weight) to 1.02 at 12,544.
    """
    fits = device == "cpu" and dtype == torch.bfloat16 and multiplies_bf16()
    return fits and (trains or places <= FEW_PLACES)


# Elements of a batch norm below which the call of an autograd.Function costs more than the saved memory traffic.
FEWEST_OF_A_BATCH_NORM = 1 << 17


def batch_norm_in_one_pass_is_profitable(device: str, elements: int) -> bool:
    """Say whether a training batch norm of ``elements`` and the relu after it are faster in one C kernel.

    Time over that of torch's norm and relu, CPU, bf16 with AVX-512, forward and backward: 0.5 to 0.65 from 200,000
    elements on, 0.7 at 100,000, 0.9 at 65,536. With cold caches, as in a step: 0.6 to 0.9, and 1.0 at 65,536
    (``benchmarks/batch_norm.py``). A norm without a relu, cold caches: 0.4 to 0.75 from 300,000 elements on, 1.2 at
    75,000.
    """
    return device == "cpu" and elements >= FEWEST_OF_A_BATCH_NORM
