"""What overflows or comes near an end is found, and masks are not; small float16 values and gradients are counted."""

import pytest
import torch

from amp_graph.audit.session import Audit


def found(operation, *given):
    """Return the findings in a call, by codes."""
    with Audit(looks=(1,)) as audit:
        operation(*given)
    assert not audit.training.unseen
    return {f.code: f for f in audit.report().findings}


def half(*values):
    return torch.tensor(values, dtype=torch.float16)


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        (lambda x: x * 300, "AMP501"),
        (lambda x: -x * 300, "AMP501"),
        (lambda x: (300 * x.float()).half(), "AMP501"),
        (lambda x: (x * 10).matmul(x * 10), "AMP501"),
        (lambda x: x * 40, "AMP502"),
        (lambda x: x * -40, "AMP502"),
        (lambda x: x.mul_(40), "AMP502"),
        (lambda x: x.mul_(300), "AMP501"),
        (lambda x: torch.empty(2, dtype=x.dtype).copy_(x.float() * 300), "AMP501"),
        (lambda x: (x.float() * 40).half(), "AMP502"),
        (lambda x: (x.float() * -40).half(), "AMP502"),
        (lambda x: x.clamp_min(9000.0), None),
        (lambda x: x * 30, None),
        (lambda x: x / 0 * 1, "AMP501"),
    ],
)
def test_ends_of_a_range(operation, code):
    codes = {c for c in found(operation, half(100.0, 250.0)) if c.startswith("AMP5")}
    assert codes == ({code} if code else set())


@pytest.mark.parametrize(
    "mask",
    [
        lambda x, m: x.masked_fill(m, float("-inf")),
        lambda x, m: x.masked_fill(m, torch.finfo(x.dtype).min),
        lambda x, m: x + torch.where(m, torch.finfo(x.dtype).min, 0.0).to(x.dtype),
        lambda x, m: x - 40 + torch.where(m, torch.finfo(x.dtype).min, 0.0).to(x.dtype),  # beyond the end in float16
        lambda x, m: x + torch.zeros_like(x).masked_fill_(m, float("-inf")),
        lambda x, m: x + (m.to(x.dtype) * -10_000.0),
        lambda x, m: x + torch.full_like(x, float("-inf")).triu(1),
        lambda x, m: x + torch.zeros(x.shape).masked_fill(m, torch.finfo(torch.float32).min).to(x.dtype),
        lambda x, m: torch.where(m, x, -65_504.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masks_are_no_overflow(mask, dtype):
    x = torch.randn(6, 6).to(dtype)
    codes = found(lambda x: mask(x, torch.ones(6, 6, dtype=torch.bool).triu(1)).softmax(-1), x)
    assert not {c for c in codes if c.startswith("AMP5")}


def test_only_the_first_operation_of_a_chain_is_near_an_end():
    def chain(x):
        large = x * 60
        return large * 1.5 + torch.stack((large, large)).amax(0)

    finding = found(chain, half(100.0, 150.0))["AMP502"]
    assert finding.evidence["largest"] == 9000.0
    assert not finding.also


def test_memory_without_values_is_not_looked_at():
    def fill():
        for _ in range(4):
            torch.empty(1000, dtype=torch.float16).copy_(torch.ones(1000))
            torch.full((1000,), 3e4, dtype=torch.float16)

    assert found(fill) == {}


def test_the_share_of_small_values_is_that_of_what_a_cast_loses():
    x = 10 ** torch.linspace(-10.0, 0.0, 5001)
    wanted = float((x < 2**-14).float().mean())
    assert found(torch.Tensor.half, x)["AMP503"].evidence["share"] == pytest.approx(wanted, abs=0.01)
    assert "AMP503" not in found(torch.Tensor.half, torch.where(x < 2**-14, 0.0, x))
    assert found(torch.Tensor.bfloat16, x) == {}


def test_small_gradients_are_found_at_the_line_of_their_operation():
    weight = torch.randn(30, 30, dtype=torch.float16, requires_grad=True)

    def step(scale):
        out = torch.randn(20, 30).half() @ weight
        (out.float().square().mean() * scale).backward()

    finding = found(step, 1e-3)["AMP504"]
    assert finding.place.file.endswith("test_ranges.py")
    assert finding.evidence["share"] > 0.9
    assert "AMP504" not in found(step, 1e3)
