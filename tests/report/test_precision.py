"""Planned precision that does not survive lowering: the report names the product, and where it ran."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.capture import captured_graphs
from amp_graph.passes.casts.product_precision import lost_in
from amp_graph.replay.trace_flat import trace_flat
from tests.replay import stand_in


class Net(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.first, self.last, self.again = nn.Linear(16, 16), nn.Linear(16, 4), again

    def forward(self, x):
        return self.last(F.gelu(checkpoint(self.first, x, use_reentrant=False) if self.again else self.first(x)))


def lose(gm, name="linear"):
    """Break a lowering: a linear, and with it its backward, computes in fp32 what it was given in bf16."""
    for part in gm.modules():
        for node in list(part.graph.nodes) if isinstance(part, torch.fx.GraphModule) else ():
            if node.name == name and node.op == "call_function":
                with part.graph.inserting_before(node):
                    node.args = tuple(part.graph.call_method("float", (a,)) for a in node.args)
                with part.graph.inserting_after(node):
                    back = part.graph.call_method("to", (node, torch.bfloat16))
                node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
                part.recompile()


def notes_of(model):
    return [note for note in amp_graph.report(model).notes if note.startswith("precision")]


def traced(*, broken):
    torch.manual_seed(0)
    args = [torch.randn(8, 16), *(p.detach().requires_grad_() for p in Net().parameters())]

    def forward(x, a, b, c, d):
        return (F.linear(F.gelu(F.linear(x, a, b)), c, d),)

    gm = amp_graph.rewrite(torch.fx.symbolic_trace(forward), "bf16,skip=lower-linears", args)
    if broken:
        lose(gm)
    return gm, trace_flat(gm, args)


def test_a_product_that_is_traced_in_another_precision_is_named_in_forward_and_backward():
    assert traced(broken=False)[1].lost == ()
    found = [str(lost) for lost in traced(broken=True)[1].lost]
    assert found == [
        "linear: addmm ran in f32, planned bf16",
        "linear: mm in backward ran in f32, planned bf16",
    ]


def test_a_cast_that_is_missing_is_named():
    gm, _ = traced(broken=False)
    assert list(lost_in(gm)) == []
    (node,) = (n for n in gm.graph.nodes if n.name == "linear")
    node.args = tuple(a.all_input_nodes[0] for a in node.args)  # without the casts
    assert [str(lost) for lost in lost_in(gm)] == ["linear: linear ran in f32, planned bf16"]


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_report_of_a_recorded_model_names_what_was_lost(again, monkeypatch):
    stand_in.install(monkeypatch)
    plain = captured_graphs.lower

    def lower(gm, *args, **options):
        run = plain(gm, *args, **options)
        lose(gm)
        return run

    for is_broken in (False, True):
        if is_broken:
            monkeypatch.setattr(captured_graphs, "lower", lower)
        torch._dynamo.reset()
        model = amp_graph.convert(Net(again), "bf16,replay=true,skip=lower-linears")
        for _ in range(5):
            model(torch.randn(8, 16)).sum().backward()
        found = "\n".join(notes_of(model))
        assert ("precision: graph 0: linear: addmm ran in f32, planned bf16" in found) == is_broken, found
        assert ("linear: mm in backward ran in f32" in found) == is_broken


def _rounds_less(graph):
    """Inductor's graph with its bf16 products in fp32."""
    convert, addmm = torch.ops.prims.convert_element_type.default, torch.ops.aten.addmm.default
    for node in graph.find_nodes(op="call_function", target=addmm):
        with graph.inserting_before(node):
            wide = [graph.call_function(convert, (a, torch.float32)) for a in node.args]
            for new, a in zip(wide, node.args, strict=True):
                new.meta["val"] = a.meta["val"].float()
            product = graph.call_function(addmm, tuple(wide))
            product.meta = {**node.meta, "val": node.meta["val"].float()}
            back = graph.call_function(convert, (product, torch.bfloat16))
            back.meta = dict(node.meta)
        node.replace_all_uses_with(back)
        graph.erase_node(node)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("broken", [False, True])
def test_what_inductor_lowers_to_another_precision_is_named(broken):
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(joint_custom_pre_pass=_rounds_less if broken else None, fx_graph_cache=False):
        model = amp_graph.convert(Net(), "bf16", compile="inductor")
        model(torch.randn(128, 16)).sum().backward()
    found = "\n".join(notes_of(model))
    assert ("graph 0: linear: addmm ran in f32, planned bf16" in found) == broken, found
