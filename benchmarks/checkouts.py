"""Two checkouts of amp_graph on the same machine, in turn: what a change does to the speed of the version before it.

Each checkout has a process of its own, with its own interpreter, which builds the model and makes steps when told; the
order turns with the round. Prints a row a model and way (training, TrainStep, inference): the median of the rounds'
ratios, old time over new time, and their quartiles: above 1 the new checkout is faster. Inference is of a frozen model
where a checkout has ``amp_graph.freeze``.

    python benchmarks/checkouts.py ../old/.venv/bin/python ../old [--models mlp,gpt] [--scale 0.25] [--threads 2]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from interleaved import quartiles

MODELS = "mlp,dlrm,vit,gpt,bert_sdpa,bert_eager,resnet50,unet,lstm"
WAYS = "training,TrainStep,inference"


class Worker:
    """The process of one checkout: ``seconds()`` makes calls there and returns what they took."""

    def __init__(self, python: str, checkout: str, model: str, way: str, scale: float, threads: int) -> None:
        folder = Path(checkout).resolve() / "benchmarks"
        command = [python, __file__, "--serve", str(folder), model, way, str(scale), str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.repeats = 1

    def seconds(self) -> float:
        """Return the seconds of a call."""
        assert self.process.stdin is not None, "a pipe"
        assert self.process.stdout is not None, "a pipe"
        print(self.repeats, file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"a process ended: {self.process.args}")
        return float(line) / self.repeats


def serve(folder: str, model: str, way: str, scale: float, threads: int) -> None:
    """Make as many calls as each line of standard input says, and print their seconds."""
    sys.path[0] = folder
    import torch
    from models import case

    import amp_graph

    torch.set_num_threads(threads)
    made = case(model, scale)
    if way == "inference":
        made.model.eval()
        amp_graph.convert(made.model, "bf16")
        if hasattr(amp_graph, "freeze"):
            amp_graph.freeze(made.model)

        def call() -> None:
            with torch.inference_mode():
                made.infer(made.model, *made.batch)
    elif way == "TrainStep":

        class WithLoss(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model, self.loss_of = made.model, made.loss

            def forward(self, *batch: torch.Tensor) -> torch.Tensor:
                return self.loss_of(self.model, *batch)

        optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4, fused=True)
        step = amp_graph.TrainStep(WithLoss(), None, optimizer, "bf16")

        def call() -> None:
            step(*made.batch)
    else:
        optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4, fused=True)
        amp_graph.convert(made.model, "bf16")

        def call() -> None:
            made.loss(made.model, *made.batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            call()
        print(time.perf_counter() - start, flush=True)


def compare(arguments: argparse.Namespace) -> list[float]:
    """Print a row a model and way; return the medians."""
    medians = []
    for model in arguments.models.split(","):
        for way in arguments.ways.split(","):
            workers = [
                Worker(python, checkout, model, way, arguments.scale, arguments.threads)
                for python, checkout in (arguments.old, arguments.new)
            ]
            times: list[list[float]] = [[], []]
            for turn in range(-3, arguments.rounds):
                for i in (0, 1) if turn % 2 else (1, 0):
                    took = workers[i].seconds()
                    if turn >= 0:
                        times[i].append(took)
                    elif turn == -1:
                        workers[0].repeats = workers[1].repeats = max(1, int(arguments.least / took))
            for worker in workers:
                worker.process.kill()
            low, middle, high = quartiles(times[0], times[1])
            medians.append(middle)
            print(
                f"| {model} | {way} | {statistics.median(times[1]) * 1e3:.1f} | {middle:.3f} | {low:.3f}-{high:.3f} |",
                flush=True,
            )
    return medians


def main() -> None:
    """Read the command line."""
    if sys.argv[1:2] == ["--serve"]:
        folder, model, way, scale, threads = sys.argv[2:]
        return serve(folder, model, way, float(scale), int(threads))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs=2, metavar="OLD", help="its Python and its checkout")
    parser.add_argument("--new", nargs=2, default=(sys.executable, "."), metavar=("PYTHON", "CHECKOUT"))
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--least", type=float, default=0.2, help="seconds that a turn takes at least")
    medians = compare(parser.parse_args())
    print(f"geometric mean {statistics.geometric_mean(medians):.3f}, worst {min(medians):.3f}")


if __name__ == "__main__":
    main()
