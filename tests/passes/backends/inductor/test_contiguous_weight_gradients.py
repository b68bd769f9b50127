"""Gradients of convolutions' weights, laid as their parameters lie for a compiler's update: not a bit changes."""

import pytest
import torch

from amp_graph.passes.backends.inductor.contiguous_weight_gradients import MakeWeightGradientsContiguous
from amp_graph.passes.manager import run_passes
from amp_graph.passes.native.operator_library import OPS
from amp_graph.passes.torch_compat.fake import make_fx

BF16 = torch.bfloat16
ATEN = torch.ops.aten


def drawn(*shape, across=False, seed=0):
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return found.to(memory_format=torch.channels_last) if across else found


def update(grad, x, weight, master, moment):
    """A step's end: the gradient of a weight that is held in bf16, unscaled and met with what is held in fp32."""
    found = ATEN.convolution_backward.default(
        grad, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    moved = torch.lerp(moment, found[1].float() * 0.5, 0.1)
    return found[0], moved, master - 0.01 * moved


def given(across=True, filters=3, rows=True):
    grad, x = (drawn(2, c, 12, 12, across=across, seed=c).to(BF16) for c in (8, 6))
    weight = drawn(8, 6, filters, filters, across=across, seed=3).to(BF16)
    return grad, x, weight, *(drawn(8, 6, filters, filters, across=not rows, seed=s) for s in (4, 5))


def passed(tensors):
    plain, ours = (make_fx(update, tracing_mode="fake")(*tensors) for _ in range(2))
    (done,) = run_passes(ours, [MakeWeightGradientsContiguous()], checked=True)
    return plain, ours, len(done.result.changes)


def test_a_gradient_that_lies_across_is_copied_once():
    tensors = given()
    plain, ours, count = passed(tensors)
    assert count == 1
    (copy,) = ours.graph.find_nodes(op="call_function", target=OPS.in_rows.default)
    assert copy.meta["val"].is_contiguous()
    for one, other in zip(ours(*tensors), plain(*tensors), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{"across": False}, {"rows": False}])
def test_what_lies_alike_is_left(options):
    assert passed(given(**options))[2] == 0


def test_a_second_run_changes_nothing():
    _, ours, _ = passed(given())
    (again,) = run_passes(ours, [MakeWeightGradientsContiguous()], checked=True)
    assert not again.result.changes


def test_the_copy_has_the_values_in_rows():
    x = drawn(4, 6, 3, 3, across=True)
    found = OPS.in_rows.default(x)
    assert found.is_contiguous()
    assert torch.equal(found, x)
    torch.library.opcheck(OPS.in_rows.default, (x,), test_utils=("test_schema", "test_faketensor"))
