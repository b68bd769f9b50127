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


BREACHES = []


def breach(*messages):
    """Collect a change of a graph that breaks its contract, with all that the error says."""

    def collect(change):
        BREACHES.append(pytest.param(change, messages, id=change.__name__))
        return change

    return collect


@breach("inputs")
def an_input_renamed(gm):
    find(gm, "y").name = "z"


@breach("verify: ")
def an_input_dtype_changed(gm):
    set_value(find(gm, "y"), value(find(gm, "y")).int())


@breach("output")
def an_output_dropped(gm):
    gm.graph.output_node().args = ((find(gm, "exp"),),)


@breach("parameters")
def a_parameter_copied(gm):
    gm.weight = nn.Parameter(gm.weight.detach().clone())


@breach("parameters")
def a_parameter_frozen(gm):
    gm.weight.requires_grad_(False)


@breach("parameters")
def a_parameter_added(gm):
    gm.other = nn.Parameter(torch.zeros(1))


@breach("random draws")
def a_random_draw_removed(gm):
    second = find(gm, "dropout_1")
    second.replace_all_uses_with(find(gm, "dropout"))
    gm.graph.erase_node(second)


@breach("random draws")
def a_random_draw_repeated(gm):
    first = find(gm, "dropout")
    with gm.graph.inserting_after(first):
        gm.graph.node_copy(first)


@breach("random draws")
def a_random_draw_added_that_no_pass_identified(gm):
    first = find(gm, "dropout")
    with gm.graph.inserting_after(first):
        new = gm.graph.call_function(torch.dropout, (first, 0.5, True))
    new.meta["val"] = value(first)


@breach("order")
def a_write_moved_before_a_random_draw(gm):
    write, second = find(gm, "add_"), find(gm, "dropout_1")
    write.args = (find(gm, "dropout"), 1.0)
    second.prepend(write)


@breach("its metadata says bf16.* it computes f32", "matmul")
def metadata_with_a_wrong_dtype(gm):
    set_value(find(gm, "matmul"), value(find(gm, "matmul")).to(BF16))


@breach("its metadata says")
def metadata_with_a_wrong_shape(gm):
    set_value(find(gm, "matmul"), value(find(gm, "matmul"))[:1])


@breach("verify: matmul = matmul", "which dropout reads")
def metadata_that_is_missing(gm):
    del find(gm, "matmul").meta["val"]


@breach("cannot run|its metadata says", "matmul", r"bf16\[2,4\], f32\[4,4\]")
def operands_of_dtypes_that_the_operation_refuses(gm):
    matmul = find(gm, "matmul")
    with gm.graph.inserting_before(matmul):
        low = gm.graph.call_method("bfloat16", (matmul.args[0],))
    low.meta["val"] = value(matmul.args[0]).to(BF16)
    matmul.args = (low, matmul.args[1])


@breach("its metadata says")
def a_new_node_without_identity(gm):
    exp = find(gm, "exp")
    with gm.graph.inserting_before(gm.graph.output_node()):
        new = gm.graph.call_function(torch.tanh, (exp,))
    new.meta["val"] = value(exp).to(BF16)  # a lie
    with gm.graph.inserting_after(new):
        back = gm.graph.call_method("float", (new,))
    back.meta["val"] = value(exp)
    gm.graph.output_node().args = ((back, find(gm, "add")),)


@pytest.mark.parametrize(("change", "messages"), BREACHES)
def test_what_breaks_the_contract_is_named(graph, change, messages):
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


def reads_a_lie(gm):
    """What a node reads is said to be of another dtype; the node itself is as it was."""
    set_value(find(gm, "x"), value(find(gm, "x")).to(BF16))


def adds_an_equal_number(gm):
    """``y + 1`` of integers, and ``y + 1.0``: the numbers are equal, the dtypes of the sums are not."""
    add = find(gm, "add")
    add.args = (add.args[0], 1.0)


def does_something_else(gm):
    find(gm, "exp").target = "bfloat16"


@pytest.mark.parametrize(
    "break_it", [metadata_with_a_wrong_dtype, reads_a_lie, adds_an_equal_number, does_something_else]
)
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
