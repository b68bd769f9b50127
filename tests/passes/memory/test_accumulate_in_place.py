"""Sums in place: the same numbers or nearer ones, only in memory that nobody reads any more."""

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import VerifyError
from amp_graph.passes.base import Change, Pass, PassResult, Writes
from amp_graph.passes.graph import liveness
from amp_graph.passes.graph.graph_text import graph_text
from amp_graph.passes.manager import run_passes
from amp_graph.passes.memory.accumulate_in_place import AccumulateInPlace
from amp_graph.passes.profitability import thresholds
from amp_graph.passes.torch_compat.fake import make_fx

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def _however_small(monkeypatch):
    monkeypatch.setattr(thresholds, "FEWEST_WIDENED", 1)


def drawn(*shape, dtype=FP32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def traced(function, *given):
    return make_fx(function, tracing_mode="fake")(*given)


def passed(function, *given):
    """The graph of ``function`` before and after the pass, and the actions that the pass took."""
    plain, ours = (traced(function, *given) for _ in range(2))
    (done,) = run_passes(ours, [AccumulateInPlace()], checked=True)
    return plain, ours, [change.action for change in done.result.changes]


def results(gm, given):
    args = [g.clone() for g in given]
    out = gm(*args)
    return [*(out if isinstance(out, tuple) else (out,)), *args]


def same(plain, ours, given):
    return all(torch.equal(a, b) for a, b in zip(results(plain, given), results(ours, given), strict=True))


X, Y = drawn(6, 8), drawn(6, 8, seed=1)
LOW = drawn(6, 8, seed=2).to(BF16)
EXACT = {
    "a temporary": (lambda x, y: x.sin() + y, ["in place"]),
    "the other way round": (lambda x, y: x + y.sin(), ["in place"]),
    "three": (lambda x, y: x.sin() + y + y.cos(), ["in place", "in place"]),
    "read before": (lambda x, y: ((s := x.sin()).cos(), s + y), ["in place"]),
    "a view of a temporary": (lambda x, y: x.sin().view(48) + y.view(48), ["in place"]),
    "a broadcast summand": (lambda x, y: x.sin() + y[:1], ["in place"]),
    "two precisions": (lambda x, y: x + y.bfloat16(), ["widened"]),
    "two precisions, in place": (lambda x, y: x.sin().add_(y.bfloat16()), ["widened"]),
}


@pytest.mark.parametrize("name", EXACT)
def test_sums_in_place_change_no_bit(name):
    function, actions = EXACT[name]
    plain, ours, found = passed(function, X, Y)
    assert found == actions
    assert same(plain, ours, (X, Y))
    (again,) = run_passes(ours, [AccumulateInPlace()], checked=True)
    assert not again.result.changes


KEPT = {
    "an input": lambda x, y: x + y,
    "a view of an input": lambda x, y: x.view(48) + y.view(48),
    "returned": lambda x, y: ((s := x.sin()) + y, s),
    "read again": lambda x, y: ((s := x.sin()) + y) * s,
    "a view of it is read again": lambda x, y: (s := x.sin(), v := s.view(48).view(6, 8), (s + y) * v)[2],
    "a part of it is read again": lambda x, y: (s := x.sin(), v := s[0], (s + y).sum() * v)[2],
    "expanded": lambda x, y: x.sin()[:1].expand(6, 8) + y,
    "broadcast": lambda x, y: x.sin()[:1] + y,
    "scaled": lambda x, y: torch.add(x.sin(), y, alpha=2),
    "itself": lambda x, y: (s := x.sin()) + s,
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_left_alone(name):
    plain, ours, found = passed(KEPT[name], X, Y)
    assert not found
    assert same(plain, ours, (X, Y))


def test_aliases_that_are_not_seen_are_the_control(monkeypatch):
    monkeypatch.setattr(liveness, "_aliased", lambda node, op: [])
    plain, ours, found = passed(KEPT["a view of it is read again"], X, Y)
    assert found
    assert not same(plain, ours, (X, Y))


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def products(g, h, w, v):
    """The gradient of what two linears read: two products, the first a temporary."""
    first = (g.view(-1, 8) @ w).view(2, 24, 16)
    return first + (h.view(-1, 8) @ v).view(2, 24, 16)


def onto_a_stream(g, h, w, v):
    stream = h.view(2, 24, 8).repeat(1, 1, 2).sin()
    return stream + (g.view(-1, 8) @ w).view(2, 24, 16)


PRODUCTS = {"two products": products, "a stream": onto_a_stream}


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_that_adds_rounds_once_less(name, dtype):
    before = after = 0.0
    for seed in range(8):
        shapes = ((2, 24, 8), (2, 24, 8), (8, 16), (8, 16))
        given = [drawn(*s, dtype=dtype, seed=10 * seed + i) for i, s in enumerate(shapes)]
        plain, ours, found = passed(PRODUCTS[name], *given)
        assert found == ["in the product"]
        assert "addmm_" in ours.code
        exact = PRODUCTS[name](*(t.double() for t in given))
        (was, *_), (got, *_) = (results(gm, given) for gm in (plain, ours))
        assert got.stride() == was.stride()
        before, after = before + error(was, exact), after + error(got, exact)
    assert after <= (0.95 if dtype == BF16 else 1.05) * before


LONG = {
    "read again": lambda g, w, x: ((s := x.sin()) + g @ w, s),
    "read in between": lambda g, w, x: ((s := x.sin()), p := g @ w, c := s.cos(), s + p, c)[3:],
    "a product read twice": lambda g, w, x: ((p := g @ w) + x.sin(), p),
    "made behind the product": lambda g, w, x: (p := g @ w, p.view(48).view(6, 8) + x.sin())[1],
    "transposed": lambda g, w, x: x.sin().t().contiguous().t() + g @ w,
    "written in between": lambda g, w, x: (s := x.sin(), p := g @ w, s.mul_(2), s + p)[3],
}


@pytest.mark.parametrize("name", LONG)
def test_products_that_stay(name):
    given = (drawn(6, 4, dtype=BF16), drawn(4, 8, dtype=BF16, seed=1), LOW)
    plain, ours, found = passed(LONG[name], *given)
    assert "in the product" not in found
    assert same(plain, ours, given)


def tied(g, ids, low, padding=-1):
    table = ATEN.embedding_dense_backward(g, ids, 11, padding, False)
    return table + low.float()


@pytest.mark.parametrize("padding", [-1, 3])
def test_rows_of_a_tied_embedding_are_added_to_its_gradient(padding):
    g, low = drawn(2, 5, 4), drawn(11, 4, seed=1).to(BF16)
    ids = torch.tensor([[1, 3, 3, 1, 10], [0, 1, 3, 3, 2]])
    given = (g.masked_fill((ids == padding)[..., None], float("nan")), ids, low)
    plain, ours, found = passed(lambda *a: tied(*a, padding), *given)
    assert found == ["by row"]
    assert "embedding_dense_backward" not in ours.code
    (was, *_), (got, *_) = (results(gm, given) for gm in (plain, ours))
    assert was.isfinite().all()
    torch.testing.assert_close(got, was, rtol=1e-6, atol=1e-6)


def rows_of(g, ids, by_frequency=False):
    return ATEN.embedding_dense_backward(g, ids, 11, -1, by_frequency)


SCATTERS_KEPT = {
    "the table is read again": lambda g, ids, low: ((t := low.float()) + rows_of(g, ids), t),
    "low precision": lambda g, ids, low: rows_of(g, ids).bfloat16() + low.sin(),
    "by frequency": lambda g, ids, low: rows_of(g, ids, True) + low.float(),
}


@pytest.mark.parametrize("name", SCATTERS_KEPT)
def test_scatters_that_stay(name):
    given = (drawn(2, 3, 4), torch.tensor([[1, 3, 3], [0, 1, 3]]), drawn(11, 4, seed=1).to(BF16))
    plain, ours, found = passed(SCATTERS_KEPT[name], *given)
    assert "by row" not in found
    assert same(plain, ours, given)


class _WritesToAnInput(Pass):
    name = "writes-to-an-input"
    writes = Writes.OWN

    def run(self, gm):
        (node,) = (n for n in gm.graph.nodes if n.target is ATEN.add.Tensor)
        node.target = ATEN.add_.Tensor
        return PassResult(gm, (Change(self.name, "broke", node.name, "the control"),))


def test_a_pass_that_writes_to_an_input_is_refused():
    with pytest.raises(VerifyError, match="writes"):
        run_passes(traced(KEPT["an input"], X, Y), [_WritesToAnInput()], checked=True)
    run_passes(traced(lambda x, y: x.sin() + y, X, Y), [_WritesToAnInput()], checked=True)


# -- whole steps --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """One block with tied embeddings: queries, keys and values read one stream."""

    def __init__(self, words=40, width=16):
        super().__init__()
        self.words, self.norm = nn.Embedding(words, width, padding_idx=0), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, words)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.norm(self.words(ids))
        mixed = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        return F.cross_entropy(self.head(x + self.out(mixed)).flatten(0, 1), ids.roll(1, 1).flatten())


IDS = torch.randint(40, (4, 12), generator=torch.Generator().manual_seed(3))


def stepped(policy, **options):
    """Gradients, as the update of plain SGD has them, after one step; the step."""
    torch.manual_seed(0)
    model = Attention()
    before = [p.detach().clone() for p in model.parameters()]
    step = amp_graph.TrainStep(model, None, torch.optim.SGD(model.parameters(), lr=1.0), policy, **options)
    step(IDS)
    return [a - p.detach() for a, p in zip(before, model.parameters(), strict=True)], step


def exact_gradients():
    torch.manual_seed(0)
    model = Attention().double()
    model(IDS).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast", "bf16-O2", "fp16,accuracy=fast", "bf16-O3"])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=["whole", "micro-batches"])
def test_gradients_of_a_step_are_no_further_off(policy, options):
    (ours, step), (plain, _) = stepped(policy, **options), stepped(f"{policy},skip=accumulate_in_place", **options)
    (done,) = [t for t in step.captured[0].steps[True].passes if t.name == "accumulate-in-place"]
    assert done.result.changes
    exact = exact_gradients()
    errors = [[error(g, e) for g, e in zip(given, exact, strict=True)] for given in (ours, plain)]
    assert all(a <= 1.1 * b + 1e-6 for a, b in zip(*errors, strict=True))
    assert sum(errors[0]) <= 1.02 * sum(errors[1])


def test_steps_go_on_as_without_it():
    losses = []
    for policy in ("bf16", "bf16,skip=accumulate_in_place"):
        torch.manual_seed(0)
        model = Attention()
        step = amp_graph.TrainStep(model, None, torch.optim.AdamW(model.parameters(), lr=0.01), policy, clip_norm=1.0)
        losses.append([step(IDS).item() for _ in range(30)])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert losses[0][-1] < 0.7 * losses[0][0]


@pytest.mark.parametrize(
    ("policy", "compile", "runs"),
    [
        ("bf16,accuracy=fast", "eager", True),
        ("bf16,accuracy=fast,skip=accumulate-in-place", "eager", False),
        ("bf16,lists=autocast_cpu", "eager", False),
        ("bf16-O0", "eager", False),
        ("bf16", "aot_eager", False),
    ],
)
def test_where_it_runs(policy, compile, runs):
    _, step = stepped(policy, compile=compile)
    names = [timed.name for timed in step.captured[0].steps[True].passes]
    assert ("accumulate-in-place" in names) == runs
    assert ("accumulate-in-place" in amp_graph.report(step).text()) == runs


def test_what_pays():
    assert thresholds.accumulating_is_profitable("cpu", BF16, in_place=True)
    assert not thresholds.accumulating_is_profitable("cpu", BF16, in_place=False)
    assert not thresholds.accumulating_is_profitable("cpu", torch.float16, in_place=True)
    assert thresholds.accumulating_is_profitable("cuda", torch.float16, in_place=False)
    assert not thresholds.scattering_is_profitable("cuda", 10, 10)
    assert not thresholds.widening_first_is_profitable("cuda", 1 << 20)


class GoldenSums(expecttest.TestCase):
    def test_two_linears_of_one_stream(self):
        def backward(g, h, w, v, low):
            stream = low.sin()
            return stream + (g @ w).view(2, 3, 8) + (h @ v).view(2, 3, 8)

        given = [drawn(*s, dtype=BF16) for s in ((6, 4), (6, 4), (4, 8), (4, 8), (2, 3, 8))]
        _, ours, _ = passed(backward, *given)
        self.assertExpectedInline(
            graph_text(ours),
            """\
%0: bf16[6,4] = input g_1
%1: bf16[6,4] = input h_1
%2: bf16[4,8] = input w_1
%3: bf16[4,8] = input v_1
%4: bf16[2,3,8] = input low_1
%5: bf16[2,3,8] = aten.sin.default(%4)
%6: bf16[6,8] = aten.view.default(%5, [6, 8])
%7: bf16[6,8] = aten.addmm_.default(%6, %0, %2)
%8: bf16[2,3,8] = aten.view.default(%7, [2, 3, 8])
%9: bf16[6,8] = aten.view.default(%8, [6, 8])
%10: bf16[6,8] = aten.addmm_.default(%9, %1, %3)
%11: bf16[2,3,8] = aten.view.default(%10, [2, 3, 8])
return %11""",
        )
