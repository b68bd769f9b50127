"""Count the calls that launch kernels in flat graphs of forward and backward planned for CUDA, against autocast's.

    python benchmarks/launch_counts.py            # prints the table
    python benchmarks/launch_counts.py --write    # and writes results/launch_counts.json and .md

It needs no GPU. Models are captured on the CPU and run through the passes that a CUDA graph goes through, each of which
is told that it plans for CUDA; then forward and backward are traced on fake tensors. Without a GPU, autograd takes no
fake CUDA tensors: ``cuda_calls`` puts in what CUDA runs as one operator, ``launch_costs`` knows what each launches.
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
from cuda_calls import AsOnCuda, with_cudnn
from launch_costs import kernels, moved
from models import MODELS, case
from tiny_models import SMALL
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from amp_graph import Policy
from amp_graph.passes.graph.fake_values import adopt_values
from amp_graph.passes.graph.grad_regions import mark_regions
from amp_graph.passes.graph.meta_keys import CAST
from amp_graph.passes.manager import run_passes
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.pipeline_table import TABLE, why_off
from amp_graph.passes.torch_compat.fake import make_fx

RESULTS = Path(__file__).parent / "results" / "launch_counts"
# Operation by operation, without what autocast does not do.
ALONE = "skip=share_casts|batch_weight_casts|eliminate_casts"
Costs = dict[str, int]
AUTOCAST = {f"autocast {dtype}": f"{dtype},lists=autocast_cuda,{ALONE}" for dtype in ("bf16", "fp16")}
# An LSTM is identified by what the CPU makes of it; that CUDA allows ``_cudnn_rnn`` must hold for that.
CUDNN = ",allow=aten.lstm|aten.mkldnn_rnn_layer"
POLICIES = ("bf16", "bf16,accuracy=fast", "fp16")


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
    with contextlib.suppress(_Captured), torch._dynamo.config.patch(allow_rnn=True):
        torch.compile(lambda *args: step(*args), backend=backend, fullgraph=True, dynamic=False)(*batch)
    gm, args = found
    return gm, args


def planned(gm: GraphModule, policy: str, device: str = "cuda") -> GraphModule:
    """Run the passes over ``gm`` that a graph on ``device`` goes through; autocast's lists as autocast does."""
    read = Policy.parse(f"{policy},device={device}" + (CUDNN if device == "cuda" else ""))
    options = read.pipeline_options(device, eager=True)
    rows = [(row, phase) for phase in (Phase.CAPTURED, Phase.CALLS) for row in TABLE if phase in row.phases]
    passes = [row.built(options) for row, phase in rows if device in row.devices and not why_off(row, options)]
    adopt_values(gm)
    mark_regions(gm)
    with judged_for(device), with_cudnn():
        run_passes(gm, passes)
    if "autocast" in policy:
        _cast_at_each_read(gm)
        _take_losses_from_logits(gm)
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
    if not inspect.isfunction(found) or not of.startswith("amp_graph.passes."):
        return False
    asks = found.__name__.endswith(("_is_profitable", "_are_profitable"))
    return asks and next(iter(inspect.signature(found).parameters), "") == "device"


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


def _take_losses_from_logits(gm: GraphModule) -> None:
    """Compute the log-softmax of a cross entropy in the dtype of its logits, as autocast does where no list names it.

    It names the dtype of its operand itself (LossNLL.cpp), which autocast obeys; what is captured is that of fp32.
    """
    for node in [n for n in gm.graph.nodes if n.target is torch.ops.aten.to.dtype_layout]:
        readers = list(node.users)
        if all(r.target is torch.ops.aten._log_softmax.default for r in readers):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
            for reader in readers:
                with gm.graph.inserting_after(reader):
                    wide = gm.graph.call_method("float", (reader,))
                reader.replace_all_uses_with(wide, delete_user_cb=lambda user, wide=wide: user is not wide)
    gm.recompile()


