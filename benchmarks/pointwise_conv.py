"""1 x 1 convolutions of ResNet-50 in bf16 on channels_last images: torch's against matrix products.

    python benchmarks/pointwise_conv.py [--batch 8] [--rounds 9] [--threads 1] [--skip-models]

Result, gradient of the input and gradient of the weight, each by itself; ratios are medians over interleaved rounds:
above 1 the product is faster. Then whole ResNet-50s with and without the pass [quartiles].
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from interleaved import interleaved, parser_of, spread

import amp_graph
from amp_graph.passes.backends.cpu.convolution import lower_pointwise_conv as ours
from amp_graph.passes.backends.cpu.linear.amx_gemm import gradients_of_linear

LOW, LAST = torch.bfloat16, torch.channels_last
# Channels in and out, width and height, stride.
SHAPES = (
    (64, 256, 56, 1), (256, 64, 56, 1), (256, 128, 56, 1), (128, 512, 28, 1), (512, 128, 28, 1), (256, 1024, 14, 1),
    (1024, 256, 14, 1), (512, 2048, 7, 1), (2048, 512, 7, 1), (256, 512, 56, 2), (512, 1024, 28, 2),
    (1024, 2048, 14, 2),
)  # fmt: skip


def kernels(batch: int, inside: int, outside: int, size: int, stride: int) -> dict[str, tuple[Callable, Callable]]:
    """Return torch's kernel and ours, by what they compute."""
    x = torch.randn(batch, inside, size, size).to(LOW).to(memory_format=LAST)
    w, steps = (torch.randn(outside, inside, 1, 1) / inside**0.5).to(LOW), (stride, stride)
    grad = torch.randn_like(F.conv2d(x, w, stride=steps)).to(memory_format=LAST)

    def backward(*mask: bool) -> Callable:
        geometry = (steps, [0, 0], [1, 1], False, [0, 0], 1)
        return lambda: torch.ops.aten.convolution_backward(grad, x, w, None, *geometry, [*mask, False])

    return {
        "result": (lambda: F.conv2d(x, w, stride=steps), lambda: ours._forward(x, w, None, steps, True)),
        "input": (backward(True, False), lambda: ours._spread(grad, w, x, steps)),
        "weight": (
            backward(False, True),
            lambda: gradients_of_linear(ours.rows(grad), ours.rows(x[:, :, ::stride, ::stride]), biased=False),
        ),
    }


def resnet(policy: str, batch: int, size: int, train: bool) -> Callable[[], None]:
    """Return a step, or an inference call, of a converted ResNet-50."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    model = amp_graph.convert(ResNetForImageClassification(ResNetConfig()).train(train), policy)
    x, labels = torch.randn(batch, 3, size, size), torch.randint(2, (batch,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def call() -> None:
        with torch.set_grad_enabled(train):
            loss = model(x, labels=labels).loss
        if train:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return call


def main() -> None:
    """Print one line a shape, then one a model."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--skip-models", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for shape in SHAPES:
        told = []
        for name, (torchs, product) in kernels(options.batch, *shape).items():
            times = interleaved({"torch": torchs, "product": product}, options.rounds, time.process_time)
            told.append(f"{name} {statistics.median(times['torch']) / statistics.median(times['product']):.2f}")
        places = options.batch * (shape[2] // shape[3]) ** 2
        print(f"{shape[0]} -> {shape[1]}, stride {shape[3]}, {places} places: {', '.join(told)}", flush=True)
    for size, train in () if options.skip_models else ((224, True), (112, True), (224, False), (112, False)):
        variants = {p: resnet(p, options.batch, size, train) for p in ("bf16,skip=lower_pointwise_conv", "bf16")}
        times = interleaved(variants, options.rounds, time.process_time)
        print(f"ResNet-50 at {size}, {'step' if train else 'inference'}: {spread(*times.values())}", flush=True)


if __name__ == "__main__":
    main()
