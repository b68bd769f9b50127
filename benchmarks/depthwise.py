"""Gradients of depthwise convolutions in bf16: compiled C against oneDNN's; and whole models that have them.

By channels, side, kernel and stride of 8 channels_last images: the gradients of the weight, and of the input. Ratios of
process CPU times of interleaved rounds, ours to torch's: below 1 ours is faster [quartiles].

    python benchmarks/depthwise.py [--rounds 15] [--threads 1]
    python benchmarks/depthwise.py --models  # training steps of Hugging Face's at 224 px, as parts of autocast's time
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from interleaved import interleaved, parser_of, quartiles, spread
from torch import Tensor, nn

import amp_graph
from amp_graph.passes.backends.cpu.convolution.conv_functions import OPS

IMAGES, PIXELS = 8, 224
# Of ConvNeXt-T, EfficientNet-B0 and MobileNetV2 at 224 px: channels, side, kernel, stride.
SIZES = (
    (96, 56, 7, 1), (192, 28, 7, 1), (384, 14, 7, 1), (768, 7, 7, 1), (240, 14, 5, 1), (144, 56, 5, 2), (672, 14, 5, 2),
    (96, 112, 3, 2), (144, 56, 3, 2), (144, 56, 3, 1),
)  # fmt: skip
LAST = torch.channels_last


def gradients(channels: int, side: int, kernel: int, stride: int) -> dict[str, dict[str, Callable[[], object]]]:
    """Return the calls that make each gradient, torch's and ours."""
    torch.manual_seed(0)
    x = torch.randn(IMAGES, channels, side, side).bfloat16().contiguous(memory_format=LAST)
    weight, size = torch.randn(channels, 1, kernel, kernel).bfloat16(), [kernel, kernel]
    how = [stride] * 2, [kernel // 2] * 2
    grad = torch.randn_like(torch.conv2d(x, weight, None, *how, 1, channels))

    def torchs(*wanted: bool) -> Callable[[], object]:
        given = (grad, x, weight, None, *how, (1, 1), False, (0, 0), channels, (*wanted, False))
        return lambda: torch.ops.aten.convolution_backward(*given)

    weights = {"torch": torchs(False, True), "ours": lambda: OPS.depthwise_weight_gradient(grad, x, size, *how)}
    shape = list(x.shape)
    inputs = {"torch": torchs(True, False), "ours": lambda: OPS.depthwise_input_gradient(grad, weight, shape, *how)}
    return {"weight": weights, "input": inputs}


def models() -> dict[str, Callable[[], nn.Module]]:
    """Return what builds each model, with its random weights."""
    import transformers as hf

    b0 = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "image_size": PIXELS, "hidden_dim": 1280}
    still = {"dropout_rate": 0.0, "drop_connect_rate": 0.0}
    return {
        "ConvNeXt-T": lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig(num_labels=1000)),
        "EfficientNet-B0": lambda: hf.EfficientNetForImageClassification(
            hf.EfficientNetConfig(**b0, **still, num_labels=1000)
        ),
        "MobileNetV2": lambda: hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(num_labels=1000)),
    }


def training_step(build: Callable[[], nn.Module], how: str) -> Callable[[], object]:
    """Return a step with fused AdamW: "autocast" on contiguous or channels_last images, converted, or a TrainStep."""
    torch.manual_seed(0)
    model, images = build().train(), torch.randn(IMAGES, 3, PIXELS, PIXELS)
    labels = torch.randint(1000, (IMAGES,))
    if how == "autocast, channels_last":
        model, images = model.to(memory_format=LAST), images.contiguous(memory_format=LAST)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss_of(out: object, labels: Tensor) -> Tensor:
        return F.cross_entropy(out.logits.float(), labels)

    if how == "TrainStep":
        step = amp_graph.TrainStep(model, loss_of, optimizer, "bf16")
        return lambda: step(images, labels)
    if how == "convert":
        amp_graph.convert(model, "bf16")

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=how.startswith("autocast")):
            loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()

    return run


def main() -> None:
    """Print a line for each size, or model."""
    parser = parser_of(__doc__, rounds=15)
    parser.add_argument("--models", action="store_true", help="whole training steps")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for size in () if options.models else SIZES:
        found = {
            what: interleaved(calls, options.rounds, time.process_time, least=2e-3)
            for what, calls in gradients(*size).items()
        }
        told = (f"{what} {spread(seconds['ours'], seconds['torch'])}" for what, seconds in found.items())
        print(f"{size}: {', '.join(told)}", flush=True)
    for name, build in models().items() if options.models else ():
        ways = ("autocast", "autocast, channels_last", "convert", "TrainStep")
        seconds = interleaved({how: training_step(build, how) for how in ways}, options.rounds, time.process_time)
        best = min(ways[:2], key=lambda how: quartiles(seconds[how], seconds["autocast"])[1])
        told = (f"{how} {spread(seconds[how], seconds[best])}" for how in ways if how != best)
        print(f"{name}, parts of {best}: {', '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
