"""``amp_graph.search`` against the best of many policies drawn at random, all measured, on the machine at hand.

For each model: the time of the answer over that of the fastest random policy that is exact enough, the policies that
the search measured, and its error, on the batch and on another one. The answer and the best are measured once more, in
turns with each other. Random policies that are not exact enough are not timed, and those that lose the first turns by a
tenth are not timed further. ``--minutes`` ends the draws of each model in its share of that time.

    OMP_NUM_THREADS=1 python benchmarks/search.py [--models mlp,gpt] [--ways training,inference] [--draws 200]
        [--minutes 25] [--scale 0.1] [--budget 1.0]
"""

import argparse
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

from amp_graph.lists.errors import Attempt
from amp_graph.search.bench import Bench
from amp_graph.search.search import search
from amp_graph.search.space import Step
from amp_graph.search.trials import FULL, Goal, Trial

COLUMNS = (
    "model", "way", "found", "measured", "speed over fp32", "best of random", "of", "time over its",
    "error over the budget", "on held-out data",
)  # fmt: skip
TEN = "mlp,gpt,bert_eager,vit,resnet50,unet,lstm,dlrm,mixtral,einsum_attention"
TURNS = 3  # times that the answer and the best of random are measured once more


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


def best_of_random(bench: Bench, goal: Goal, draws: int, seconds: float) -> tuple[str, int]:
    """Return the fastest random policy that is exact enough, and how many were drawn."""
    best, count, ends = Trial(FULL, 1.0, 0.0), 0, time.monotonic() + seconds
    policies = list(dict.fromkeys(drawn(seed, bench.trains) for seed in range(draws)))
    while count < len(policies) and time.monotonic() < ends:
        policy, count = policies[count], count + 1
        with Attempt():  # a policy that fails is none to be measured with
            made = bench.converted(policy, best.policy)
            one = Trial(policy, 0.0, bench.error(made, bench.step, bench.reference))
            if goal.is_met(one):
                taken = best.time * statistics.median(bench.ratios(made, bench.converted(best.policy, policy)))
                best = Trial(policy, taken, one.error) if taken < best.time else best
    return best.policy, count


def row(name: str, way: str, given: argparse.Namespace, seconds: float) -> str:
    """Return the row of one model."""
    ends = time.monotonic() + seconds
    model, step = step_of(name, way, given.scale, 0)
    held_out = step_of(name, way, given.scale, 1)[1]
    found = search(model, step, budget=given.budget, held_out=held_out)
    bench, goal = Bench(model, step, None), Goal(error=found.goal.error)
    best, count = best_of_random(bench, goal, given.draws, ends - time.monotonic())
    # The fastest of many draws is fast by luck as well.
    pair = [bench.converted(one, found.best.policy, best) for one in (found.best.policy, best)]
    ratio = statistics.median(one for _ in range(TURNS) for one in bench.ratios(*pair))
    speed = 1 / statistics.median(bench.ratios(pair[0], bench.plain))
    cells = (
        name, way, found.best.policy, len(found.trials), f"{speed:.2f}", best, count, f"{ratio:.3f}",
        f"{found.best.error / found.goal.error:.2f}", f"{found.held_out / found.goal.error:.2f}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Print a table of all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=TEN)
    parser.add_argument("--ways", default="training,inference")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--budget", type=float, default=1.0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    about = f"torch {torch.__version__}, {processor(Path('/proc/cpuinfo'))}, {torch.get_num_threads()} threads"
    print(f"# Searches\n\nBudget {given.budget:g} of autocast's error, size {given.scale:g}, up to ", end="")
    print(f"{given.draws} random policies; {about}.\n")
    print("| " + " | ".join(COLUMNS) + " |\n|---|---|---|---:|---:|---|---:|---:|---:|---:|", flush=True)
    rows = [(name, way) for name in given.models.split(",") for way in given.ways.split(",")]
    ends = time.monotonic() + 60 * given.minutes
    for left, (name, way) in zip(range(len(rows), 0, -1), rows, strict=True):
        print(row(name, way, given, (ends - time.monotonic()) / left), flush=True)


if __name__ == "__main__":
    main()
