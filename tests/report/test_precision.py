"""Planned precision that does not survive lowering: the report names the product, and where it ran."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.casts.product_precision import lost_in
from tests.layers import layers


@layers(lambda: dict(first=nn.Linear(16, 16), last=nn.Linear(16, 4)))
def Net(self, x):
    return self.last(F.gelu(self.first(x)))


def notes_of(model):
    return [note for note in amp_graph.report(model).notes if note.startswith("precision")]


def rewritten():
    torch.manual_seed(0)
    args = [torch.randn(8, 16), *(p.detach().requires_grad_() for p in Net().parameters())]

    def forward(x, a, b, c, d):
        return (F.linear(F.gelu(F.linear(x, a, b)), c, d),)

    return amp_graph.rewrite(torch.fx.symbolic_trace(forward), "bf16,skip=lower-linears", args)


def test_a_cast_that_is_missing_is_named():
    gm = rewritten()
    assert list(lost_in(gm)) == []
    (node,) = (n for n in gm.graph.nodes if n.name == "linear")
    node.args = tuple(a.all_input_nodes[0] for a in node.args)  # without the casts
    assert [str(lost) for lost in lost_in(gm)] == ["linear: linear ran in f32, planned bf16"]


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
