"""Weights that are turned before a low-precision kernel reads them, and views whose whole storage is indexed."""

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.passes.precision import plan_precision
from tests.by_hand import step_of
from tests.layers import layers
from tests.passes.drawn import drawn
from tests.passes.graphs import Function

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
FORMS = {
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "t": lambda w: w.t(),
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "view": lambda w: w.view(2, 3, 8).flatten(0, 1).swapaxes(0, 1),
}


@layers(lambda form, after=None: dict(weight=nn.Parameter(torch.randn(6, 8)), form=form, after=after), seed=0)
def Turned(self, x):
    """A product with a weight as ``form`` has it; ``after`` is called with weight and view before the product."""
    turned = self.form(self.weight)
    more = self.after(self.weight, turned) if self.after else 0.0
    return x @ turned + more


def trained(model, policy="bf16"):
    """Output and gradients of a converted model, and what its casts are of."""
    x = X.clone().requires_grad_()
    return (*step_of(amp_graph.convert(model, policy, strict=True), x), x.grad), casts_of(model)


def frozen(form, policy):
    """What the casts of a frozen model are of."""
    model = amp_graph.freeze(amp_graph.convert(Turned(form), policy, strict=True))
    with torch.no_grad():
        model(X)
    return casts_of(model)


def casts_of(model):
    return {(cast.of, cast.kept) for cast in amp_graph.report(model).graphs[0].casts}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast", "fp16"])
def test_a_turned_weight_has_the_bits_of_a_weight_that_is_turned_before_its_cast(form, policy, monkeypatch):
    """The weight itself is cast, at each call where it trains, and once where it is frozen."""
    found, casts = trained(Turned(form), policy)
    assert ("weight", False) in casts
    assert ("weight", True) in frozen(form, policy)
    monkeypatch.setattr(plan_precision, "views_of_weights", lambda gm, classes: frozenset())
    wanted, before = trained(Turned(form), policy)
    assert all(map(torch.equal, found, wanted))
    assert ("weight", False) not in before, "control"
    assert ("weight", True) not in frozen(form, policy), "control"


def test_it_is_autocasts_result():
    found, _ = trained(Turned(FORMS["T"]))
    x = X.clone().requires_grad_()
    out, of_weight = step_of(Turned(FORMS["T"]), x, context=torch.autocast("cpu", torch.bfloat16))
    assert all(map(torch.equal, found, (out.float(), of_weight, x.grad)))


def written(weight, turned):
    with torch.no_grad():
        weight.add_(1.0)
    return 0.0


LEFT_ALONE = {
    "written between view and product": (FORMS["t"], written),
    "read in full precision too": (FORMS["t"], lambda weight, turned: turned.exp().sum()),
    "a part of the weight": (lambda w: w[:3].t(), None),
}


@pytest.mark.parametrize(("form", "after"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_is_left_alone(form, after):
    model = Turned(form, after)
    model.weight.requires_grad_(after is not written)
    amp_graph.convert(model, "bf16", strict=True)
    plain = Turned(form, after)
    plain.weight.requires_grad_(after is not written)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            wanted = plain(X)
        assert torch.equal(model(X), wanted.float())
    assert not any(cast.of == "weight" for cast in amp_graph.report(model).graphs[0].casts)


# -- views that as_strided reads ---------------------------------------------------------------------------------


ROWS, W = drawn(6, 8, seed=1), drawn(8, 8, seed=2) / 3

READERS = {
    "a slice": lambda s, x: (x @ s.w)[2:4].as_strided((2, 3), (3, 1), 5),
    "a slice of a part": lambda s, x: (x @ s.w).chunk(2, 1)[1].narrow(0, 1, 3).as_strided((2, 3), (8, 2), 4),
    "a turned slice": lambda s, x: (x @ s.w)[1:, 2:].t().as_strided((4,), (9,), 1),
    "windows": lambda s, x: (x @ s.w).view(-1).as_strided((5, 16), (8, 1)),
}


def results(function):
    """Output and gradients: exact, and of a converted model."""
    exact = step_of(Function(function, w=W).double(), ROWS.double(), loss=lambda out: out.square().sum())
    return exact, step_of(amp_graph.convert(Function(function, w=W), "bf16"), ROWS)


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
