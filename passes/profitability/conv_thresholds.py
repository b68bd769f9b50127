"""When rewrites of images pay: convolutions, their norms, and how images lie; measured where it says so.

Before: a pass that knows how to rewrite ``conv2d``. After: ``channels_last_is_profitable("cpu", torch.bfloat16, 3)``.
"""

from __future__ import annotations

import torch

from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.torch_compat.cpu import cpu_has_amx, multiplies_bf16

# One convolution alone does not earn back a change of layout before and behind it.
FEWEST_CONVOLUTIONS = 2


def channels_last_is_profitable(device: str, dtype: torch.dtype, convolutions: int) -> bool:
    """Say whether ``convolutions`` of ``dtype`` in a graph run faster on channels_last tensors on ``device``.

    bf16 on CPU: torch's norms and poolings of contiguous images are up to 15 times slower there, convolutions up to
    8 times (1x1, with matrix units); of ResNet-50 and a U-Net, autocast on channels_last takes 0.7 to 0.97 of the time.
    CUDA, in low precision: tensor cores read images so, and cuDNN turns others before and behind each convolution;
    autocast on channels_last took 0.82 to 1.0 of the time on an H200 (ResNet-50, U-Net, in both modes, compiled too).
    """
    if convolutions < FEWEST_CONVOLUTIONS:
        return False
    if device == "cuda":
        return dtype in HALVES
    return device == "cpu" and dtype == torch.bfloat16 and multiplies_bf16()


def channels_last_weights_are_profitable(device: str) -> bool:
    """Say whether a convolution's weight is better cast into channels_last: cuDNN would turn it at each call.

    oneDNN lays weights out in a way of its own, whatever it is given.
    """
    return device == "cuda"


def casting_into_layout_is_profitable(device: str) -> bool:
    """Say whether one copy into another dtype and channels_last takes less time than one after the other.

    On the CPU it takes 1.7 to 2.2 times as long, where there is more than one channel: torch's fast transposing copy is
    for one dtype. Elsewhere it reads and writes half as much.
    """
    return device != "cpu"


# Places of a patch's side from which on it is read faster in rows, where its result is, and where that is an image.
LEAST_PATCH, LEAST_PATCH_ON_GPUS, LEAST_PATCH_OF_AN_IMAGE = 4, 2, 8


def patches_are_profitable(device: str, channels: int, kernel: tuple[int, int], in_rows: bool) -> bool:
    """Say whether a convolution over patches beside each other, of so many channels, is better a linear over rows.

    ``in_rows``: read as [batch, places, channels]. bf16 on CPU, 3 channels: a kernel of 14 to 32 places a side trains
    3.6 to 10 times and infers 1.9 to 3.6 times as fast, one of 4 1.7 times and the same; where images are wanted, a
    kernel of 4 takes back in their layout what it gives (ConvNeXt 0.99).
    bf16 on an H100, 3 and 4 channels, 8 to 64 images, replayed: 14 to 32 places a side train 2.6 to 16 times and infer
    2.7 to 27 times as fast, 4 and 8 2.3 to 2.8 and 2.2 to 4.6 times, 2 3.1 and 3.6 times; as images 8 to 32 train 1.5
    to 13 times as fast, 4 infers at 0.8. Of 96 and 192 channels images in channels_last are as fast or faster.
    """
    least = LEAST_PATCH_OF_AN_IMAGE if not in_rows else LEAST_PATCH if device == "cpu" else LEAST_PATCH_ON_GPUS
    return device in ("cpu", "cuda") and channels <= 4 and min(kernel) >= least


# Places of one output image, and channels, between which the CPU's convolution kernels lose to a product.
FEW_OF_AN_IMAGE, SOME_OF_AN_IMAGE, ENOUGH_CHANNELS = 16, 49, 32
MANY_CHANNELS = 128  # from which on a product by matrix units wins over more places, too


