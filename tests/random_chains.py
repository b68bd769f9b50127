"""Random chains into operations where they are ill-conditioned, compared with autocast and fp64.

    python -m tests.random_chains --count 48 --seed 0

A third of all elementwise operations and reductions runs in one graph, each behind a chain of up to four operations and
before a matrix product, which asks for low precision. An error may be 1.5 times autocast's, or 3 %.
"""

import argparse
import math
import random
import sys
import warnings

import torch

import amp_graph
from tests.passes.graphs import Function
from tests.passes.precision.ill_conditioned import CALLS, SIZE, chain, start, through

POLICIES = (
    "bf16", "bf16,accuracy=fast", "bf16,accuracy=1.0", "bf16,accuracy=3", "fp16,accuracy=fast", "fp16,accuracy=1.5",
    "bf16,accuracy=fast,planner=paint", "fp16,emulate=cuda",
)  # fmt: skip


def errors(function, policy, inputs, state):
    """Return the errors of outputs and gradients, relative to fp64: under the policy, and under autocast."""
    torch.manual_seed(0)
    cotangents = {}

    def run(dtype=torch.float32, convert=None, context=None):
        model = Function(function, **{k: v.clone() for k, v in state.items()}).to(dtype)
        called = convert(model) if convert else model
        given = [x.detach().to(dtype).requires_grad_(x.requires_grad) for x in inputs]
        with context or torch.autocast("cpu", enabled=False):
            outputs = called(*given)
        loss = 0.0
        for i, out in enumerate(outputs):
            if i not in cotangents:
                cotangents[i] = torch.randn(out.shape, dtype=torch.float64)
            loss = loss + (out.double() * cotangents[i]).sum()
        leaves = {f"input {i}": x for i, x in enumerate(given) if x.requires_grad} | dict(model.named_parameters())
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        named = {f"output {i}": out.detach() for i, out in enumerate(outputs)} | dict(zip(leaves, grads, strict=True))
        return {name: t.double() for name, t in named.items() if t is not None}

    low = torch.float16 if policy.startswith("fp16") else torch.bfloat16
    torch.set_default_dtype(torch.float64)
    try:
        want = run(torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)
    ours = run(convert=lambda m: amp_graph.convert(m, policy))
    theirs = run(context=torch.autocast("cpu", low))
    return {name: (_error(ours[name], t), _error(theirs[name], t)) for name, t in want.items()}


def _error(got, want):
    found = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
    return found if math.isfinite(found) else math.inf


def too_large(found, bound=0.03):
    return {name: pair for name, pair in found.items() if not pair[0] <= max(1.5 * pair[1], bound)}


def calls_behind_chains(seed, names):
    """Return a function of all ``names``, each behind a chain and before a product, and its inputs and state."""
    draw = random.Random(seed)
    steps = {name: chain(draw) for name in names}
    torch.manual_seed(seed)
    inputs = []
    for name in names:
        _, low, high = CALLS[name]
        argument = torch.empty(SIZE, SIZE, dtype=torch.float64).uniform_(low, high)
        inputs.append(start(argument, steps[name]).float().requires_grad_(seed % 2 == 0))

    def function(s, *inputs):
        made = (CALLS[n].function(through(x, steps[n])) for n, x in zip(names, inputs, strict=True))
        return tuple((y[None] if y.dim() == 1 else y) @ s.w[: y.shape[-1]] for y in made)

    return function, inputs, {"w": torch.randn(SIZE, SIZE) / 6}, steps


NAMES = sorted(CALLS)
THIRD = -(-len(NAMES) // 3)


def wrong_behind_chains(seed, policy):
    """Return what is too far off in one third of all operations, each behind a chain of its own."""
    names = NAMES[seed % 3 * THIRD : (seed % 3 + 1) * THIRD]
    function, inputs, state, steps = calls_behind_chains(seed, names)
    found = too_large(errors(function, policy, inputs, state))
    return {
        key: (names[int(key.split()[1])], steps[names[int(key.split()[1])]], pair)
        for key, pair in found.items()
        if key != "w"
    }


def main(arguments: list[str]) -> int:
    """Print what is too far off; return 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    failed = 0
    for seed in range(asked.seed, asked.seed + asked.count):
        policy = POLICIES[seed // 3 % len(POLICIES)]
        torch._dynamo.reset()
        for key, (name, steps, (ours, theirs)) in wrong_behind_chains(seed, policy).items():
            failed += 1
            print(f"seed {seed}, {policy}: {key}, {name} after {steps}: {ours:.2e}, autocast {theirs:.2e}", flush=True)
    print(f"{asked.count} graphs of chains, {failed} values wrong")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
