"""What adding up gradients in place saves: each of the pass's rules by itself, and whole steps with and without it.

    python benchmarks/accumulate_in_place.py [--rounds 15] [--threads 1] [--skip-models]

Ratios are medians over interleaved rounds [quartiles]: above 1 the rewritten form is faster. Memory is the peak of a
process of its own that makes three steps.
"""

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from interleaved import interleaved, parser_of, spread

import amp_graph

LOW = torch.bfloat16
ATEN = torch.ops.aten
PRODUCTS = ((1024, 768, 768), (1024, 3072, 768), (4096, 768, 768), (128, 768, 768), (1024, 256, 256))
SIZES = (1 << 12, 1 << 14, 1 << 16, 393_216, 786_432, 3_145_728)
POLICIES = ("bf16", "bf16,accuracy=fast")


def rules() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return what is timed: the captured form and the rewritten one, by name."""
    found = {}
    for rows, inner, columns in PRODUCTS:
        for dtype in (LOW, torch.float32):
            found |= product(rows, inner, columns, dtype)
    for size in SIZES:
        found |= sums(size)
    for rows, table, width in ((1024, 50257, 768), (1024, 30522, 768), (4096, 1000, 256)):
        found |= scattered(rows, table, width)
    return found


def product(rows: int, inner: int, columns: int, dtype: torch.dtype) -> dict:
    """A product that is added to a tensor that is read again, or not."""
    a, b, x = (torch.randn(s).to(dtype) for s in ((rows, inner), (inner, columns), (rows, columns)))
    name, into = f"{rows}x{inner}x{columns} {str(dtype)[6:]}", torch.zeros_like(x)
    return {
        f"product, {name}": (lambda: ATEN.add(x, ATEN.mm(a, b)), lambda: ATEN.addmm(x, a, b)),
        f"product in place, {name}": (lambda: ATEN.add(x, ATEN.mm(a, b)), lambda: ATEN.addmm_(into, a, b, beta=0.5)),
    }


def sums(size: int) -> dict:
    """A sum of fp32 tensors, and one of two precisions."""
    x, y, low, into = torch.randn(size), torch.randn(size), torch.randn(size).to(LOW), torch.zeros(size)
    return {
        f"in place, {size}": (lambda: ATEN.add(x, y), lambda: ATEN.add_(into, y)),
        f"widened, {size}": (lambda: ATEN.add(x, low), lambda: ATEN.add_(ATEN._to_copy(low, dtype=x.dtype), x)),
    }


def scattered(rows: int, table: int, width: int) -> dict:
    """The gradient of a tied embedding: of its rows, and of the whole table from the last linear."""
    ids, g, low = torch.randint(table, (rows,)), torch.randn(rows, width), torch.randn(table, width).to(LOW)

    def captured() -> torch.Tensor:
        return ATEN.add(ATEN.embedding_dense_backward(g, ids, table, -1, False), low.float())

    return {f"by row, {rows} of {table}x{width}": (captured, lambda: ATEN.index_add_(low.float(), 0, ids, g))}


def step_of(model: str, policy: str) -> Callable[[], object]:
    """Return a whole step of two layers of BERT or GPT-2 in their own sizes."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    if model == "bert":
        net, ids = BertForMaskedLM(BertConfig(num_hidden_layers=2)), torch.randint(30522, (8, 128))
    else:
        net, ids = GPT2LMHeadModel(GPT2Config(n_layer=2, use_cache=False)), torch.randint(50257, (4, 256))
    step = amp_graph.TrainStep(net, None, torch.optim.AdamW(net.parameters(), lr=1e-5), policy)
    return lambda: step({"input_ids": ids, "labels": ids})


def peak(model: str, policy: str) -> float:
    """Return the peak memory, in GB, of a process that makes three steps."""
    code = f"from accumulate_in_place import told_peak; told_peak({model!r}, {policy!r})"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def told_peak(model: str, policy: str) -> None:
    """Print the peak memory of this process after three steps, beyond what it had before them."""
    torch.set_num_threads(1)
    step = step_of(model, policy)
    for _ in range(3):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)


def told(times: dict[str, list[float]]) -> str:
    """Return how much faster the second variant is than the first."""
    before, after = times.values()
    return f"{spread(before, after)}, from {statistics.median(before) * 1e3:.3f} ms"


def main() -> None:
    """Print one line a rule and size, then one a model and policy."""
    parser = parser_of(__doc__, rounds=15)
    parser.add_argument("--skip-models", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, (before, after) in rules().items():
        times = interleaved({"before": before, "after": after}, options.rounds, time.process_time, 0.02)
        print(f"{name}: {told(times)}", flush=True)
    for model in () if options.skip_models else ("bert", "gpt2"):
        for policy in POLICIES:
            without = f"{policy},skip=accumulate_in_place"
            calls = {"before": step_of(model, without), "after": step_of(model, policy)}
            times = interleaved(calls, options.rounds, time.process_time)
            memory = f"{peak(model, without):.2f} -> {peak(model, policy):.2f} GB"
            print(f"step of {model}, {policy}: {told(times)}, peak {memory}", flush=True)


if __name__ == "__main__":
    main()
