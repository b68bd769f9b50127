"""``amp_graph.search`` against the best of many policies drawn at random, all measured, on the machine at hand.

For each model: the time of the answer over that of the fastest random policy that is exact enough, the policies that
the search measured, and its error, on the batch and on another one. The answer is measured once more beside the best.

    OMP_NUM_THREADS=1 python benchmarks/search.py [--models mlp,gpt] [--draws 200] [--scale 0.25] [--budget 1.0]
"""

import argparse
import random
import statistics
import warnings
from pathlib import Path

import root_on_path  # noqa: F401 an installed amp_graph is not needed
import torch
from models import MODELS, MORE
from result_file import processor

from amp_graph.search.bench import Bench
from amp_graph.search.search import search
from amp_graph.search.space import Step
from amp_graph.search.trials import FULL, Goal, best_of

COLUMNS = (
    "model", "found", "measured", "speed over fp32", "best of random", "speed over fp32", "time over its",
    "error over the budget", "on held-out data",
)  # fmt: skip
NINE = "mlp,gpt,bert_eager,vit,resnet50,unet,lstm,dlrm,mixtral"


def drawn(seed: int) -> str:
    """Return a random policy."""
    draw = random.Random(seed)
    words = ["bf16", f"level={draw.choice(('O1', 'O1', 'O2'))}", f"accuracy={_accuracy(draw)}"]
    words += [
        f"skip_unprofitable={draw.choice(('true', 'false', 'graphs'))}",
        f"recompute={draw.choice(('some', 'all'))}",
    ]
    return ",".join(words)


def _accuracy(draw: random.Random) -> str:
    return draw.choice(("autocast", "fast", f"{draw.uniform(0.3, 4):.2f}"))


def step_of(name: str, scale: float, seed: int) -> tuple[torch.nn.Module, Step]:
    """Return a model of the benchmark of speed, and its loss on a batch."""
    torch.manual_seed(seed)
    made = (MODELS | MORE)[name](scale)
    return made.model, lambda model: made.loss(model, *made.batch)


def row(name: str, given: argparse.Namespace) -> str:
    """Return the row of one model."""
    model, step = step_of(name, given.scale, 0)
    held_out = step_of(name, given.scale, 1)[1]
    found = search(model, step, budget=given.budget, held_out=held_out)
    bench, goal = Bench(model, step, None), Goal(error=found.goal.error)
    policies = {drawn(seed) for seed in range(given.draws)}
    best = best_of([bench.trial(FULL, ""), *(bench.trial(policy, "") for policy in sorted(policies))], goal)
    # The fastest of many draws is fast by luck as well: both are measured again, in turns.
    turns = [{one: bench.trial(one, "").time for one in {found.policy, best.policy}} for _ in range(5)]
    again = {one: statistics.median(turn[one] for turn in turns) for one in turns[0]}
    cells = (
        name, found.policy, len(found.trials), f"{1 / again[found.policy]:.2f}",
        best.policy, f"{1 / again[best.policy]:.2f}", f"{again[found.policy] / again[best.policy]:.3f}",
        f"{found.best.error / found.goal.error:.2f}", f"{found.held_out / found.goal.error:.2f}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Print a table of all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=NINE)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--budget", type=float, default=1.0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    about = f"torch {torch.__version__}, {processor(Path('/proc/cpuinfo'))}, {torch.get_num_threads()} threads"
    print(f"# Searches\n\nTraining, budget {given.budget:g} of autocast's error, size {given.scale:g}, ", end="")
    print(f"{given.draws} random policies; {about}.\n")
    print("| " + " | ".join(COLUMNS) + " |\n|---|---|---:|---:|---|---:|---:|---:|---:|", flush=True)
    for name in given.models.split(","):
        print(row(name, given), flush=True)


if __name__ == "__main__":
    main()
