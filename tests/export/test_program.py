"""Exported programs: plain ATen operators, loaded where amp_graph cannot be imported, weights folded on request."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import CaptureError, VerifyError
from amp_graph.export import export
from amp_graph.passes.casts.portable_ops import CAST_OP, float_operands
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.torch_compat.modules import is_exported
from tests.layers import forward_of, layers, words_and_head

from .models import Attention, Branches, Cnn, Mlp, Recurrent, Writes, error, made, run_without_amp_graph

LOW = {"bf16": (torch.bfloat16, 2e-2), "fp16": (torch.float16, 3e-3)}


def dtypes_of(gm):
    return {value(n).dtype for n in gm.graph.nodes if isinstance(value(n), torch.Tensor)}


def assert_portable(gm):
    for node in gm.graph.nodes:
        assert node.op in ("placeholder", "get_attr", "call_function", "output") or node.target == "_guards_fn"
        if node.op == "call_function" and isinstance(value(node), torch.Tensor):
            assert isinstance(node.target, torch._ops.OpOverload) or node.target.__name__ == "getitem", node
            assert len({t.dtype for t in float_operands(node)}) <= 1, node


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", [Mlp, Cnn, Attention])
def test_a_portable_graph_is_close_to_fp32_and_to_the_graph_that_is_not_portable(kind, dtype, monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_VERIFY", "1")
    model, x = made(kind)
    low, bound = LOW[dtype]
    with torch.no_grad():
        exported = torch.export.export(model, (x,)).module()
        gm = amp_graph.rewrite(exported, dtype, portable=True)
        other = amp_graph.rewrite(exported, dtype, portable=False)
        assert_portable(gm)
        assert low in dtypes_of(gm)
        want = model(x)
        assert gm(x).dtype == want.dtype
        assert error(gm(x), want) <= max(bound, 1.1 * error(other(x), want))


def test_the_default_is_portable_for_graphs_of_torch_export_alone_and_others_are_on_request():
    model, x = made(Mlp)
    exported = torch.export.export(model, (x,)).module()
    traced = torch.fx.symbolic_trace(model)
    assert is_exported(exported)
    assert not is_exported(traced)
    assert_portable(amp_graph.rewrite(exported, "bf16"))
    methods = [n.op for n in amp_graph.rewrite(traced, "bf16", (x,)).graph.nodes]
    assert "call_method" in methods
    with torch.no_grad():
        gm = amp_graph.rewrite(torch.fx.symbolic_trace(model), "fp16", (x,), portable=True)
        assert_portable(gm)
        assert error(gm(x), model(x)) <= 3e-3


def test_gradients_are_those_of_fp32_parameters():
    """A shared cast, and a layer norm of low input, would sum gradients in low precision without our functions."""
    model, x = made(Mlp)
    grads = {}
    for portable in (True, False):
        model.zero_grad()
        gm = amp_graph.rewrite(torch.export.export(model, (x,)).module(), "bf16", portable=portable)
        gm(x).square().sum().backward()
        grads[portable] = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        assert grads[True][name].dtype == torch.float32
        assert error(grads[True][name], p.grad) <= 1.1 * error(grads[False][name], p.grad) + 1e-2


def test_several_readers_of_a_cast_have_one_each_so_that_their_gradients_are_summed_in_fp32():
    @layers(lambda: dict(parts=nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))))
    def Readers(self, x):
        h = torch.logsumexp(torch.stack([x, x]), 0)
        return sum(part(h) for part in self.parts)

    torch.manual_seed(0)
    model, x = Readers(), torch.randn(8, 64, requires_grad=True)
    count = {}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            gm = amp_graph.rewrite(torch.fx.symbolic_trace(model), "bf16", (x,), portable=True)
        sources = [n.args[0].name for n in gm.graph.nodes if n.target is CAST_OP and "logsumexp" in n.args[0].name]
        count[grad] = len(sources)
    assert count == {True: 3, False: 1}


@pytest.mark.parametrize("fold", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_program_runs_where_amp_graph_cannot_be_imported(fold, tmp_path):
    programs = {}
    for kind in (Mlp, Cnn):
        model, x = made(kind)
        program = export(model, (x,), policy="fp16", fold_weights=fold)
        torch.export.save(program, tmp_path / f"{kind.__name__}.pt2")
        with torch.no_grad():
            torch.save((x, program.module()(x), model(x)), tmp_path / f"{kind.__name__}.pt")
        programs[kind] = program, model
    if fold:
        for _, model in programs.values():
            assert {t.dtype for t in model.parameters()} == {torch.float32}, "the model is as it was"
        dtypes = {name: t.dtype for name, t in programs[Cnn][0].state_dict.items()}
        assert dtypes["conv.weight"] == torch.float16
        assert dtypes["norm.weight"] == dtypes["norm.running_var"] == torch.float32
    run_without_amp_graph(
        "import torch\n"
        "for name in ('Mlp', 'Cnn'):\n"
        "    x, rewritten, full = torch.load(f'{name}.pt')\n"
        "    got = torch.export.load(f'{name}.pt2').module()(x)\n"
        "    assert torch.equal(got, rewritten), name\n"
        "    assert (got - full).norm() < 3e-3 * full.norm(), name\n",
        tmp_path,
    )


def test_folded_weights_give_the_same_bits_and_half_the_file(tmp_path):
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()
    x = torch.randn(4, 256)
    sizes, found = [], []
    for fold in (False, True):
        program = export(model, (x,), policy="bf16", fold_weights=fold)
        torch.export.save(program, tmp_path / "model.pt2")
        sizes.append((tmp_path / "model.pt2").stat().st_size)
        found.append(program.module()(x))
    assert torch.equal(*found)
    assert sizes[1] < 0.6 * sizes[0]


def test_a_weight_with_two_names_is_folded_if_both_are_only_read_low():
    @layers(lambda wide: dict(**words_and_head(16, 8), wide=wide))
    def Tied(self, x):
        out = self.head(x)
        return out + self.words.weight.exp().sum() if self.wide else F.linear(out, self.words.weight.T)

    for wide, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        model, x = Tied(wide).eval(), torch.randn(2, 8)
        program = export(model, (x,), policy="bf16", fold_weights=True)
        assert {t.dtype for t in program.state_dict.values()} == {dtype}, wide
        assert error(program.module()(x), model(x)) < 2e-2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", [Recurrent, Branches, Writes])
@pytest.mark.filterwarnings("ignore:The tensor attributes self:UserWarning")  # torch.export's, of any LSTM
def test_recurrent_layers_conditions_and_writes_are_exported(kind, dtype, monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_VERIFY", "1")
    model, x = made(kind)
    with torch.no_grad():
        program = export(model, (x,), policy=dtype, fold_weights=True)
        found = [n for g in program.graph_module.modules() if hasattr(g, "graph") for n in g.graph.nodes]
        assert any(isinstance(v := n.meta.get("val"), torch.Tensor) and v.dtype == LOW[dtype][0] for n in found)
        assert error(program.module()(x), model(x)) < LOW[dtype][1]


def test_dynamic_sizes_stay_dynamic():
    model, x = made(Cnn)
    program = export(model, (x,), policy="bf16", dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    y = torch.randn(5, 3, 16, 16)
    assert error(program.module()(y), model(y)) < 2e-2


def test_checks_of_captured_dtypes_do_not_force_casts():
    @layers(lambda: dict(one=nn.Linear(64, 64), two=nn.Linear(64, 64)))
    def Converts(self, x):
        return self.two(self.one(x).to(torch.float32).relu())

    model, x = Converts().eval(), torch.randn(4, 64)
    program = export(model, (x,), policy="bf16")
    asserts = [n for n in program.graph.nodes if "assert_tensor_metadata" in str(n.target)]
    assert asserts == []
    assert error(program.module()(x), model(x)) < 2e-2


def test_a_buffer_that_is_written_stays_written():
    model, x = made(Cnn)
    model.train()
    other = copy.deepcopy(model)
    module = export(model, (x,), policy="bf16").module()
    before = other.norm.running_mean.clone()
    module(x), other(x)
    found = dict(module.named_buffers())
    assert not torch.equal(before, other.norm.running_mean)
    assert error(found["norm.running_mean"], other.norm.running_mean) < 2e-2
    assert found["norm.num_batches_tracked"] == other.norm.num_batches_tracked


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
def test_the_module_can_be_traced_by_torch_jit(tmp_path):
    model, x = made(Cnn)
    with torch.no_grad():
        gm = amp_graph.rewrite(torch.export.export(model, (x,)).module(check_guards=False), "bf16", portable=True)
        torch.jit.trace(gm, (x,)).save(tmp_path / "model.pt")
        torch.save((x, gm(x)), tmp_path / "io.pt")
    code = "import torch\nx, y = torch.load('io.pt')\nassert torch.equal(torch.jit.load('model.pt')(x), y)\n"
    run_without_amp_graph("import warnings\nwarnings.simplefilter('ignore')\n" + code, tmp_path)


# -- errors -------------------------------------------------------------------------------------------------


def test_what_cannot_be_exported_is_one_error():
    @forward_of(nn.Module)
    def Breaks(self, x):
        return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(CaptureError, match=r"(?s)torch\.export cannot capture Breaks.*legal: .*fix: "):
        export(Breaks(), (torch.randn(3),))
    with pytest.raises(CaptureError, match="is not a torch"):
        export(lambda x: x, (torch.randn(3),))
    model = amp_graph.convert(nn.Linear(4, 4), "bf16")
    with pytest.raises(CaptureError, match=r"(?s)converted.*amp_graph\.revert"):
        export(model, (torch.randn(2, 4),))


def test_an_export_that_fails_leaves_no_hook_behind():
    """torch 2.11 and 2.12 leave one, at which Dynamo breaks the graph of each forward that assigns to a buffer."""

    @layers(lambda: dict(seen=nn.Buffer(torch.zeros(3))))
    def Assigns(self, x):
        self.seen = x.detach()
        return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(CaptureError):
        export(Assigns(), (torch.randn(3),))
    kept = nn.modules.module
    assert not kept._global_buffer_registration_hooks
    assert not kept._global_module_registration_hooks


def test_a_graph_with_a_function_of_the_users_is_refused_only_if_portable_is_asked_for():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    module = nn.Module()
    module.norm = nn.LayerNorm(4)
    graph.output(graph.call_function(_shapes_alone, (graph.call_module("norm", (x,)),)))
    gm = torch.fx.GraphModule(module, graph)
    given = (torch.randn(2, 4),)
    amp_graph.rewrite(gm, "bf16", given)
    with pytest.raises(VerifyError, match=r"(?s)portable: .*a Python function.*legal: .*fix: "):
        amp_graph.rewrite(gm, "bf16", given, portable=True)


def _shapes_alone(x):
    return x, {"size": x.shape[0]}
