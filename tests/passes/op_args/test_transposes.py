"""Which operations are transposes: the operation and its strides both count."""

import torch

from amp_graph.passes.graph.identify_ops import IdentifyOps
from amp_graph.passes.manager import run_passes
from amp_graph.passes.op_args.transposes import swaps_last_two, transposes
from tests.passes.graphs import capture_function


def last_of(function, x):
    """The captured node that ``function`` ends with; a view alone would be outside the graph."""
    gm = capture_function(lambda s, x: function(x).neg(), x).fresh()
    run_passes(gm, [IdentifyOps()])
    (negated,) = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    return negated.all_input_nodes[0]


def test_only_a_transpose_swaps_the_last_two_dimensions():
    square, point, cube = torch.randn(3, 3), torch.randn(1, 1), torch.randn(2, 3, 4)
    found = {
        "mT": (lambda x: x.mT, square),
        "permute": (lambda x: x.permute(0, 2, 1), cube),
        "back": (lambda x: x.transpose(-1, -2), cube),
        "others": (lambda x: x.transpose(0, 1), cube),
        "relu of a point": (lambda x: x.relu(), point),  # of the same strides as the point's transpose
        "a sum with it": (lambda x: x + x.t(), point),
        "a vector": (lambda x: x.t(), torch.randn(3)),
    }
    swapped, moves = {}, {}
    for name, (function, x) in found.items():
        node = last_of(function, x)
        swapped[name], moves[name] = swaps_last_two(node), transposes(node)
    assert {name for name, swaps in swapped.items() if swaps} == {"mT", "permute", "back"}
    assert {name for name, moved in moves.items() if not moved} == {"relu of a point", "a sum with it"}
