"""Count the calls that launch kernels in flat graphs of forward and backward planned for CUDA, against autocast's.

    python benchmarks/launch_counts.py            # prints the table
    python benchmarks/launch_counts.py --write    # and writes results/launch_counts.json and .md

It needs no GPU. Models are captured on the CPU and run through the passes that a CUDA graph goes through, each of which
is told that it plans for CUDA; then forward and backward are traced on fake tensors. Without a GPU, autograd takes no
fake CUDA tensors, so what torch decides by device is the CPU's: an RMS norm counts as its eight operations everywhere.
Autocast is ``lists=autocast_cuda``, with a cast for each read of an activation; ``traced_autocast`` is the real one on
the CPU, to compare with. Models of the benchmark of speed are shallower here (scale 0.05).
"""

import argparse
import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from models import MODELS, Block, case
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from amp_graph import Policy
from amp_graph.passes.graph.fake_values import adopt_values
from amp_graph.passes.graph.grad_regions import mark_regions
from amp_graph.passes.graph.meta_keys import CAST
from amp_graph.passes.manager import run_passes
from amp_graph.passes.pipeline import why_off
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.pipeline_table import TABLE
from amp_graph.passes.torch_compat.fake import make_fx
from amp_graph.passes.weights.cast_cache import WeightCopies

RESULTS = Path(__file__).parent / "results" / "launch_counts"
# Operation by operation, without what autocast does not do.
ALONE = "skip=share_casts|batch_weight_casts|eliminate_casts"
AUTOCAST = {f"autocast {dtype}": f"{dtype},lists=autocast_cuda,{ALONE}" for dtype in ("bf16", "fp16")}
POLICIES = ("bf16", "bf16,accuracy=fast", "fp16")
# Calls without a kernel that their schemas do not show as views.
NONE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh_copy",
        "sym_size", "sym_numel", "sym_stride", "device"}  # fmt: skip
Step = Callable[..., Tensor]


# -- small models -----------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Embeddings, blocks and logits; ``norm``: of the result. Small enough for a test."""

    def __init__(self, causal: bool, norm: nn.Module) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(50, 32), norm, nn.Linear(32, 50)
        self.blocks = nn.Sequential(*(Block(32, 2, causal) for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, length, 50]."""
        return self.head(self.norm(self.blocks(self.words(ids))))


class Separate(nn.Module):
    """Attention with projections of their own for queries, keys and values, normed heads, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.second = nn.Embedding(50, 32), nn.RMSNorm(32), nn.RMSNorm(32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.qn, self.gate, self.up, self.down = nn.RMSNorm(16), nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        """Return hidden states [batch, length, 32]."""
        x = self.words(ids)
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (2, 16)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.qn(q), self.qn(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Joined(nn.Module):
    """Casts by hand in front of a concat, which only the elimination of casts removes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return [2 * batch, 8]."""
        return self.last(torch.cat([self.first(x).to(torch.float32)] * 2))


def _convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def _ids() -> Tensor:
    return torch.randint(50, (2, 8))


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Step]] = {
    "tiny mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), lambda: torch.randn(2, 8),
                 lambda m, x: m(x).square().mean()),
    "tiny gpt": (lambda: Transformer(True, nn.LayerNorm(32)), _ids, _logits),
    "tiny bert": (lambda: Transformer(False, nn.LayerNorm(32)), _ids, _logits),
    "tiny llama": (Separate, _ids, lambda m, ids: m(ids).square().mean()),
    "tiny concat": (Joined, lambda: torch.randn(8, 8), lambda m, x: m(x).square().mean()),
    "tiny cnn": (_convolutions, lambda: torch.randn(2, 3, 8, 8), lambda m, x: m(x).logsumexp(-1).mean()),
}  # fmt: skip


def step_of(name: str) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return the loss of the model ``name`` as a function of its batch, and a batch."""
    torch.manual_seed(0)
    if name in SMALL:
        build, batch, loss = SMALL[name]
        model, given = build(), (batch(),)
    else:
        found = case(name, 0.05)
        model, given, loss = found.model, found.batch, found.loss
    return lambda *args: loss(model, *args), given


# -- graphs -----------------------------------------------------------------------------------------------


class _Captured(BaseException):
    """Ends a capture before anything runs."""


def capture(step: Callable[..., Tensor], batch: Sequence[Tensor]) -> tuple[GraphModule, tuple[Any, ...]]:
    """Return the graph of ``step``, and its inputs."""
    found: list[Any] = []

    def backend(gm: GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            found.extend((gm, args))
            raise _Captured

        return run

    torch._dynamo.reset()
    with contextlib.suppress(_Captured):
        torch.compile(lambda *args: step(*args), backend=backend, fullgraph=True, dynamic=False)(*batch)
    gm, args = found
    return gm, args


def planned(gm: GraphModule, policy: str, device: str = "cuda") -> GraphModule:
    """Run the passes over ``gm`` that a graph on ``device`` goes through; autocast's lists as autocast does."""
    read = Policy.parse(f"{policy},device={device}")
    options = read.pipeline_options(device, eager=True, copies=WeightCopies(read.torch_dtype(device)))
    rows = [(row, phase) for phase in (Phase.CAPTURED, Phase.COPIES) for row in TABLE if phase in row.phases]
    passes = [row.built(options) for row, phase in rows if device in row.devices and not why_off(row, phase, options)]
    adopt_values(gm)
    mark_regions(gm)
    with judged_for(device):
        run_passes(gm, passes)
    if "autocast" in policy:
        _cast_at_each_read(gm)
    return gm


