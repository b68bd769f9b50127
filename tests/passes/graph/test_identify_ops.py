"""Every spelling of an operation is the operation; what cannot be known is said, not guessed."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_graph.lists import OpClass, effective
from amp_graph.passes.graph import identify_ops, node_info
from amp_graph.passes.graph.fake_values import fake_mode_of
from amp_graph.passes.graph.identify_ops import identify, is_part, is_tensor_call, packets, tensor_inputs
from amp_graph.passes.graph.node_info import is_higher_order
from amp_graph.passes.graph.propagate_fake_values import record_values
from amp_graph.passes.precision.classify import classify
from amp_graph.passes.torch_compat.fake import FakeTensorMode
from tests.passes.graphs import capture

X, W, B = torch.randn(3, 4), torch.randn(4, 4), torch.randn(4)


def traced(function, *inputs):
    """Return the last computing node of a symbolic trace, with its identity."""
    gm = torch.fx.symbolic_trace(function)
    record_values(gm, inputs)
    nodes = [n for n in gm.graph.nodes if is_tensor_call(n)]
    return nodes[-1], identify(nodes[-1], fake_mode_of(gm))


SPELLINGS = [
    (lambda x, w: x @ w, ("aten.matmul",)),
    (lambda x, w: torch.matmul(x, w), ("aten.matmul",)),
    (lambda x, w: x.matmul(w), ("aten.matmul",)),
    (lambda x, w: x.__matmul__(w), ("aten.matmul",)),
    (lambda x, w: F.linear(x, w), ("aten.linear",)),
    (lambda x, w: torch.mm(x, w), ("aten.mm",)),
    (lambda x, w: x.mm(w), ("aten.mm",)),
    (lambda x, w: torch.ops.aten.mm.default(x, w), ("aten.mm",)),
    (lambda x, w: torch.ops.aten.mm(x, w), ("aten.mm",)),
    (lambda x, w: torch.einsum("ij,jk->ik", x, w), ("aten.einsum",)),
    (lambda x, w: torch.relu(x), ("aten.relu",)),
    (lambda x, w: x.relu(), ("aten.relu",)),
    (lambda x, w: F.softmax(x, dim=-1), ("aten.softmax",)),
    (lambda x, w: x.softmax(-1), ("aten.softmax",)),
    (lambda x, w: x + 1, ("aten.add",)),
    (lambda x, w: 1 + x, ("aten.add",)),
    (lambda x, w: -x, ("aten.neg",)),
    (lambda x, w: x.add_(1), ("aten.add_",)),
    (lambda x, w: operator.iadd(x, 1.0), ("aten.add",)),  # a proxy has no __iadd__: torch.fx records add
    (lambda x, w: F.relu(x, inplace=True), ("aten.relu_",)),
    (lambda x, w: x[0], ("aten.select",)),
    (lambda x, w: x[:, 1:], ("aten.slice",)),
    (lambda x, w: torch.stack([x, w[:3]]), ("aten.stack",)),
    (lambda x, w: x.bfloat16(), ("aten.to",)),
    (lambda x, w: x.to(torch.bfloat16), ("aten.to",)),
]


@pytest.mark.parametrize(("function", "names"), SPELLINGS)
def test_each_spelling_is_its_operation(function, names):
    _, found = traced(function, X.clone(), W)
    assert not isinstance(found, str), found
    assert set(names) <= set(packets(found))


def test_operands_are_traced_back_to_the_inputs_of_the_node():
    node, found = traced(lambda x, w, b: F.linear(x, w, b), X, W, B)
    (one,) = found
    assert [s.name for s in tensor_inputs(node)] == ["x", "w", "b"]
    assert [one.operands(a) for a in ("input", "weight", "bias")] == [[0], [1], [2]]


def test_the_same_tensor_twice_is_one_operand():
    _, found = traced(lambda x: torch.mul(x, x), X)
    assert found[0].operands("self") == found[0].operands("other") == [0]


def test_a_function_that_asks_whether_arguments_are_the_same_object():
    def picky(a, b):
        return a.exp() if a is b else a + b

    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    same, other = graph.call_function(picky, (x, x)), graph.call_function(picky, (x, y))
    graph.output((same, other))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    record_values(gm, (X, X.clone()))
    mode = fake_mode_of(gm)
    assert packets(identify(same, mode)) == ("aten.exp",)
    assert packets(identify(other, mode)) == ("aten.add",)


def test_symbolic_sizes_are_identified_without_guards():
    def function(x, w):
        return (x @ w).reshape(x.shape[0] * 2, -1)[: x.shape[0]].expand(x.shape[0], 2).sum()

    graph = capture(function, torch.randn(6, 4), torch.randn(4, 4), dynamic=True).fresh()
    mode = fake_mode_of(graph)
    guards = len(mode.shape_env.guards)
    found = {n.name: identify(n, mode) for n in graph.graph.nodes if is_tensor_call(n)}
    sizes = {name for name, f in found.items() if isinstance(f, str)}
    assert not sizes, {n: found[n] for n in sizes}
    names = {n for f in found.values() for n in packets(f)}
    assert {"aten.matmul", "aten.reshape", "aten.sum"} <= names
    assert len(mode.shape_env.guards) == guards


def test_python_that_depends_on_data_is_a_reason_not_a_crash():
    def branches(x):
        return x.exp() if x.sum() > 0 else x.log()

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    out = graph.call_function(branches, (x,))
    graph.output(out)
    mode = FakeTensorMode()
    x.meta["val"] = out.meta["val"] = mode.from_tensor(X)
    found = identify(out, mode)
    assert isinstance(found, str)
    assert found.startswith("cannot be traced alone: ")
    assert "\n" not in found


def test_parts_and_higher_order_nodes_are_no_tensor_calls():
    def function(x):
        return torch.utils.checkpoint.checkpoint(torch.tanh, x.chunk(2)[0] * 1, use_reentrant=False)

    graph = capture(function, X[:2]).gm
    for node in graph.graph.nodes:
        node.meta["val"] = node.meta.get("example_value")
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    kinds = {n.name: (is_part(n), is_higher_order(n), is_tensor_call(n)) for n in calls}
    assert sum(higher for _, higher, _ in kinds.values()) == 1
    assert all(not call for part, higher, call in kinds.values() if part or higher)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("rule", "function"),
    [
        ("aten.cumsum, dim = 1", torch.cumsum),
        ("aten.unsqueeze, dim = 1", torch.unsqueeze),
        ("aten.logcumsumexp, dim = 1", torch.logcumsumexp),
        ("aten.softmax.int, dim = 1", torch.softmax),
    ],
)
def test_a_rule_that_asks_for_an_integer_is_told_the_nodes_own(first, rule, function, tmp_path):
    """Two calls that differ in an integer, in either order, and a list that names one of them."""
    op, condition = rule.split(", ")
    own = tmp_path / "own.toml"
    own.write_text(
        f'[list]\nname = "own"\ndtype = "bfloat16"\ndevice = "cpu"\ndescription = "own"\n\n[[op]]\nop = "{op}"\n'
        f'class = "deny"\nwhy = "of columns"\nsource = "a test"\nwhen = {{ {condition} }}\n'
    )
    lists = effective((str(own),), dtype="bfloat16", device="cpu")
    identify_ops._CACHE.clear()
    classes = {}
    for dim in (first, 1 - first):
        node, _ = traced(lambda x, w, dim=dim: function(x, dim), X.clone(), W)
        classes[dim] = classify(node, lists, fake_mode_of(node.graph.owning_module)).cls
    assert {dim: cls is OpClass.DENY for dim, cls in classes.items()} == {0: False, 1: True}


def power_of(found):
    return found[0].arguments["exponent"]


def draws(found):
    return [node_info.draws(one.op, one.arguments) for one in found]


Q = torch.randn(1, 2, 4, 8)
# Two calls that differ in what their identity depends on, and what is asked of that: a tensor that is contiguous, and a
# slice of a whole dimension, are no operation; lists have small whole powers of their own.
ALIKE = {
    "contiguous": (lambda i: lambda x, w: (x, w[:, :3].mT)[i].contiguous(), packets, [(), ("aten.contiguous",)]),
    "slice": (lambda i: lambda x, w: x[:, : 4 - i], lambda found: "aten.slice" in packets(found), [False, True]),
    "power by sign": (lambda i: lambda x, w: x ** (2, 7)[i], power_of, [2, 7]),
    "power": (lambda i: lambda x, w: torch.pow(x, (2, 7)[i]), power_of, [2, 7]),
    "power by method": (lambda i: lambda x, w: x.pow((2, 7)[i]), power_of, [2, 7]),
    "dropout": (
        lambda i: lambda x, w, p=i: F.scaled_dot_product_attention(Q, Q, Q, None, p), draws, [[False], [True]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("name", ALIKE)
def test_what_is_remembered_of_a_call_does_not_speak_for_others(name, order):
    call, asked, wanted = ALIKE[name]
    identify_ops._CACHE.clear()
    for i in order:
        assert asked(traced(call(i), X.clone(), W)[1]) == wanted[i]
