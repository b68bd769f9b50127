"""What computing activations again in backward costs in time, and saves in memory, against the same graph without.

Every model runs four ways in turn: as a converted model and as a ``TrainStep``, each with and without the pass, with
forward, backward and fused AdamW. A round gives one ratio of process CPU times; below 1 the pass is faster. ``saved``
are the activations kept for backward, in megabytes, and as a part of what autocast keeps.

    python benchmarks/recompute_activations.py [--models vit,resnet50] [--accuracy fast] [--scale 0.5] [--rounds 15]
"""

import argparse
import time

import torch
from interleaved import interleaved, quartiles
from step_costs import saved_by
from variants import Prepared, Setup, Variant, training_step

WITHOUT = ",skip=recompute_activations"


def prepared(name: str, scale: float, policy: str) -> dict[str, Prepared]:
    """Prepare the four ways, each after two steps, and autocast."""
    found = {"autocast": training_step(name, scale, Variant("autocast", autocast=True), Setup())}
    for kind, whole in (("convert", False), ("TrainStep", True)):
        for without in ("", WITHOUT):
            variant = Variant(kind + without, policy=policy + without, whole=whole)
            found[variant.name] = training_step(name, scale, variant, Setup())
    for made in found.values():
        made.run()
        made.run()
    return found


def main() -> None:
    """Print a line for each model and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="vit,resnet50,bert_sdpa,gpt")
    parser.add_argument("--accuracy", default="autocast")
    parser.add_argument("--scale", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models.split(","):
        ways = prepared(name, options.scale, f"bf16,accuracy={options.accuracy}")
        saved = {kind: saved_by(made, False).activations for kind, made in ways.items()}
        against = saved.pop("autocast")
        ways.pop("autocast")
        seconds = interleaved({kind: made.run for kind, made in ways.items()}, options.rounds, time.process_time)
        for kind in ("convert", "TrainStep"):
            low, middle, high = quartiles(seconds[kind], seconds[kind + WITHOUT])
            parts = ", ".join(f"{n / 1e6:.1f} MB ({n / against:.3f})" for n in (saved[kind + WITHOUT], saved[kind]))
            print(
                f"{name}, {options.accuracy}, {kind}: {middle:.3f} [{low:.3f}-{high:.3f}] of the time; saved without, "
                f"with: {parts}",
                flush=True,
            )


if __name__ == "__main__":
    main()
