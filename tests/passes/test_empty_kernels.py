"""Operators over compiled C, of tensors without elements: what torch makes of them, and nothing is left unwritten."""

import pytest
import torch
import torch.nn.functional as F

import amp_graph.passes.pipeline_table  # noqa: F401  which defines all operators
from amp_graph.passes.backends.cpu.attention import attention_kernel
from amp_graph.passes.backends.cpu.linear import panel_gemm
from amp_graph.passes.backends.recurrent import lstm_kernel
from amp_graph.passes.native.jit_compiler import CompilerError
from amp_graph.passes.native.operator_library import FUNCTIONS
from tests.passes.builds import memory_that_is_not_zero  # noqa: F401
from tests.threads import in_threads

BF16 = torch.bfloat16
LAST = torch.channels_last


def op(name):
    return FUNCTIONS[f"amp_graph.{name}.default"]


def drawn(*shape, dtype=BF16):
    return torch.randn(shape).to(dtype)


@pytest.fixture
def dot_products():
    if panel_gemm.library() is None or attention_kernel.library() is None or lstm_kernel.library() is None:
        pytest.skip("needs a C compiler, and a CPU with dot products of bf16")


@pytest.fixture
def compiler():
    try:
        op("batch_norm_relu")(drawn(2, 4, 2, 2), None, None, None, torch.ones(4), torch.ones(4), 0.1, 1e-5, True)
    except CompilerError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("dot_products")
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_keys_that_nothing_asks_for_have_gradients_of_zero(heads, shared, masked):
    query, grad = drawn(2, heads, 0, 16), drawn(2, heads, 0, 16)
    key, value = drawn(2, shared, 33, 16), drawn(2, shared, 33, 16)
    mask = drawn(2, heads, 0, 33) if masked else None
    given = (grad, query, key, value, mask, False, 0.25)
    found = [op("attention_backward")(*given)]
    found += [op("attention_backward_with_mask")(*given)[:3]] if masked else []
    for dq, dk, dv in found:
        assert dq.shape == query.shape
        assert not dk.any()
        assert not dv.any()


@pytest.mark.usefixtures("dot_products")
def test_queries_that_see_no_keys_get_zeros():
    query, none = drawn(2, 4, 17, 16), drawn(2, 4, 0, 16)
    assert not op("attention_forward")(query, none, none, None, False, 0.25).any()
    dq, dk, dv = op("attention_backward")(drawn(2, 4, 17, 16), query, none, none, None, False, 0.25)
    assert not dq.any()
    assert dk.shape == dv.shape == none.shape


@pytest.mark.usefixtures("dot_products")
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_attention_of_no_batches_or_no_heads(shape):
    q, k, v, grad = (drawn(*shape, rows, 16) for rows in (3, 5, 5, 3))
    assert op("attention_forward")(q, k, v, None, False, 0.25).shape == q.shape
    given = (grad, q, k, v, None, False, 0.25)
    assert [t.shape for t in op("attention_backward")(*given)] == [q.shape, k.shape, v.shape]


@pytest.mark.usefixtures("dot_products")
def test_an_lstm_and_a_gru_of_no_batch_have_weights_with_gradients_of_zero():
    x, h, c = drawn(5, 0, 8), drawn(0, 6), drawn(0, 6)
    for gates, name in ((4, "lstm"), (3, "gru")):
        params = drawn(gates * 6, 8), drawn(gates * 6, 6), drawn(gates * 6), drawn(gates * 6)
        if name == "lstm":
            out, last, _, *kept = op("lstm_forward")(x, *params, h, c, False)
            found = op("lstm_backward_of_sums")(drawn(5, 0, 6), h, c, x, *params[:2], h, out, *kept, False)
        else:
            out, last, *kept = op("gru_forward")(x, *params, h, False)
            found = op("gru_backward")(drawn(5, 0, 6), h, x, *params[:2], *kept, False)
        assert out.shape == (5, 0, 6)
        assert last.shape == h.shape
        assert [t.shape for t in found[:5]] == [x.shape, *(p.shape for p in params)]
        assert not any(t.any() for t in found)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 4, 0, 3)])
def test_a_batch_norm_of_nothing_leaves_running_statistics_alone(shape):
    x = drawn(*shape).contiguous(memory_format=LAST)
    mean, var, weight = torch.full((4,), 2.0), torch.full((4,), 3.0), torch.ones(4)
    out, stats = op("batch_norm_relu")(x, None, mean, var, weight, weight, 0.1, 1e-5, True)
    both = op("batch_norm_relu")(x, x, mean, var, weight, weight, 0.1, 1e-5, True)
    assert out.shape == both[0].shape == x.shape
    assert (mean == 2).all()
    assert (var == 3).all()
    dweight, dbias, dx = op("batch_norm_relu_backward")(x, x, None, weight, weight, stats, True, True)
    assert not dweight.any()
    assert not dbias.any()
    assert dx.shape == x.shape


@pytest.mark.usefixtures("dot_products")
def test_a_product_over_nothing_is_its_bias_in_a_thread_that_has_no_memory_yet():
    a, b, bias, found = drawn(3, 0), drawn(0, 5), drawn(5), []
    weight = panel_gemm.panels_of(b.t())

    def multiply():
        found.append(panel_gemm.product(a, b, bias))
        found.append(op("linear_by_panels")(a, weight, bias, False, 5))

    in_threads(multiply)
    assert all(torch.equal(one, F.linear(a, b.t(), bias)) for one in found)
    assert len(found) == 2
    assert panel_gemm.dense_of(weight, 5, 0).shape == (5, 0)
