"""Each clause of the contract has a broken graph that fails it."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from amp_graph.passes.base import Change, Pass, PassResult, VerifyError, Writes
from amp_graph.passes.casts.insert_casts import InsertCasts
from amp_graph.passes.graph.edit import set_value
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.identify_ops import IdentifyOps
from amp_graph.passes.graph.propagate_fake_values import record_values
from amp_graph.passes.manager import run_passes
from amp_graph.passes.torch_compat.fake import make_fx
from amp_graph.passes.verify import Contract, verify
from tests.layers import layers
from tests.passes.graphs import BF16, options

X = torch.randn(2, 4)


@layers(lambda: dict(weight=nn.Parameter(torch.randn(4, 4))))
def Model(self, x, y):
    h = torch.dropout(x @ self.weight, 0.5, True)
    h = torch.dropout(h, 0.25, True)
    h.add_(1.0)
    return h.exp(), y + 1


@pytest.fixture
def graph():
    gm = torch.fx.symbolic_trace(Model())
    record_values(gm, (X, torch.arange(3)))
    run_passes(gm, [IdentifyOps()], checked=True)
    return gm


def find(gm, name):
    return next(n for n in gm.graph.nodes if n.name == name)


def broken(gm, before, message):
    with pytest.raises(VerifyError, match=message) as caught:
        verify(gm, before)
    return str(caught.value)


def test_a_graph_as_it_was_is_fine(graph):
    verify(graph, Contract.of(graph))


def test_what_lint_refuses(graph):
    before = Contract.of(graph)
    find(graph, "matmul").prepend(find(graph, "exp"))  # reads what comes later
    with pytest.raises(RuntimeError):
        verify(graph, before)


def lie(name, change):
    """Let the metadata of a node say what ``change`` makes of its value."""
    return lambda gm: set_value(find(gm, name), change(value(find(gm, name))))


def a_draw_removed(gm):
    second = find(gm, "dropout_1")
    second.replace_all_uses_with(find(gm, "dropout"))
    gm.graph.erase_node(second)


def a_draw_repeated(gm):
    with gm.graph.inserting_after(find(gm, "dropout")):
        gm.graph.node_copy(find(gm, "dropout"))


def a_draw_added(gm):
    first = find(gm, "dropout")
    with gm.graph.inserting_after(first):
        new = gm.graph.call_function(torch.dropout, (first, 0.5, True))
    new.meta["val"] = value(first)


def a_write_moved_before_a_draw(gm):
    write, second = find(gm, "add_"), find(gm, "dropout_1")
    write.args = (find(gm, "dropout"), 1.0)
    second.prepend(write)


def refused_operands(gm):
    matmul = find(gm, "matmul")
    with gm.graph.inserting_before(matmul):
        low = gm.graph.call_method("bfloat16", (matmul.args[0],))
    low.meta["val"] = value(matmul.args[0]).to(BF16)
    matmul.args = (low, matmul.args[1])


def a_new_node_that_lies(gm):
    exp = find(gm, "exp")
    with gm.graph.inserting_before(gm.graph.output_node()):
        new = gm.graph.call_function(torch.tanh, (exp,))
        back = gm.graph.call_method("float", (new,))
    new.meta["val"], back.meta["val"] = value(exp).to(BF16), value(exp)  # the first is wrong
    gm.graph.output_node().args = ((back, find(gm, "add")),)


# A change of a graph that breaks its contract, and all that the error says.
BREACHES = {
    "an input renamed": (lambda gm: setattr(find(gm, "y"), "name", "z"), ["inputs"]),
    "an input of another dtype": (lie("y", torch.Tensor.int), ["verify: "]),
    "an output dropped": (lambda gm: setattr(gm.graph.output_node(), "args", ((find(gm, "exp"),),)), ["output"]),
    "a parameter copied": (lambda gm: setattr(gm, "weight", nn.Parameter(gm.weight.detach().clone())), ["parameters"]),
    "a parameter frozen": (lambda gm: gm.weight.requires_grad_(False), ["parameters"]),
    "a parameter added": (lambda gm: setattr(gm, "other", nn.Parameter(torch.zeros(1))), ["parameters"]),
    "a random draw removed": (a_draw_removed, ["random draws"]),
    "a random draw repeated": (a_draw_repeated, ["random draws"]),
    "a random draw that no pass identified": (a_draw_added, ["random draws"]),
    "a write moved before a random draw": (a_write_moved_before_a_draw, ["order"]),
    "metadata of a wrong dtype": (
        lie("matmul", torch.Tensor.bfloat16),
        ["its metadata says bf16.* it computes f32", "matmul"],
    ),
    "metadata of a wrong shape": (lie("matmul", lambda t: t[:1]), ["its metadata says"]),
    "metadata that is missing": (
        lambda gm: find(gm, "matmul").meta.pop("val"),
        ["verify: matmul = matmul", "which dropout reads"],
    ),
    "operands that the operation refuses": (
        refused_operands,
        ["cannot run|its metadata says", "matmul", r"bf16\[2,4\], f32\[4,4\]"],
    ),
    "a new node without identity": (a_new_node_that_lies, ["its metadata says"]),
}


@pytest.mark.parametrize("name", BREACHES)
def test_what_breaks_the_contract_is_named(graph, name):
    change, messages = BREACHES[name]
    before = Contract.of(graph)
    change(graph)
    told = broken(graph, before, messages[0])
    assert all(re.search(message, told) for message in messages)


def test_an_output_dtype_changed(graph):
    before = Contract.of(graph)
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        low = graph.graph.call_method("bfloat16", (find(graph, "exp"),))
    low.meta["val"] = value(find(graph, "exp")).to(BF16)
    output.args = ((low, find(graph, "add")),)
    broken(graph, before, "output dtypes")
    verify(graph, before, InsertCasts(options("bf16,keep_outputs=false")))


@pytest.fixture
def sized():
    """A graph of any number of rows, and the node that it returns."""
    gm = make_fx(lambda x: x.relu().exp(), tracing_mode="symbolic")(torch.randn(7, 4))
    return gm, next(n for n in gm.graph.nodes if n.target is torch.ops.aten.exp.default)


def test_a_size_that_the_capture_fixed_later_is_still_what_metadata_say(sized):
    """As Dynamo does for ``x.relu() + torch.ones(7, 1)``."""
    gm, node = sized
    before = Contract.of(gm)
    assert value(node).shape[0] == 7  # adds the guard
    assert type(value(node).shape[0]) is torch.SymInt
    verify(gm, before)


def test_a_number_in_place_of_any_size(sized):
    gm, node = sized
    before = Contract.of(gm)
    with value(node).fake_mode:
        set_value(node, torch.empty(7, value(node).shape[1]))
    broken(gm, before, "its metadata says")


@pytest.mark.parametrize("reader", ["exp", "output"])
def test_a_new_node_without_a_value_is_blamed_and_not_its_reader(graph, reader):
    before = Contract.of(graph)
    end = find(graph, reader)
    (source, *_), kept = end.all_input_nodes, end.args
    with graph.graph.inserting_after(source):
        new = graph.graph.call_function(torch.neg, (source,), name="new")
    end.replace_input_with(source, new)
    message = broken(graph, before, f"(?s)verify: new = neg.*which {reader} reads.*legal: .*fix:   set_value")
    assert "verify: exp" not in message
    end.args = kept
    verify(graph, before)  # nothing reads it


def test_a_node_that_was_captured_without_a_value_is_no_fault_of_a_pass(graph):
    del find(graph, "add").meta["val"]
    verify(graph, Contract.of(graph))


def adds_an_equal_number(gm):
    """``y + 1`` of integers, and ``y + 1.0``: the numbers are equal, the dtypes of the sums are not."""
    add = find(gm, "add")
    add.args = (add.args[0], 1.0)


CHANGES = {
    "metadata of a wrong dtype": lie("matmul", torch.Tensor.bfloat16),
    "what it reads is said to be of another dtype": lie("x", torch.Tensor.bfloat16),
    "it adds an equal number": adds_an_equal_number,
    "it does something else": lambda gm: setattr(find(gm, "exp"), "target", "bfloat16"),
}


@pytest.mark.parametrize("break_it", CHANGES.values(), ids=CHANGES)
def test_what_was_checked_is_checked_again_where_it_changed(graph, break_it):
    checked = {}
    before = verify(graph, Contract.of(graph), checked=checked)
    assert find(graph, "matmul") in checked
    assert verify(graph, before, checked=checked) == before
    break_it(graph)
    with pytest.raises(VerifyError):
        verify(graph, before, checked=checked)


class _SumsInPlace(Pass):
    """Replaces ``add`` with ``add_``, whatever it writes to."""

    name = "sums-in-place"
    writes = Writes.OWN

    def run(self, gm):
        (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.add.Tensor)
        node.target = torch.ops.aten.add_.Tensor
        return PassResult(gm, (Change(self.name, "in place", node.name, "of a test"),))


OWN = {
    "a temporary": lambda x, y: x.sin() + y,
    "a view of a temporary": lambda x, y: x.sin().view(8) + y.view(8),
}
NOT_OWN = {"an input": lambda x, y: x + y, "a view of an input": lambda x, y: x.view(8) + y.view(8)}


@pytest.mark.parametrize("name", [*OWN, *NOT_OWN])
def test_a_pass_may_write_to_memory_of_the_graph_and_not_to_that_of_the_caller(name):
    gm = make_fx((OWN | NOT_OWN)[name], tracing_mode="fake")(X, X)
    with nullcontext() if name in OWN else pytest.raises(VerifyError, match="writes"):
        run_passes(gm, [_SumsInPlace()], checked=True)