def weight_gradient_by_product_is_profitable(
    device: str, dtype: torch.dtype, channels: int, kernel: int, strided: bool, places: int
) -> bool:
    """Say whether patches times gradients beat the convolution kernel's gradient of a weight of ``kernel`` places.

    bf16 on CPU with dot products, batches of 32, channels_last: 1.3 to 10 times as fast at up to 4 x 4 places; at
    7 x 7 places 1.1 to 1.3 times for 1x1 kernels, 1.2 to 3 times for strides; 0.4 to 1.1 for the rest. With matrix
    units the kernel's gradient at 4 x 4 places ran at a tenth of a product's rate; at 7 x 7 places of 3x3 kernels,
    16 images of 256 channels, it took 3.8 ms, the product 1.4, with 512 channels and 32 images 27 and 8.3. There,
    both gradients took 0.6 of the kernel's time with 512 channels, 0.8 with 128, 0.9 with 64, 1.1 with 32.
    """
    if device != "cpu" or dtype != torch.bfloat16 or channels < ENOUGH_CHANNELS or not multiplies_bf16():
        return False
    by_tiles = cpu_has_amx() and channels >= MANY_CHANNELS
    return places <= FEW_OF_AN_IMAGE or (places <= SOME_OF_AN_IMAGE and (kernel == 1 or strided or by_tiles))


# Places of a kernel up to which oneDNN has compiled a gradient of a depthwise convolution's weight.
MOST_COMPILED = 3


def depthwise_weight_gradient_is_profitable(device: str, dtype: torch.dtype, kernel: tuple[int, int]) -> bool:
    """Say whether compiled C of ours beats oneDNN's gradient of a depthwise convolution's weight.

    bf16 on CPU with dot products, 8 images, channels_last (``benchmarks/depthwise.py``): 12 to 45 times as fast for
    7 x 7 places of a kernel, 11 to 30 times for 5 x 5; 0.7 for 3 x 3, which oneDNN compiles as well.
    """
    return device == "cpu" and dtype == torch.bfloat16 and max(kernel) > MOST_COMPILED and multiplies_bf16()


def depthwise_input_gradient_is_profitable(device: str, dtype: torch.dtype, stride: tuple[int, int]) -> bool:
    """Say whether compiled C of ours beats oneDNN's gradient of a depthwise convolution's input.

    bf16 on CPU with dot products, 8 images, channels_last (``benchmarks/depthwise.py``): with a stride, for which
    oneDNN has no bf16 kernel, 15 to 67 times as fast; without 0.4 to 0.5.
    """
    return device == "cpu" and dtype == torch.bfloat16 and max(stride) > 1 and multiplies_bf16()


# Places of a kernel up to which oneDNN has compiled depthwise convolutions of sequences as they lie.
MOST_OF_A_SEQUENCE = 11


def depthwise_by_images_is_profitable(device: str, dtype: torch.dtype, kernel: int) -> bool:
    """Say whether a depthwise convolution of sequences is faster as one of channels_last images, one place high.

    bf16 on CPU with dot products, copies included: 5 to 21 times as fast for kernels of 15 to 128 places, 0.4 to 0.6
    for 4 to 11.
    """
    return device == "cpu" and dtype == torch.bfloat16 and kernel > MOST_OF_A_SEQUENCE and multiplies_bf16()


def bias_gradient_by_sum_is_profitable(device: str, dtype: torch.dtype) -> bool:
    """Say whether a sum beats the gradient of a bias that a transposed convolution's kernel computes.

    bf16 on CPU with dot products, backward with a sum of its own as a part of that with the kernel's: 0.2 to 0.35 for
    64 x 64 and 32 x 32 places of 64 and 128 channels in channels_last, 0.15 for volumes, 0.6 to 0.7 for sequences, one
    or two threads; 0.66 for 8,192 elements. A U-Net's step takes 0.94 of the time. fp32 was 0.8 to 1.05.
    """
    return device == "cpu" and dtype == torch.bfloat16 and multiplies_bf16()


