"""A graph as numbers: what each assignment costs on a machine of round rates, by hand."""

import pytest
import torch

from amp_graph import Policy
from amp_graph.passes.precision.build_assignment import formulate
from amp_graph.passes.precision.precision_assignment import LOW_ALWAYS, cost
from tests.passes.graphs import capture_function, node_named, rewritten
from tests.passes.planning import problem_of
from tests.passes.precision.test_op_cost import CALL, PLAIN


def two_products(s, x):
    return torch.relu(x @ s.w) + x @ s.v


@pytest.fixture(scope="module")
def made():
    """Two products and their sum, with the time of what is cast once: [64, 16] values, and the gradients of them."""
    given = capture_function(two_products, torch.randn(64, 32), w=torch.randn(32, 16), v=torch.randn(32, 16))
    problem, dtype = problem_of(given)
    return formulate(problem, PLAIN, dtype)


def of(made, *names):
    numbers = {node.name: i for node, i in made.of.items()}
    return frozenset({LOW_ALWAYS, *(numbers[name] for name in names)})


def seconds(made, *names):
    """The cost of low precision in these operations alone, over that of their own work."""
    task, low = made.task(), of(made, *names)
    return (cost(task, low) - sum(task.low[i] if i in low else task.full[i] for i in range(len(task.full)))) / 1e12


VALUE, INPUT, WEIGHT = (n * 6 / 1e8 for n in (64 * 16, 64 * 32, 32 * 16))  # a cast by bytes; each takes a call as well
KEPT = {name: n * 2 / 1e8 for name, n in {"x": 64 * 32, "w": 32 * 16, "relu": 64 * 16}.items()}


def test_a_full_sum_promotes_low_operands_of_which_one_is_cast(made):
    one = INPUT + CALL + 2 * (WEIGHT + CALL) + KEPT["x"] + KEPT["w"] + 2 * KEPT["relu"]  # relu stays full: fp32 is kept
    assert seconds(made, "matmul_1") == pytest.approx(one + 2 * VALUE), "in registers, without a call"
    low = INPUT + CALL + 2 * (WEIGHT + CALL) + KEPT["x"] + KEPT["w"] + KEPT["relu"]
    assert seconds(made, "matmul", "relu") == pytest.approx(low + 2 * (VALUE + CALL)), "the first: by a cast"


def shaped(s, x):
    """What is written takes its shape from a product, which only another product reads."""
    product = x @ s.w
    values = x[:, :16].sin()
    values.view_as(product).mul_(2)
    return product @ s.v + values


def test_what_only_the_shape_is_read_of_is_not_cast():
    given = capture_function(shaped, torch.randn(64, 32), w=torch.randn(32, 16), v=torch.randn(16, 16))
    problem, dtype = problem_of(given)
    made = formulate(problem, PLAIN, dtype)
    nodes = {node.name: node for node in problem.gm.graph.nodes}
    read = [*made.lowers[nodes["product"]], *made.widens.get(nodes["product"], ())]
    assert made.of[nodes["matmul_1"]] in read
    assert made.of[nodes["view_as"]] not in read
    for policy in ("bf16", "bf16,planner=paint"):
        after = rewritten(given, policy)
        assert not any(user.target == "float" for user in node_named(after, "product").users), policy


ONE_INPUT = """
[list]
name = "own"
dtype = "bfloat16"
device = "cpu"
description = "own"

[[op]]
op = "aten.addcmul_"
class = "follow"
inputs = ["tensor1"]
why = "the other factor is a mask"
"""


def test_an_input_that_an_entry_leaves_out_is_not_cast_for_a_write(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(ONE_INPUT)
    given = capture_function(
        lambda s, x: (x * 1).addcmul_(x @ s.w, x @ s.v),
        torch.randn(64, 32),
        w=torch.randn(32, 32),
        v=torch.ones(32, 32),
    )
    problem, dtype = problem_of(given, Policy(lists=("default", str(own))))
    made = formulate(problem, PLAIN, dtype)
    nodes = {node.name: node for node in problem.gm.graph.nodes}
    write = made.of[nodes["addcmul_"]]
    assert write in made.widens[nodes["matmul"]]
    assert write not in made.widens.get(nodes["matmul_1"], ())
