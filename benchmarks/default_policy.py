"""Time of calls under the default policy over fp32's, as on a CPU without arithmetic in low precision.

    AMP_GRAPH_MACHINE=lists/machines/cpu.toml python benchmarks/default_policy.py [--rounds 7] [--models mlp,gpt]

``convert(model)`` without a policy, trained at three batch sizes and evaluated at the second. The machine file gives
the rates of such a CPU, so that what is decided is what would be decided there; without the variable this machine's
rates decide. A call and its backward, without an update; plain fp32 and ours take turns, in one process and thread. A
ratio is the median over rounds with quartiles; above 1.05 a row is marked.
"""

import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from interleaved import interleaved, parser_of, quartiles
from model_case import Case
from models import case
from result_file import machine as this_machine
from result_file import opened, run_of, written
from tables import about
from torch import Tensor, nn

import amp_graph
from amp_graph.errors import AmpGraphWarning
from amp_graph.passes.native.output_file import write_atomically

RESULTS = Path(__file__).parent / "results" / "default_policy.json"
NAMES = (
    "mlp,dlrm,vit,gpt,bert_sdpa,bert_eager,resnet50,unet,lstm,swin,bloom,wav2vec2,vgg11,ghostnet,hf_gpt2,xlnet,"
    "mixtral,efficientnet,bit,einsum_attention"
)
SCALE, LEAST, MOST = 0.05, 0.02, 1.05


def call_of(one: Case, model: nn.Module, batch: tuple[Tensor, ...], training: bool) -> Callable[[], None]:
    """Return a call of ``model``, with its backward in training."""

    def call() -> None:
        model.train(training)
        with torch.set_grad_enabled(training):
            if training:
                one.loss(model, *batch).backward()
            else:
                one.infer(model, *batch)

    return call


def measured(name: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of fp32, and our time over it, of each kind of call."""
    own, plain = case(name, SCALE), case(name, SCALE)
    converted, rows = amp_graph.convert(own.model), {}
    for what, times, training in (("1", 1, True), ("2", 2, True), ("3", 3, True), ("evaluation, 2", 2, False)):
        batch = tuple(torch.cat([t] * times) for t in own.batch)
        calls = {
            "fp32": call_of(plain, plain.model, batch, training),
            "amp_graph": call_of(own, converted, batch, training),
        }
        seconds = interleaved(calls, rounds, time.process_time, LEAST)
        low, middle, high = quartiles(seconds["amp_graph"], seconds["fp32"])
        rows[what] = {"ms": statistics.median(seconds["fp32"]) * 1e3, "ratio": middle, "p25": low, "p75": high}
    return rows


def row(name: str, rows: dict[str, dict[str, float]]) -> str:
    """Return a line of the table."""
    cells = (
        f"{r['ms']:.1f}: {r['ratio']:.2f} [{r['p25']:.2f} - {r['p75']:.2f}]{' *' if r['ratio'] > MOST else ''}"
        for r in rows.values()
    )
    return f"| {name} | {' | '.join(cells)} |"


def markdown(held: dict[str, object]) -> str:
    """Return all figures of a file of results as Markdown."""
    lines = ["# The default policy on a CPU without arithmetic in low precision", "", about(held["machine"]), ""]
    lines += ["Milliseconds of fp32, and the time of `convert(model)` over it: a call and its backward at 1, 2 and 3"]
    lines += [f"times the batch, and an evaluation; * above {MOST}. Written by `benchmarks/default_policy.py`."]
    for run in held["runs"]:
        lines += ["", ", ".join(f"{key}: {value}" for key, value in run["options"].items()), ""]
        lines += ["| model | 1 | 2 | 3 | evaluation, 2 |", "|---|---:|---:|---:|---:|"]
        lines += [row(name, found) for name, found in run["results"]["calls"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print a row as soon as it is there, and write the file of results and its page."""
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--models", default=NAMES)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", AmpGraphWarning)
    held = opened(options.output, this_machine("cpu"))
    rates = Path(os.environ.get("AMP_GRAPH_MACHINE", "")).name or "of this machine"
    run = run_of(held, {"threads": options.threads, "rounds": options.rounds, "scale": SCALE, "rates": rates})
    for name in options.models.split(","):
        found = measured(name, options.rounds)
        print(row(name, found), flush=True)
        written(options.output, held, run, "calls", name, found)
        write_atomically(options.output.with_suffix(".md"), markdown(held))


if __name__ == "__main__":
    main()
