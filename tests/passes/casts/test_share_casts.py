"""ShareCasts and Fp32NormGradients: their laws, by the grade that each states."""

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.passes.casts.low_layer_norm import Fp32NormGradients, layer_norm_low
from amp_graph.passes.casts.share_casts import ShareCasts, shared_cast
from amp_graph.passes.graph.graph_text import graph_text
from amp_graph.passes.graph.meta_keys import CAST
from amp_graph.passes.manager import run_passes
from tests.layers import layers
from tests.passes.graphs import (
    BF16,
    FP32,
    Function,
    capture,
    capture_function,
    options,
    passes_before,
    rewritten,
    run_step,
)
from tests.relative_error import error

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) / 3
V = torch.randn(8, 8, generator=torch.Generator().manual_seed(3)) / 3
U = torch.randn(8, 8, generator=torch.Generator().manual_seed(4)) / 3


def two(s, x):
    h = torch.exp(x * s.w[0])
    return h @ s.v, h @ s.u


def three(s, x):
    h = torch.exp(x * s.w[0])
    return h @ s.v, h @ s.u, h @ s.w


def low_and_full(s, x):
    h = torch.exp(x * s.w[0])
    return h @ s.v, h.log1p()


def squared(s, x):
    h = torch.exp(x[:8] * s.w[0])
    return h @ h


def graphs(function):
    """Return (plain casts, one cast a reader, shared casts) and the inputs to run them on."""
    captured = capture_function(function, X, w=W, v=V, u=U)
    made = [captured.through(passes_before(ShareCasts))[0] for _ in range(3)]
    _one_cast_a_reader(made[1])
    (done,) = run_passes(made[2], [ShareCasts(options())], checked=True)
    return made, done, captured.given


def _one_cast_a_reader(gm):
    for node in list(gm.graph.nodes):
        if CAST not in node.meta:
            continue
        for reader in list(node.users):
            seen = []
            torch.fx.node.map_arg((reader.args, reader.kwargs), seen.append)
            if seen.count(node) + len(node.users) > 2:
                reader.args = torch.fx.node.map_arg(
                    reader.args, lambda n, node=node: _twin(gm, node) if n is node else n
                )
    gm.graph.lint()
    gm.recompile()


def _twin(gm, node):
    with gm.graph.inserting_after(node):
        return gm.graph.node_copy(node)


def behind_a_view(s, x):
    h = torch.exp(x * s.w[0]).view(2, 8, 8)
    return h @ s.v, h @ s.u


def read_before_the_cast(s, x):
    """A conversion that does nothing is left out, and the cast of its result comes to be one of h, behind log1p."""
    h = torch.exp(x * s.w[0])
    full = h.log1p()
    same = h.to(s.v.dtype)
    return same @ s.v, full, same @ s.u


@pytest.mark.parametrize("reads_again", [False, True])
def test_a_full_reader_before_the_cast_stays_where_it_is(reads_again):
    def function(s, x):
        low, full, also = read_before_the_cast(s, x)
        return (low, full, also) if reads_again else (low, full)

    (plain, _, ours), _, given = graphs(function)
    order = {n: i for i, n in enumerate(ours.graph.nodes)}
    log = next(n for n in ours.graph.nodes if n.target in ("log1p", torch.log1p))
    cast = next(n for n in plain.graph.nodes if CAST in n.meta and n.args[0].target is torch.exp)
    assert cast.args[0] in {n for n in plain.graph.nodes if any(u.target == "log1p" for u in n.users)}  # the premise
    assert all(order[source] < order[log] for source in log.all_input_nodes)
    a, b = run_step(ours, given), run_step(plain, given)
    assert all(torch.equal(x, y) for x, y in zip(a.outputs, b.outputs, strict=True))
    assert all((x - y).norm() <= 0.01 * y.norm() for x, y in zip(a.grads, b.grads, strict=True) if y is not None)


@pytest.mark.parametrize("function", [two, squared, low_and_full, three])
def test_readers_add_as_one_cast_a_reader_does_bit_for_bit_but_for_the_order_of_a_third(function):
    (plain, apart, shared), done, given = graphs(function)
    assert done.result.modified
    a, b, c = (run_step(gm, given) for gm in (plain, apart, shared))
    for x, y, z in zip(a.outputs, b.outputs, c.outputs, strict=True):
        assert torch.equal(x, z)
        assert torch.equal(y, z)
    for g, h in zip(b.grads, c.grads, strict=True):
        assert torch.equal(g, h) or (function is three and (g - h).norm() <= 2**-22 * h.norm())