def folding_is_profitable(device: str, dtype: torch.dtype) -> bool:
    """Say whether a batch norm in evaluation is better folded into its convolution on ``device``.

    bf16 on CPU with dot products: the norm and the relu behind a convolution take 5 % (3x3, 128 channels) to 60 % (1x1,
    256 channels) of its time; folded, a ResNet-50 takes 0.7 to 0.8 of it.
    """
    return device == "cpu" and dtype == torch.bfloat16 and multiplies_bf16()


# Places of all images together up to which laying out a 1x1 convolution's weights costs what a product does not.
FEW_PLACES = 512


def pointwise_product_is_profitable(device: str, dtype: torch.dtype, places: int, trains: bool) -> bool:
    """Say whether a 1x1 convolution of channels_last images is faster as a product, at least one of the three.

    bf16 on CPU with dot products, at ResNet-50's shapes, stride 2 included (a copy of what is read): the weight's
    gradient 0.96 to 1.3 times as fast from 1,500 places on and 1.2 to 2.8 times below; result and gradient of the
    input 1.07 to 1.6 times at 200 to 400 places, 0.94 to 1.13 above, where they stay. With matrix units all three took
    0.55 to 0.60 of the time at 784 places, and 0.77 (weight) to 1.02 at 12,544.
    """
    fits = device == "cpu" and dtype == torch.bfloat16 and multiplies_bf16()
    return fits and (trains or places <= FEW_PLACES)


# Elements of a batch norm below which a call of a function with a backward of its own is seen, more than memory.
FEWEST_OF_A_BATCH_NORM = 1 << 17


def batch_norm_in_one_pass_is_profitable(device: str, elements: int) -> bool:
    """Say whether a batch norm of ``elements`` that trains, and the relu behind it, are faster in compiled C.

    CPU, bf16 with AVX-512, forward and backward of torch's norm and relu: 0.5 to 0.65 of the time from 200,000 elements
    on, 0.7 at 100,000, 0.9 at 65,536; where caches were emptied in between, as in a step, 0.6 to 0.9 and 1.0
    (``benchmarks/batch_norm.py``). A norm without a relu takes 0.4 to 0.75 of torch's, from 300,000 elements on with
    caches emptied, 1.2 at 75,000.
    """
    return device == "cpu" and elements >= FEWEST_OF_A_BATCH_NORM


# Elements of a group norm below which a call of a function with a backward of its own is seen.
FEWEST_OF_A_GROUP_NORM = 1 << 15


def group_norm_backward_is_profitable(device: str, elements: int) -> bool:
    """Say whether the gradients of a group norm of ``elements`` in channels_last are faster by compiled C.

    CPU, bf16 with AVX-512, forward and backward: 0.1 to 0.2 of torch's time for images of 64 and 32 places a side, 64
    and 320 channels, and 16 places of 256; 1.8 for 3,024 elements. A diffusion U-Net's step takes 0.9 of the time.
    """
    return device == "cpu" and elements >= FEWEST_OF_A_GROUP_NORM


# Multiplications of a convolution of sequences from which on calls for each item of the batch are not seen.
FEWEST_OF_WINDOWS, FEWEST_OF_WINDOWS_THAT_TRAIN = 1 << 22, 1 << 24


def windows_are_profitable(device: str, dtype: torch.dtype, places: int, weight: int, trains: bool) -> bool:
    """Say whether a convolution of sequences is faster as products of windows; ``places`` of all the batch.

    bf16 on CPU with AMX, forward and backward, of torch's time: 0.1 for 1 channel to 512 with 10 taps, 0.3 to 0.5 for
    512 to 512 with 3 taps over 200 to 1,600 places; one thread and two.
    """
    fewest = FEWEST_OF_WINDOWS_THAT_TRAIN if trains else FEWEST_OF_WINDOWS
    return device == "cpu" and dtype == torch.bfloat16 and multiplies_bf16() and places * weight >= fewest
