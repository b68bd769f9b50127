"""Pieces of a broken model: what leaves one, leaves it in the dtype that autocast gave it at capture."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import amp_graph
from amp_graph.errors import AmpGraphWarning
from amp_graph.passes.autocast_regions.autocast_subgraphs import adopt_piece
from amp_graph.passes.graph.fake_values import value
from amp_graph.policy import Policy
from amp_graph.rewrite import rewrite_in_place

BF16 = torch.bfloat16
X, W, V = (torch.randn(8, 8, generator=torch.Generator().manual_seed(s)) for s in range(3))


def attention(x, w):
    q = k = v = x[None] @ w
    return (q @ k.transpose(-1, -2) / 3).softmax(-1) @ v


# Their results are those of other nodes once passes have run: of the argument, of a fused call, of an expanded one.
REPLACED = {
    "dropout": lambda x, w: F.dropout(x, 0.5, False),
    "two dropouts": lambda x, w: (F.dropout(x, 0.5, False), F.dropout(F.dropout(x, 0.0), 0.0)),
    "dropout of a product": lambda x, w: F.dropout(F.linear(x, w), 0.5, False),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "product": lambda x, w: x @ w.t(),
    "gelu": lambda x, w: (h := F.linear(x, w)) * 0.5 * (1.0 + torch.erf(h / 2**0.5)),
    "attention": attention,
}


def piece(function, *args):
    found = []

    def take(gm, inputs):
        found.append(gm)
        return gm

    torch._dynamo.reset()
    with torch.no_grad(), torch.autocast("cpu", BF16):
        torch.compile(function, backend=take)(*args)
    (gm,) = found
    return gm


def leaving(gm):
    return [value(n).dtype for n in gm.graph.output_node().all_input_nodes]


@pytest.mark.parametrize("function", REPLACED.values(), ids=REPLACED)
def test_what_leaves_a_piece_has_the_dtype_it_was_captured_with(function):
    given = X.to(BF16), W
    with torch.no_grad(), torch.autocast("cpu", BF16):
        want = function(*given)
    gm = piece(function, *given)
    assert not adopt_piece(gm, BF16)
    rewrite_in_place(gm, Policy.parse("bf16"))
    want = want if isinstance(want, tuple) else (want,)
    assert set(leaving(gm)) == {t.dtype for t in want}


class BrokenTwice(nn.Module):
    """Between two breaks, a call that returns its argument; behind them, that is written."""

    def __init__(self, same):
        super().__init__()
        self.same = same

    def forward(self, x, w, v):
        h = F.linear(x, w)
        torch._dynamo.graph_break()
        seen = self.same(h)
        torch._dynamo.graph_break()
        seen.mul_(2)
        return F.linear(h, v)


@pytest.mark.filterwarnings("ignore:.*graph")
@pytest.mark.parametrize("same", [lambda h: F.dropout(h, 0.5, False), lambda h: F.dropout(h, 0.0), lambda h: h[:4]])
def test_a_piece_returns_the_memory_that_it_was_given(same):
    model = BrokenTwice(same)
    with torch.no_grad():
        want = model(X, W, V)
        got = amp_graph.convert(model, "bf16")(X, W, V)
    assert (got - want).norm() / want.norm() < 0.012


class ShowsBits(nn.Module):
    def __init__(self, convert):
        super().__init__()
        self.convert, self.shows = convert, True

    def forward(self, x, w, v):
        h = F.linear(x, w)
        torch._dynamo.graph_break()
        if self.shows:
            self.convert(h).view(torch.int16).bitwise_and_(-16)
        return F.linear(h, v)


def test_a_call_that_shows_bits_of_low_values_behind_a_break_runs_in_fp32():
    """In pieces they would be those of bfloat16, as under autocast."""
    model = ShowsBits(lambda h: h)
    with torch.no_grad():
        want = model(X, W, V)
        converted = amp_graph.convert(model, "bf16")
        with pytest.warns(AmpGraphWarning, match="in fp32 from now on.*shown as another dtype behind a graph break"):
            got = converted(X, W, V)
        again = converted(X, W, V)
    assert (got - want).norm() / want.norm() < 0.012
    assert torch.equal(again, got)


def test_bits_that_a_later_call_shows_are_told():
    """Nothing is put back then; the warning names the word for fp32."""
    model = ShowsBits(lambda h: h)
    with torch.no_grad():
        want = model(X, W, V)
        converted = amp_graph.convert(model, "bf16")
        model.shows = False
        converted(X, W, V)
        model.shows = True
        with pytest.warns(AmpGraphWarning, match="shown as another dtype behind a graph break.*escaped=fp32"):
            converted(X, W, V)
        amp_graph.revert(model)
        got = amp_graph.convert(model, "bf16,escaped=fp32")(X, W, V)
    assert (got - want).norm() / want.norm() < 0.012


def test_bits_of_what_the_user_converted_need_no_word():
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*another dtype")
        amp_graph.convert(ShowsBits(lambda h: h.float().bfloat16()), "bf16")(X, W, V)


class ReturnsViewsWithGaps(nn.Module):
    """Of what is not returned itself."""

    def forward(self, x, w, v):
        h = F.linear(x, w)
        torch._dynamo.graph_break()
        return h[1:, 2:], h[:, 3], h.as_strided((2, 2), (8, 1), 1)


@pytest.mark.filterwarnings("ignore:.*graph")
@pytest.mark.parametrize("trains", [True, False])
def test_views_with_gaps_that_pieces_return_are_one_memory(trains):
    model, given = ReturnsViewsWithGaps(), [t.clone().requires_grad_(trains) for t in (X, W, V)]
    want = model(*given)
    amp_graph.convert(model, "bf16")
    for _ in range(2):
        found = model(*given)
        for one, exact in zip(found, want, strict=True):
            assert one.dtype == torch.float32
            torch.testing.assert_close(one, exact, rtol=0.03, atol=0.03)
        if trains:
            ours, theirs = (
                torch.autograd.grad(sum(t.sum() for t in r), given[:2], retain_graph=True) for r in (found, want)
            )
            torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.1)
        with torch.no_grad():
            found[0][0, 1] = 50  # h[1, 3]
        assert found[1][1] == 50


class ReturnsViews(nn.Module):
    def forward(self, x, w, v):
        h = F.linear(x, w)
        torch._dynamo.graph_break()
        return h, h[1:, 2:], {"part": h.t()[3]}, h.detach(), F.linear(x, v)


@pytest.mark.filterwarnings("ignore:.*graph")
@pytest.mark.parametrize("trains", [True, False])
def test_outputs_of_pieces_that_are_one_memory_stay_so(trains):
    model, weight = ReturnsViews(), W.clone().requires_grad_(trains)
    want = model(X, weight, V)
    got = amp_graph.convert(model, "bf16")(X, weight, V)
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert a.requires_grad == b.requires_grad
        assert (a - b).norm() / b.norm() < 0.012
    if trains:
        losses = [sum(t.square().sum() for t in tree_leaves(one) if t.requires_grad) for one in (got, want)]
        a, b = (torch.autograd.grad(loss, weight)[0] for loss in losses)
        assert (a - b).norm() / b.norm() < 0.012
    got[3].fill_(7.0)
    assert all((t == 7.0).all() for t in tree_leaves(got[:4]))
    assert not (got[4] == 7.0).any()
