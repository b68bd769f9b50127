"""Tiny models with real architectures, whose forwards are as users write them: `CASES`, `make`, `to_double`.

Tags: the family ("transformers", "cnn", "rnn", "graph", "recsys", ...); "trap" with what it traps
("graph_break", "mutation", "checkpoint", ...); "random" (draws random numbers in forward); "integer" (has no
floating-point parameter); "eval" (is measured in evaluation mode); "kinks" (ReLU or max pooling, where a
rounding that flips a sign moves whole gradients: their errors have heavy tails); and what a case cannot do:
"no_fp64", "no_autocast" (raises under CPU autocast in bf16), "no_autocast_fp16", "fp16_overflow" (is not
finite under it).
"""

from . import (  # noqa: F401  each module adds its cases when imported
    attention,
    generative,
    graphs_and_recsys,
    sequence,
    transformers_models,
    traps_capture,
    traps_kernels,
    traps_memory,
    traps_numerics,
    vision,
)
from .core import CASES, Case, make, to_double

__all__ = ["CASES", "Case", "make", "to_double"]
