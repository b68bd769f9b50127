"""How long the rewrite of a large graph takes, and where: seconds for graphs of 1k, 3k and 10k nodes, by pass.

    python benchmarks/conversion_time.py            # 1,000 3,000 and 10,000 nodes, median of 3
    python benchmarks/conversion_time.py --profile  # and the functions that take the time, at 3,000 nodes

The graphs are pre-norm transformer blocks, as many as it takes. Capture is not part of the time.
"""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
import statistics
import time
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

from amp_graph.passes.graph import identify_ops
from amp_graph.passes.graph.fake_values import adopt_values
from amp_graph.passes.graph.grad_regions import mark_regions
from amp_graph.passes.graph.propagate_fake_values import record_values
from amp_graph.passes.manager import run_passes
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.pipeline_table import pipeline
from amp_graph.policy import Policy
from amp_graph.rewrite import copy_graph

WIDTH, HEADS, LENGTH, BATCH = 16, 2, 4, 2
NODES_A_BLOCK = 42
TARGET = 3.0  # seconds at 3,000 nodes


class Block(nn.Module):
    """A pre-norm transformer block in plain functions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP, each on a residual stream."""
        h = F.layer_norm(x, (WIDTH,), self.norm_1.weight, self.norm_1.bias)
        parts = F.linear(h, self.qkv.weight, self.qkv.bias).chunk(3, -1)
        q, k, v = (parts[i].view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for i in range(3))
        a = F.softmax(q @ k.transpose(-1, -2) * 0.35, -1) @ v
        a = a.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)
        x = x + F.linear(a, self.proj.weight, self.proj.bias)
        h = F.layer_norm(x, (WIDTH,), self.norm_2.weight, self.norm_2.bias)
        h = F.gelu(F.linear(h, self.up.weight, self.up.bias))
        return x + F.linear(h, self.down.weight, self.down.bias)


class _IntoAll(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Trace into every module: parameters become attributes of the graph."""
        return False


def graph_of(nodes: int) -> GraphModule:
    """Return a graph of about ``nodes`` nodes with recorded values."""
    model = nn.Sequential(*[Block() for _ in range(max(1, round(nodes / NODES_A_BLOCK)))])
    gm = GraphModule(model, _IntoAll().trace(model))
    record_values(gm, (torch.randn(BATCH, LENGTH, WIDTH),))
    return gm


def rewrite_once(captured: GraphModule, policy: str) -> tuple[float, float, dict[str, float]]:
    """Return the seconds of one rewrite with an empty cache: by the clock, of the processor, and by pass."""
    identify_ops._CACHE.clear()
    gm = copy_graph(captured)
    start, cpu = time.perf_counter(), time.process_time()
    adopt_values(gm)
    mark_regions(gm)
    done = run_passes(gm, pipeline(Phase.CAPTURED, Policy.parse(policy).pipeline_options("cpu")), checked=False)
    total, cpu = time.perf_counter() - start, time.process_time() - cpu
    by_pass: dict[str, float] = defaultdict(float)
    for timed in done:
        by_pass[timed.name] += timed.seconds
    by_pass["rest"] = total - sum(by_pass.values())
    return total, cpu, dict(by_pass)


def main() -> None:
    """Print one line a size, and the profile when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 3_000, 10_000])
    parser.add_argument("--policy", default="bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one thread")
    rewrite_once(graph_of(100), options.policy)  # imports and lists
    for size in options.sizes:
        captured = graph_of(size)
        runs = sorted((rewrite_once(captured, options.policy) for _ in range(options.repeats)), key=lambda r: r[0])
        times = [seconds for seconds, _, _ in runs]
        _, cpu, middle = runs[len(runs) // 2]
        count = len(captured.graph.nodes)
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in middle.items())
        print(
            f"{count:6d} nodes: {statistics.median(times):6.2f} s "
            f"(from {times[0]:.2f} to {times[-1]:.2f}; processor {cpu:.2f}), "
            f"{1e6 * statistics.median(times) / count:.0f} us a node: {parts}",
            flush=True,
        )
    if options.profile:
        captured = graph_of(3_000)
        profile = cProfile.Profile()
        profile.runcall(rewrite_once, captured, options.policy)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(15)
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
