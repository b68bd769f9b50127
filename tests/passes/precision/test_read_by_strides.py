"""Views whose whole storage ``as_strided`` indexes."""

import pytest
import torch

import amp_graph
from amp_graph.passes.precision import plan_precision
from tests.passes.graphs import Function


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ROWS, W = drawn(6, 8, seed=1), drawn(8, 8, seed=2) / 3

READERS = {
    "a slice": lambda s, x: (x @ s.w)[2:4].as_strided((2, 3), (3, 1), 5),
    "a slice of a part": lambda s, x: (x @ s.w).chunk(2, 1)[1].narrow(0, 1, 3).as_strided((2, 3), (8, 2), 4),
    "a turned slice": lambda s, x: (x @ s.w)[1:, 2:].t().as_strided((4,), (9,), 1),
    "windows": lambda s, x: (x @ s.w).view(-1).as_strided((5, 16), (8, 1)),
}


def results(function):
    """Output and gradients: exact, and of a converted model."""
    model = amp_graph.convert(Function(function, w=W), "bf16")
    made = []
    for run, dtype in ((Function(function, w=W).double(), torch.float64), (model, torch.float32)):
        out = run(ROWS.to(dtype))
        out.square().sum().backward()
        made.append([out.detach(), run.w.grad.clone()])
    return made


@pytest.mark.parametrize("name", READERS)
def test_the_same_elements_are_read(name):
    for right, ours in zip(*results(READERS[name]), strict=True):
        assert (ours - right).norm() <= 0.01 * right.norm()


@pytest.mark.parametrize("name", ["a slice", "a slice of a part", "a turned slice"])
def test_control_the_view_alone_is_cast(name, monkeypatch):
    monkeypatch.setattr(plan_precision, "read_by_strides", lambda classes: frozenset())
    try:
        right, ours = results(READERS[name])
    except RuntimeError:  # beyond the memory of the copy
        return
    assert (ours[0] - right[0]).norm() > 0.1 * right[0].norm()


def test_the_report_says_why():
    model = amp_graph.convert(Function(READERS["a slice"], w=W), "bf16")
    model(ROWS)
    assert "indexes the whole storage" in amp_graph.report(model).text()