@contextlib.contextmanager
def judged_for(device: str) -> Iterator[None]:
    """Let every threshold of profitability judge for ``device``, whatever device it is asked for."""
    with contextlib.ExitStack() as stack:
        for module in [m for n, m in sys.modules.items() if n.startswith("amp_graph.passes.")]:
            for name, function in list(vars(module).items()):
                if _is_threshold(function):
                    stack.enter_context(mock.patch.object(module, name, _judging(function, device)))
        yield


def _is_threshold(found: Any) -> bool:
    of = getattr(found, "__module__", None) or ""
    if not inspect.isfunction(found) or not of.startswith("amp_graph.passes.profitability"):
        return False
    return next(iter(inspect.signature(found).parameters), "") == "device"


def _judging(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    def judge(_: str, *args: Any, **kwargs: Any) -> Any:
        return function(device, *args, **kwargs)

    return judge


def _cast_at_each_read(gm: GraphModule) -> None:
    """Give each reader of a cast its own, as autocast does, which keeps the casts of weights alone."""
    for node in list(gm.graph.nodes):
        source = node.args[0] if CAST in node.meta and node.op == "call_method" else None
        if not isinstance(source, Node) or (source.op == "placeholder" and isinstance(_value(source), nn.Parameter)):
            continue
        for reader in list(node.users)[1:]:
            with gm.graph.inserting_after(node):
                reader.replace_input_with(node, gm.graph.node_copy(node))
    gm.recompile()


def _value(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def launches(run: Callable[..., Any], args: Sequence[Any]) -> dict[str, int]:
    """Return how often each operator that launches kernels is called in forward and backward of ``run``."""

    def both(*given: Any) -> Any:
        with torch.enable_grad():
            given = tuple(g.detach().requires_grad_(a.requires_grad) if isinstance(g, Tensor) else g
                          for g, a in zip(given, args, strict=True))  # fmt: skip
            out = run(*given)
            loss = out[0] if isinstance(out, tuple | list) else out
            leaves = [g for g in given if isinstance(g, Tensor) and g.requires_grad]
            return torch.autograd.grad(loss, leaves, allow_unused=True)

    with torch.no_grad():
        flat = make_fx(both, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    flat.graph.eliminate_dead_code()
    counts: dict[str, int] = {}
    for node in flat.graph.nodes:
        if node.op == "call_function" and _launches(node.target):
            counts[str(node.target)] = counts.get(str(node.target), 0) + 1
    return counts


def _launches(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target._schema.name.split("::")[1] in NONE:
        return False
    views = [r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns]
    return not any(views)


# -- the table --------------------------------------------------------------------------------------------


def count(name: str, policy: str, device: str = "cuda") -> int:
    """Return the launches of a step of the model ``name`` under ``policy``, planned for ``device``."""
    gm, args = capture(*step_of(name))
    return sum(launches(planned(gm, policy, device), args).values())


def traced_autocast(name: str, dtype: torch.dtype) -> int:
    """Return the launches of a step of the model ``name`` under ``torch.autocast`` on the CPU."""
    gm, args = capture(*step_of(name))

    def run(*given: Any) -> Any:
        with torch.autocast("cpu", dtype):
            return gm(*given)

    return sum(launches(run, args).values())


def row(name: str) -> dict[str, int]:
    """Return the launches of the model ``name``, by policy."""
    return {what: count(name, policy) for what, policy in (AUTOCAST | {p: p for p in POLICIES}).items()}


def markdown(table: dict[str, dict[str, int]]) -> str:
    """Return the table as Markdown."""
    columns = list(next(iter(table.values())))
    lines = ["# Kernel launches of a training step", "", *_SAID.splitlines(), "", f"| model | {' | '.join(columns)} |"]
    lines.append(f"|---|{'---:|' * len(columns)}")
    lines += [f"| {name} | {' | '.join(str(found[c]) for c in columns)} |" for name, found in table.items()]
    return "\n".join(lines) + "\n"


_SAID = """Calls of operators that launch kernels in forward and backward, planned for CUDA, counted without a GPU by
`benchmarks/launch_counts.py`. A test fails if a count of a small model grows."""


def main() -> None:
    """Print the table; write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[*SMALL, *MODELS], help="default: all")
    parser.add_argument("--write", action="store_true", help="write results/launch_counts.json and .md")
    asked = parser.parse_args()
    held = json.loads(RESULTS.with_suffix(".json").read_text()) if RESULTS.with_suffix(".json").exists() else {}
    for name in asked.models:
        held[name] = row(name)
        print(name, held[name], flush=True)
        if asked.write:
            held = {n: held[n] for n in (*SMALL, *MODELS) if n in held}
            RESULTS.with_suffix(".json").write_text(json.dumps(held, indent=1) + "\n")
            RESULTS.with_suffix(".md").write_text(markdown(held))


if __name__ == "__main__":
    main()
