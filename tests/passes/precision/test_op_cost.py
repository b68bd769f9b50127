"""The work of one operation: FLOPs as torch counts them, and its time on a machine of round rates, by hand."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from amp_graph.passes.precision.machine_rates import DTYPES, FAMILIES, Machine
from amp_graph.passes.precision.op_cost import (
    Work,
    cast_picoseconds,
    forward_flops,
    kept_picoseconds,
    picoseconds,
    work_of,
)
from tests.passes.graphs import capture, capture_function
from tests.passes.planning import problem_of


def works_of(function, *inputs, **state):
    """The work of each operation that is planned, by the first of its names."""
    problem, _ = problem_of(capture_function(function, *inputs, **state))
    return {kind.names[0]: work_of(node, kind) for node, kind in problem.classes.items() if kind.names}


# What torch's own counter knows.
COUNTED = {
    "linear": (lambda s, x: F.linear(x, s.w, s.b), [(5, 3, 8)], {"w": (6, 8), "b": (6,)}),
    "product": (lambda s, x: x @ s.w, [(7, 8)], {"w": (8, 6)}),
    "products of a batch": (lambda s, x: x @ s.w, [(4, 7, 8)], {"w": (4, 8, 6)}),
    "products of four dimensions": (lambda s, x: x @ s.w, [(2, 3, 7, 8)], {"w": (2, 3, 8, 5)}),
    "convolution": (lambda s, x: F.conv2d(x, s.w, s.b, stride=2), [(2, 4, 9, 9)], {"w": (6, 4, 3, 3), "b": (6,)}),
    "grouped convolution": (lambda s, x: F.conv1d(x, s.w, groups=2), [(2, 4, 9)], {"w": (6, 2, 3)}),
    "transposed convolution": (lambda s, x: F.conv_transpose2d(x, s.w), [(2, 4, 5, 5)], {"w": (4, 6, 3, 3)}),
}


@pytest.mark.parametrize("name", COUNTED)
def test_flops_are_those_that_torch_counts(name):
    function, shapes, state = COUNTED[name]
    inputs, state = [torch.randn(s) for s in shapes], {key: torch.randn(s) for key, s in state.items()}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function(type("State", (), state), *inputs)
    problem, _ = problem_of(capture_function(function, *inputs, **state))
    (work,) = [w for node, kind in problem.classes.items() if (w := work_of(node, kind)).flops]
    shown = sum(forward_flops(node, kind.cls, kind.names) for node, kind in problem.classes.items())
    assert work.flops == shown == counter.get_total_flops()
    assert work.family == ("convolution" if "convolution" in name else "matmul")


def test_a_linear_has_its_rows_outputs_and_inputs_by_which_a_kernel_is_chosen():
    """Other products have none, nor has a linear of any number of rows."""
    x, state = torch.randn(5, 3, 8), {"w": torch.randn(6, 8), "b": torch.randn(6)}

    def both(s, x):
        return F.linear(x, s.w, s.b), x @ x.mT

    found = {dynamic: capture_function(both, x, dynamic=dynamic, **state) for dynamic in (False, True)}
    sizes = {}
    for dynamic, given in found.items():
        problem, _ = problem_of(given)
        kinds = {k.names[0]: work_of(n, k).sizes for n, k in problem.classes.items() if k.names}
        sizes[dynamic] = kinds["aten.linear"], kinds["aten.matmul"]
    assert sizes == {False: ((15, 6, 8), None), True: (None, None)}


def test_flops_of_a_recurrent_layer_are_those_of_its_products():
    lstm, x = nn.LSTM(5, 7, batch_first=True), torch.randn(3, 4, 5)
    with torch._dynamo.config.patch(allow_rnn=True):
        problem, _ = problem_of(capture(lstm, x))
    (work,) = [w for node, kind in problem.classes.items() if (w := work_of(node, kind)).flops]
    assert work.flops == 2 * 3 * 4 * (4 * 7 * 5 + 4 * 7 * 7)
    assert work.family == "matmul"
    assert work.calls > 4, "one kernel after the other in each step"


def test_elements_are_what_is_read_and_written_and_views_move_none():
    found = works_of(lambda s, x: (torch.relu(x + s.b).t() * 2.0, x.softmax(-1)), torch.randn(6, 8), b=torch.randn(8))
    assert found["aten.add"].elements == 6 * 8 + 8 + 6 * 8
    assert (found["aten.relu"].elements, found["aten.relu"].family) == (2 * 6 * 8, "elementwise")
    assert found["aten.softmax"].family == "activation"
    assert [found[f"aten.{n}"].keeps for n in ("add", "relu")] == ["", "output"]
    assert (found["aten.softmax"].backward, found["aten.softmax"].keeps) == (0.0, ""), "its input is not trained"


def test_backward_has_a_product_for_each_operand_that_is_trained():
    both = works_of(lambda s, x: (x * s.a) @ s.b, torch.randn(4, 8), a=torch.randn(8), b=torch.randn(8, 3))
    one = works_of(lambda s, x: x @ s.b, torch.randn(4, 8), b=torch.randn(8, 3))
    assert (both["aten.matmul"].backward, one["aten.matmul"].backward) == (2.0, 1.0)
    assert (both["aten.matmul"].keeps, one["aten.matmul"].keeps) == ("inputs", "inputs")


CALL, PRODUCT = 1e-6, 2e-6
PLAIN = Machine(
    "plain", "cuda", "round", CALL, 0.0, 1e8, True,
    {"float32": PRODUCT, "bfloat16": 2 * PRODUCT, "float16": PRODUCT},
    {n: dict.fromkeys(DTYPES, 1e8) for n in FAMILIES} | {"matmul": {"float32": 1e9, "bfloat16": 2e9, "float16": 4e9}},
)  # fmt: skip


LINEAR = Work("matmul", flops=10**6, elements=100, backward=2.0, keeps="inputs")
MOVED = replace(LINEAR, elements=10**6)  # bound by what it moves: more than it computes
RELU = Work("elementwise", elements=1000, backward=1.0)
TIMES = {
    "linear": (LINEAR, "float32", 3 * 10**6 / 1e9 + 3 * (CALL + PRODUCT)),
    "low": (LINEAR, "bfloat16", 3 * 10**6 / 2e9 + 3 * (CALL + 2 * PRODUCT)),
    # A call for each begun product.
    "trained once": (replace(LINEAR, backward=1.5), "float32", 2.5 * 10**6 / 1e9 + 3 * (CALL + PRODUCT)),
    "moved": (MOVED, "float32", 3 * 4 * 10**6 / 1e8 + 3 * (CALL + PRODUCT)),
    "moved, low": (MOVED, "bfloat16", 3 * 2 * 10**6 / 1e8 + 3 * (CALL + 2 * PRODUCT)),
    "relu": (RELU, "float32", 2 * 4000 / 1e8 + 2 * CALL),
    "sums": (replace(RELU, sums=500), "float16", 2 * 2000 / 1e8 + 2 * CALL + 1000 / 1e8),
    "a view": (Work("", sums=500), "float32", 2000 / 1e8),
    # Of a recurrent layer: the library prepares nothing.
    "steps": (Work("matmul", flops=10**6, elements=10, calls=20), "float32", 10**6 / 1e9 + 20 * CALL),
    "attention": (Work("attention", flops=10**6, elements=10), "float32", 10**6 / 1e8 + CALL),
}


@pytest.mark.parametrize("name", TIMES)
def test_times_by_hand(name):
    work, dtype, seconds = TIMES[name]
    assert picoseconds(work, PLAIN, dtype) / 1e12 == pytest.approx(seconds)


def test_casts_and_what_is_kept_by_hand():
    problem, _ = problem_of(capture_function(lambda s, x: x @ s.w, torch.randn(10, 100), w=torch.randn(100, 30)))
    x, w = sorted(problem.gm.graph.find_nodes(op="placeholder"), key=lambda n: n.meta["example_value"].shape[0])
    kept = replace(PLAIN, keeps_weights=True)
    times = [
        cast_picoseconds(x, PLAIN, "bfloat16"),
        cast_picoseconds(x, PLAIN, "bfloat16", within=True),
        cast_picoseconds(w, PLAIN, "float16"),
        cast_picoseconds(x, kept, "bfloat16"),
        cast_picoseconds(w, kept, "bfloat16"),
        kept_picoseconds(x, PLAIN, "bfloat16"),
        kept_picoseconds(x, PLAIN, "float32"),
    ]
    one = 1000 / 1e8
    wanted = [6 * one + CALL, 6 * one, 3 * 6 * one + CALL, 6 * one + CALL, 0, 2 * one, 4 * one]
    assert [time / 1e12 for time in times] == pytest.approx(wanted)
