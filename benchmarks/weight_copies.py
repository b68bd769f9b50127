"""What keeping the weights' low-precision copies saves, against casting them at each call and against autocast.

Inference, a training step, and one of four micro-batches, each by every variant in turn in one process; a round gives
one ratio to autocast, and the median and quartiles over rounds are printed. Below 1.00 is faster than autocast. "on /
off" is the same for copies on and off. Absolute times are noise on shared machines.

    python benchmarks/weight_copies.py [--rounds 40] [--threads 1] [--models mlp,gpt2,gpt2-token] [--cpu-time]
"""

import contextlib
import platform
import statistics
import time
from collections.abc import Callable

import torch
from interleaved import interleaved, parser_of, spread
from torch import nn

import amp_graph

VARIANTS = {"autocast": None, "off": "bf16,weight_copies=false", "on": "bf16"}


def mlp() -> tuple[nn.Module, Callable]:
    """Three layers of 256 at batch 32: where call overhead is all there is."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    batch = torch.randn(32, 256)
    return model, lambda m: m(batch).float().square().mean()


def gpt2(batch: int = 4, length: int = 128) -> tuple[nn.Module, Callable]:
    """Four layers of 512 from transformers, with a vocabulary of 8192."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=8192, n_embd=512, n_layer=4, n_head=8, n_positions=128, use_cache=False)
    tokens = torch.randint(8192, (batch, length))
    return GPT2LMHeadModel(config), lambda m: m(input_ids=tokens, labels=tokens).loss


MODELS = {"mlp": mlp, "gpt2": gpt2, "gpt2-token": lambda: gpt2(1, 2)}


def steps_of(make: Callable, policy: str | None) -> dict[str, Callable[[], None]]:
    """Return what is timed of one variant: a call without gradients, a step, a step of four micro-batches."""
    torch.manual_seed(0)
    model, loss_of = make()
    if policy is not None:
        amp_graph.convert(model, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if policy is None else contextlib.nullcontext():
            return loss_of(model)

    def infer() -> None:
        with torch.no_grad():
            loss()

    def step(batches: int) -> None:
        for _ in range(batches):
            loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {"inference": infer, "step": lambda: step(1), "step of 4 micro-batches": lambda: step(4)}


def main() -> None:
    """Run the chosen models and print a Markdown table."""
    parser = parser_of(__doc__, rounds=40)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cpu-time", action="store_true", help="process CPU time, steadier where cores are shared")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    print(f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}, {options.rounds} rounds\n")
    print("| model | what | ms (autocast) | off / autocast | on / autocast | on / off |\n|---|---|---:|---|---|---|")
    for name in options.models.split(","):
        made = {variant: steps_of(MODELS[name], policy) for variant, policy in VARIANTS.items()}
        for what in made["autocast"]:
            calls = {variant: steps[what] for variant, steps in made.items()}
            times = interleaved(calls, options.rounds, clock, least=0.02)
            base, off, on = times.values()
            ms = statistics.median(base) * 1e3
            print(
                f"| {name} | {what} | {ms:.2f} | {spread(off, base)} | {spread(on, base)} | {spread(on, off)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
