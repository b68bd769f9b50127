"""A pass, alone and in whole models: what benchmarks of one pass have in common.

Before: calls of the pieces, and ``",skip=fuse_add_norm"``. After: ``compare(__doc__, 31, models, skip, pieces)``: it
reads the command line, has the pieces timed, and prints a line for each model and way, with the pass against without
it.
"""

import time
from collections.abc import Callable

import torch
from interleaved import interleaved, parser_of, spread
from variants import Setup, Variant, inference_call, training_step

WAYS = (("convert", training_step), ("TrainStep", training_step), ("inference", inference_call))


def compare(doc: str | None, rounds: int, models: str, without: str, pieces: Callable[[int], None]) -> None:
    """Print the pieces, and a line for each model and way; ``without``: what a policy says to leave the pass out."""
    parser = parser_of(doc, rounds=rounds)
    parser.add_argument("--models", default=models)
    parser.add_argument("--scale", type=float, default=0.5)
    parser.add_argument("--skip-pieces", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not options.skip_pieces:
        pieces(options.rounds)
    for name in filter(None, options.models.split(",")):
        for kind, make in WAYS:
            ways = {
                way: make(name, options.scale, Variant(way, policy="bf16" + way, whole=kind == "TrainStep"), Setup())
                for way in ("", without)
            }
            seconds = interleaved({way: made.run for way, made in ways.items()}, options.rounds, time.process_time)
            print(f"{name}, {kind}: {spread(seconds[''], seconds[without])} of the time", flush=True)
