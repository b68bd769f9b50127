"""Whether plans are right about what pays: small models in bf16, as predicted and as measured, and left to the plan.

    python benchmarks/predictions.py [--rounds 9] [--threads 1]

Forward and backward, and inference, of perceptrons, convolutions, transformer layers and LSTMs, one thread. Speeds are
multiples of fp32's: of bf16, predicted and measured, and of the policy "auto", which runs in fp32 what it thinks does
not pay. Medians of interleaved rounds; process CPU time. A row ends with ``*`` where "auto" chose the slower one.
"""

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from interleaved import interleaved, parser_of
from torch import Tensor, nn

import amp_graph
from amp_graph.errors import AmpGraphWarning

LEAST = 0.01  # seconds a measurement


class Lstm(nn.Module):
    """One layer and a linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, width]."""
        return self.head(self.lstm(x)[0])


def mlp(width: int) -> nn.Module:
    """Three layers."""
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())))


def cnn(width: int) -> nn.Module:
    """Four convolutions, with batch norms between them."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(3):
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    return nn.Sequential(*layers)


def encoder(width: int) -> nn.Module:
    """Two transformer layers."""
    heads = max(1, width // 64)
    layers = (nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True) for _ in range(2))
    return nn.Sequential(*layers)


def cases() -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield names, models and inputs."""
    for width in (64, 256, 1024):
        for batch in (1, 8, 32, 128, 512):
            yield f"mlp {width}, batch {batch}", mlp(width), torch.randn(batch, width)
    for width in (8, 32, 64):
        for side in (8, 32):
            yield f"cnn {width}, 4 x {side} x {side}", cnn(width), torch.randn(4, 3, side, side)
    for width in (64, 256, 512):
        for length in (1, 16, 128):
            yield f"encoder {width}, 2 x {length}", encoder(width), torch.randn(2, length, width)
    for width in (64, 256):
        yield f"lstm {width}, 4 x 16", Lstm(width), torch.randn(4, 16, width)


def call(model: nn.Module, x: Tensor, training: bool) -> Callable[[], object]:
    """Return a forward and a backward, or an inference."""

    def train() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    def infer() -> None:
        with torch.inference_mode():
            model(x)

    return train if training else infer


def main() -> None:
    """Print a row for each model and mode."""
    options = parser_of(__doc__, rounds=9).parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=AmpGraphWarning)
    torch.manual_seed(0)
    print("                                  fp32 us   bf16: predicted measured   auto")
    for name, base, x in cases():
        for mode in ("training", "inference"):
            base.train(mode == "training")
            models = {"fp32": base, **{p: amp_graph.convert(copy.deepcopy(base), p) for p in ("bf16", "auto")}}
            for variant in ("bf16", "auto") if mode == "inference" else ():
                amp_graph.freeze(models[variant])
            calls = {variant: call(model, x, mode == "training") for variant, model in models.items()}
            for run in calls.values():  # the first call captures
                _ = [run() for _ in range(4)]
            seconds = interleaved(calls, options.rounds, time.process_time, LEAST)
            low, auto = (
                statistics.median(b / a for a, b in zip(seconds[v], seconds["fp32"], strict=True))
                for v in ("bf16", "auto")
            )
            found = amp_graph.report(models["auto"]).graphs[-1].predicted
            told = "  none" if found is None else f"{found.speed:6.2f}"
            wrong = found is not None and (found.left_alone != (low < 1)) and abs(low - 1) > 0.05
            microseconds = statistics.median(seconds["fp32"]) * 1e6
            row = f"{name:24} {mode:9} {microseconds:9.1f} {told:>12} {low:8.2f} {auto:9.2f}"
            print(row, "*" if wrong else "", flush=True)


if __name__ == "__main__":
    main()
