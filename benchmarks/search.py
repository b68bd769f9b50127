"""``amp_graph.search`` against the best of many policies drawn at random, all measured, on the machine at hand.

For each model: the time of the answer over that of the fastest random policy that is exact enough, with its standard
error, the runs of the search, and its error over the budget, on the batch and, of autocast's error there, on another.
Of random policies whose rewritten graphs are equal one is measured. Those that are not exact enough are not timed, and
those that lose the first turns by a tenth are not timed further. The answer and the best are measured once more, in
turns with each other.

``--output`` gets each row as it is measured, and keeps those that it has: what was ended goes on, models one by one.
No row is begun after ``--minutes``.

    OMP_NUM_THREADS=1 python benchmarks/search.py --output search.md [--models mlp,gpt] [--ways training,inference]
        [--draws 200] [--minutes 60] [--scale 0.1] [--budget 1.0]
"""

import argparse
import itertools
import random
import statistics
import time
import warnings
from pathlib import Path

import root_on_path  # noqa: F401 an installed amp_graph is not needed
import torch
from models import MODELS, MORE
from result_file import processor
from torch.utils._pytree import tree_leaves

from amp_graph.capture.conversion import conversion_of
from amp_graph.lists.errors import Attempt
from amp_graph.passes.graph.graph_text import graph_text
from amp_graph.passes.graph.meta_keys import LEFT_ALONE
from amp_graph.policy import Policy
from amp_graph.search.bench import Bench, spread_of
from amp_graph.search.search import search
from amp_graph.search.space import Step
from amp_graph.search.trials import AUTOCAST, FULL, Goal, Trial

COLUMNS = (
    "model", "way", "found", "runs", "speed over fp32", "best of random", "drawn", "graphs", "time over its",
    "error over the budget", "on held-out data",
)  # fmt: skip
TEN = "mlp,gpt,bert_eager,vit,resnet50,unet,lstm,dlrm,mixtral,einsum_attention"
TURNS = 6  # times as many turns in which the answer and the best of random are measured once more


def drawn(seed: int, trains: bool) -> str:
    """Return a random policy."""
    draw = random.Random(seed)
    words = ["bf16", f"accuracy={_accuracy(draw)}", f"skip_unprofitable={draw.choice(('true', 'false', 'graphs'))}"]
    words += ["skip=channels_last"] * draw.choice((False, False, True))
    if trains:
        words += [f"level={draw.choice(('O1', 'O1', 'O2'))}", f"recompute={draw.choice(('some', 'all'))}"]
    return ",".join(words)


def _accuracy(draw: random.Random) -> str:
    return draw.choice(("autocast", "fast", f"{draw.uniform(0.3, 4):.2f}"))


def step_of(name: str, way: str, scale: float, seed: int) -> tuple[torch.nn.Module, Step]:
    """Return a model of the benchmark of speed, and its loss on a batch, or its outputs without gradients."""
    torch.manual_seed(seed)
    made = (MODELS | MORE)[name](scale)
    if way == "training":
        return made.model, lambda model: made.loss(model, *made.batch)

    def infer(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            leaves = tree_leaves(made.infer(model, *made.batch))
        return next(t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point())

    return made.model.eval(), infer


def best_of_random(bench: Bench, goal: Goal, draws: int) -> tuple[str, int]:
    """Return the fastest of ``draws`` random policies that is exact enough, and how many graphs they make."""
    best, seen = Trial(FULL, 1.0, 0.0), set[tuple[object, ...]]()
    for policy in dict.fromkeys(drawn(seed, bench.trains) for seed in range(draws)):
        with Attempt():  # a policy that fails is none to be measured with
            made = bench.converted(policy, best.policy)
            if (found := graphs_of(bench, made)) in seen:
                continue
            seen.add(found)
            one = Trial(policy, 0.0, bench.error(made, bench.step, bench.reference))
            if goal.is_met(one):
                taken = best.time * statistics.median(bench.ratios(made, bench.converted(best.policy, policy)))
                best = Trial(policy, taken, one.error) if taken < best.time else best
    return best.policy, len(seen)


def graphs_of(bench: Bench, made: torch.nn.Module) -> tuple[object, ...]:
    """Return what tells how ``made`` runs: its rewritten graphs as text, and the words that act beside them."""
    with torch.set_grad_enabled(bench.trains):
        bench.step(made)
    conversion = conversion_of(made)
    graphs = [one.rewritten.gm for one in conversion.graphs]
    texts = tuple((graph_text(gm), LEFT_ALONE in gm.meta) for gm in graphs)
    policy: Policy = conversion.policy
    return policy.level, policy.recompute, policy.skip if any("conv" in text for text, _ in texts) else (), texts


def row(name: str, way: str, given: argparse.Namespace) -> str:
    """Return the row of one model."""
    model, step = step_of(name, way, given.scale, 0)
    held_out = step_of(name, way, given.scale, 1)[1]
    found = search(model, step, budget=given.budget, held_out=held_out)
    bench, goal = Bench(model, step, None), Goal(error=found.goal.error)
    there = bench.error(bench.converted(AUTOCAST), held_out, bench.values(bench.plain, held_out))
    best, graphs = best_of_random(bench, goal, given.draws)
    # The fastest of many draws is fast by luck as well.
    pair = [bench.converted(one, found.best.policy, best) for one in (found.best.policy, best)]
    ratios = bench.ratios(*pair, TURNS)
    speed = 1 / statistics.median(bench.ratios(pair[0], bench.plain))
    cells = (
        name, way, found.best.policy, sum(one.runs for one in found.trials), f"{speed:.2f}", best, given.draws, graphs,
        f"{statistics.median(ratios):.3f} ±{spread_of(ratios):.3f}",
        f"{found.best.error / found.goal.error:.2f}", f"{found.held_out / (given.budget * there):.2f}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Write a table of all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=TEN)
    parser.add_argument("--ways", default="training,inference")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    about = f"torch {torch.__version__}, {processor(Path('/proc/cpuinfo'))}, {torch.get_num_threads()} threads"
    head = f"Budget {given.budget:g} of autocast's error, size {given.scale:g}, {given.draws} random policies; {about}."
    titles = "| " + " | ".join(COLUMNS) + " |\n|---|---|---|---:|---:|---|---:|---:|---:|---:|---:|"
    page = given.output.read_text("utf-8") if given.output.exists() else f"# Searches\n\n{head}\n\n{titles}\n"
    if head not in page or titles not in page:
        parser.error(f"{given.output} holds another table than: {head}")
    ends = time.monotonic() + 60 * given.minutes
    for name, way in itertools.product(given.models.split(","), given.ways.split(",")):
        if f"\n| {name} | {way} |" not in page and time.monotonic() < ends:
            page += row(name, way, given) + "\n"
            given.output.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