def _value(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def flat(run: Callable[..., Any], args: Sequence[Any]) -> Graph:
    """Return the graph of forward and backward of ``run``."""

    def both(*given: Any) -> Any:
        with torch.enable_grad(), AsOnCuda():
            given = tuple(g.detach().requires_grad_(a.requires_grad) if isinstance(g, Tensor) else g
                          for g, a in zip(given, args, strict=True))  # fmt: skip
            out = run(*given)
            loss = out[0] if isinstance(out, tuple | list) else out
            leaves = [g for g in given if isinstance(g, Tensor) and g.requires_grad]
            return torch.autograd.grad(loss, leaves, allow_unused=True)

    with torch.no_grad(), with_cudnn():
        found = make_fx(both, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    found.graph.eliminate_dead_code()
    return found.graph


def launches(run: Callable[..., Any], args: Sequence[Any]) -> dict[str, int]:
    """Return how many kernels each operator launches in forward and backward of ``run``."""
    counts: dict[str, int] = {}
    for node in flat(run, args).nodes:
        if count := kernels(node):
            counts[str(node.target)] = counts.get(str(node.target), 0) + count
    return counts


# -- the table --------------------------------------------------------------------------------------------


def costs(name: str, policy: str, device: str = "cuda") -> Costs:
    """Return launches and bytes of a step of the model ``name`` under ``policy``, planned for ``device``."""
    gm, args = capture(*step_of(name))
    return _costs(flat(planned(gm, policy, device), args))


def traced_autocast(name: str, dtype: torch.dtype) -> Costs:
    """Return the same of a step of the model ``name`` under ``torch.autocast`` on the CPU."""
    gm, args = capture(*step_of(name))

    def run(*given: Any) -> Any:
        with torch.autocast("cpu", dtype):
            return gm(*given)

    return _costs(flat(run, args))


def _costs(graph: Graph) -> Costs:
    return {"launches": sum(map(kernels, graph.nodes)), "bytes": sum(map(moved, graph.nodes))}


def row(name: str) -> dict[str, Costs]:
    """Return the costs of the model ``name``, by policy."""
    return {what: costs(name, policy) for what, policy in (AUTOCAST | {p: p for p in POLICIES}).items()}


def markdown(table: dict[str, dict[str, Costs]]) -> str:
    """Return the table as Markdown."""
    columns = list(next(iter(table.values())))
    lines = ["# Kernel launches and bytes of a training step", "", *_SAID.splitlines(), ""]
    lines += [f"| launches | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    lines += [f"| {name} | {' | '.join(str(found[c]['launches']) for c in columns)} |" for name, found in table.items()]
    lines += ["", f"| bytes | autocast bf16, MB | {' | '.join(POLICIES)} |", f"|---|{'---:|' * (1 + len(POLICIES))}"]
    for name, found in table.items():
        over = (f"{found[p]['bytes'] / found[f'autocast {p[:4]}']['bytes']:.2f}" for p in POLICIES)
        lines.append(f"| {name} | {found['autocast bf16']['bytes'] / 1e6:,.1f} | {' | '.join(over)} |")
    return "\n".join(lines) + "\n"


_SAID = """Kernels of forward and backward of graphs planned for CUDA, and the bytes that they read and write, over
autocast's. Counted without a GPU by `benchmarks/launch_counts.py`; `benchmarks/launch_costs.py` has the rules. A test
fails if a number of a small model grows.

Bytes above 1.00 have two causes, neither of which is a cast of the plan. Cross entropies: autocast on CUDA computes
the log-softmax of low-precision logits in their dtype, amp_graph in fp32, which is 10 bytes more for each logit: 42 MB
of gpt, 13 MB of bert, 10 MB of lstm. LSTMs: autocast casts the weights into cuDNN's buffer, by a function of torch that
Python cannot call; amp_graph casts them, copies the casts into the buffer, and their gradients out of it: 17 MB of
lstm."""


def main() -> None:
    """Print the table; write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[*SMALL, *MODELS], help="default: all")
    parser.add_argument("--write", action="store_true", help="write results/launch_counts.json and .md")
    asked = parser.parse_args()
    held = json.loads(RESULTS.with_suffix(".json").read_text()) if RESULTS.with_suffix(".json").exists() else {}
    for name in asked.models:
        held[name] = row(name)
        print(name, *(f"{what}: {found}" for what, found in held[name].items()), sep="\n  ", flush=True)
        if asked.write:
            held = {n: held[n] for n in (*SMALL, *MODELS) if n in held}
            RESULTS.with_suffix(".json").write_text(json.dumps(held, indent=1) + "\n")
            RESULTS.with_suffix(".md").write_text(markdown(held))


if __name__ == "__main__":
    main()