def test_readers_behind_a_view_add_in_fp32_too():
    """As torch.autocast has it, which casts behind the view, once for each reader."""
    function = Function(behind_a_view, w=W, v=V, u=U)
    graph = capture(function, X)
    gm, _ = graph.through([*passes_before(ShareCasts), ShareCasts(options())])
    cotangents = [torch.randn(o.shape, generator=torch.Generator().manual_seed(5)) for o in function(X)]
    with torch.autocast("cpu", BF16):
        low = function(X)
    (want,) = torch.autograd.grad([o.float() for o in low], function.w, cotangents)
    ours = gm(*graph.given)
    index = next(i for i, g in enumerate(graph.given) if g.shape == W.shape and torch.equal(g, W))
    (got,) = torch.autograd.grad(ours, graph.given[index], cotangents)
    assert (got - want).norm() <= 2**-14 * want.norm(), error(got, want.double())


def test_negative_control_a_plain_shared_cast_adds_in_low_precision():
    (plain, apart, _), _, given = graphs(three)
    a, b = run_step(plain, given), run_step(apart, given)
    assert any((g - h).norm() > 2**-12 * h.norm() for g, h in zip(a.grads, b.grads, strict=True))


def test_nothing_is_shared_where_nothing_trains_or_one_reads():
    for function in (lambda s, x: torch.exp(x) @ s.w, lambda s, x: (torch.exp(x) @ s.w, torch.exp(x) @ s.v)):
        _, done, _ = graphs(function)
        assert not done.result.modified


def test_inputs_and_weights_keep_their_plain_casts():
    (_, _, shared), _, _ = graphs(lambda s, x: (x @ s.w) + (x @ s.w))
    assert not any(n.target is shared_cast for n in shared.graph.nodes)


def test_readers_without_a_gradient_are_skipped_in_backward():
    h = X.clone().requires_grad_()
    full, a, b = shared_cast(h, BF16, 2, True)
    (grad,) = torch.autograd.grad(b.float().sum(), h)
    assert grad.dtype == FP32
    assert torch.equal(grad, torch.ones_like(h))
    full, a, b = shared_cast(h, BF16, 2, True)
    given = torch.ones_like(h)
    (grad,) = torch.autograd.grad((full, a, b), h, (given, given.bfloat16(), given.bfloat16()))
    assert torch.equal(grad, torch.full_like(h, 3.0))
    assert torch.equal(given, torch.ones_like(h)), "a gradient that others may hold is not written"


def norm_step(norm, x, weight, bias, grad):
    x, weight, bias = (t.detach().clone().requires_grad_() for t in (x, weight, bias))
    out = norm(x, (x.shape[-1],), weight, bias, 1e-5)
    return out.detach(), torch.autograd.grad(out, (x, weight, bias), grad)


@pytest.mark.parametrize("rows", [2048, 16384])
def test_a_protected_norm_has_exact_parameter_gradients(rows):
    width = 64
    x, grad = torch.randn(rows, width).bfloat16(), torch.randn(rows, width).bfloat16()
    weight, bias = torch.randn(width) + 1, torch.randn(width)
    out, (dx, dweight, dbias) = norm_step(layer_norm_low, x, weight, bias, grad)
    plain, (px, pweight, pbias) = norm_step(F.layer_norm, x, weight, bias, grad)
    exact, (_, eweight, ebias) = norm_step(F.layer_norm, *(t.double() for t in (x, weight, bias, grad)))
    assert torch.equal(out, plain)
    assert torch.equal(dx, px)
    assert error(out, exact) < 2**-8
    assert error(dweight, eweight) <= 1e-5
    assert error(dbias, ebias) <= 1e-5
    assert max(error(pweight, eweight), error(pbias, ebias)) > 1e-2, "the control: what is protected from"


@pytest.mark.parametrize("layer_norm", [torch.layer_norm, torch.ops.aten.layer_norm.default])
def test_a_norm_called_with_all_its_arguments_runs(layer_norm):
    """torch.layer_norm and aten.layer_norm have a sixth argument, which torch.export's graphs give."""

    def function(s, x):
        return layer_norm(torch.tanh(x @ s.w), (8,), s.u[0], s.u[1], 1e-5, False)

    captured = capture_function(function, X, w=W, u=U)
    gm, _ = captured.through([*passes_before(Fp32NormGradients), Fp32NormGradients()])
    assert run_step(gm, captured.given).outputs[0].shape == X.shape


def test_rewriting_a_graph_with_shared_casts_again_changes_nothing():
    gm = rewritten(capture_function(low_and_full, X, w=W, v=V))
    assert any(n.target is shared_cast for n in gm.graph.nodes)
    assert graph_text(amp_graph.rewrite(gm, "bf16")) == graph_text(gm)


def test_a_symbolic_trace_knows_what_trains():
    """Its values are recorded on fake tensors; without their requires_grad nothing would be shared or protected."""

    @layers(lambda: dict(w=torch.nn.Parameter(W), v=torch.nn.Parameter(V)))
    def Model(self, x):
        return low_and_full(self, x)

    gm = amp_graph.rewrite(torch.fx.symbolic_trace(Model()), "bf16", (X,))
    assert any(n.target is shared_cast for n in gm.graph.nodes)
