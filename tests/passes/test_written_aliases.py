"""Writes beside an alias that no list knows: the base sees what is written to the view, and the other way round."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.graph.aliasing import may_overlap, observe
from amp_graph.passes.graph.meta_keys import IDENTITY
from amp_graph.passes.manager import run_passes
from amp_graph.passes.precision.lookahead import Lookahead
from amp_graph.passes.precision.plan_precision import PlanPrecision, marks
from tests.layers import forward_of, layers
from tests.measure import products
from tests.passes.graphs import capture_function, passes_until, standard_passes
from tests.relative_error import errors

ROWS, WIDTH = 8, 16
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
W, V = (torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(s)) / 3 for s in (1, 2))


def as_complex(h):
    return torch.view_as_complex(h.view(ROWS, WIDTH // 2, 2))


# Opaque to every list, denied, or more than one operand's: each took a widened copy of ``h``.
VIEWS = {
    "as_strided": lambda h: h.as_strided((4, 8), (8, 1)),
    "torch.as_strided": lambda h: torch.as_strided(h, (4, 8), (16, 2), 3),
    "sum_to_size": lambda h: h.sum_to_size(ROWS, WIDTH),
    "real": lambda h: h.real,
    "real of complex": lambda h: as_complex(h).real,
    "imag of complex": lambda h: as_complex(h).imag,
    "complex and back": lambda h: torch.view_as_real(as_complex(h)),
    "view(float32)": lambda h: h.view(torch.float32),
    "int32 and back": lambda h: h.view(torch.int32).view(torch.float32),
    "view of as_strided": lambda h: h.as_strided((4, 8), (8, 1)).view(-1)[3:9],
    "broadcast_tensors": lambda h: torch.broadcast_tensors(h, torch.ones(WIDTH))[0],
    "meshgrid": lambda h: torch.meshgrid(h[0], torch.ones(1), indexing="ij")[0],
    "einsum": lambda h: torch.einsum("ij->ji", h),
    "set_": lambda h: torch.empty(0).set_(h.detach()),
    "eval dropout": lambda h: F.dropout(h, 0.5, training=False),
    "view of eval dropout": lambda h: F.dropout(h, 0.5, training=False).as_strided((4, 8), (8, 1)),
    "part of no dropout": lambda h: F.dropout(h, 0.0)[1:4, 3:],
    "dropouts": lambda h: F.dropout(F.dropout(h, 0.5, False), 0.1, False).view(-1),
    "contiguous": lambda h: h.contiguous(),
    "float": lambda h: h.float(),
    "to": lambda h: h.to(torch.float32),
    "type_as": lambda h: h.type_as(torch.ones(1)),
}


@layers(lambda view, through_view: dict(view=view, through_view=through_view))
def Written(self, x, w, v):
    """A linear whose result is viewed; the view, or the result, is written, and then both are read."""
    h = F.linear(x, w)
    before = h.relu()
    view = self.view(h)
    (view if self.through_view else h).mul_(2)
    return F.linear(h, v) + before, view * 1.0


@torch.no_grad()
def error_of(model, policy="bf16"):
    """Compare a converted model with the eager one; a lost write is an error of 0.3 and more."""
    want = torch.utils._pytree.tree_leaves(model(X, W, V))
    return max(errors(torch.utils._pytree.tree_leaves(amp_graph.convert(model, policy)(X, W, V)), want))


@torch.no_grad()
def error_of_graph(function):
    graph = capture_function(function, X, w=W, v=V)
    return max(errors(graph.through(standard_passes())[0](*graph.given), graph.gm(*graph.given)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["bf16", "bf16,planner=paint", "fp16", "bf16,accuracy=fast"])
@pytest.mark.parametrize("through_view", [True, False], ids=["write the view", "write the base"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_write_is_seen_through_every_alias_by_every_planner(view, through_view, policy):
    assert error_of(Written(view, through_view), policy) < 0.012


def bits(s, x):
    h = F.linear(x, s.w)
    h.view(torch.int32).bitwise_xor_(-(1 << 31))
    return F.linear(h, s.v)


def turned(s, x):
    h = F.linear(x, s.w)
    as_complex(h).mul_(2j)
    return F.linear(h, s.v)


def added_out(s, x):
    h = F.linear(x, s.w.detach())
    torch.add(x[:4, :8], 1.0, out=h.as_strided((4, 8), (8, 1)))
    return F.linear(h, s.v)


def in_a_checkpoint(s, x):
    h = F.linear(x, s.w)
    view = h.sum_to_size(ROWS, WIDTH)
    inner = torch.utils.checkpoint.checkpoint(lambda t: t.mul_(2).sin(), h, use_reentrant=False)
    return F.linear(view, s.v) + inner


def recurrent(s, x):
    h, _ = torch._VF.rnn_tanh(
        x[None], torch.zeros(1, 1, WIDTH), [s.w, s.v, s.w[0], s.v[0]], True, 1, 0.0, False, False, True
    )
    h.as_strided((ROWS,), (1,)).mul_(2)
    return F.linear(h, s.v)


@pytest.mark.parametrize("function", [bits, turned, added_out, in_a_checkpoint, recurrent])
def test_writes_of_other_kinds(function):
    assert error_of_graph(function) < 0.012


def copied(through_copy, read):
    def run(s, x):
        h = F.linear(x, s.w)
        low = read(h)
        (low if through_copy else h).mul_(2)
        return F.linear(h, s.v), low.float()

    return run


@pytest.mark.parametrize("through_copy", [True, False])
@pytest.mark.parametrize(
    "read", [lambda h: h.bfloat16(), lambda h: h.to(torch.bfloat16), lambda h: h.type(torch.bfloat16)]
)
def test_a_conversion_that_copied_at_capture_copies_still(through_copy, read):
    """Of a value that is bfloat16 already, ``.bfloat16()`` would be the value itself."""
    assert error_of_graph(copied(through_copy, read)) < 0.012


@layers(lambda view: dict(view=view))
def Broken(self, x, w, v):
    h = F.linear(x, w)
    seen = self.view(h)
    torch._dynamo.graph_break()
    seen.mul_(2)
    return F.linear(h, v)


@pytest.mark.filterwarnings("ignore:.*graph")
@pytest.mark.parametrize("view", [VIEWS["as_strided"], VIEWS["real"], lambda h: h[:4]])
def test_two_views_leave_a_piece_as_one_memory(view):
    assert error_of(Broken(view)) < 0.012


def test_a_value_that_nobody_writes_later_is_lowered_as_before():
    """What was written before the alias was made is no reason to keep full precision."""

    def early(s, x):
        h = F.linear(x, s.w).relu_()
        return F.linear(h.as_strided((4, 16), (16, 1)), s.v)

    assert not any(mark.converts_result for mark in marks(planned(early)).values())


def planned(function):
    gm = capture_function(function, X, w=W, v=V).fresh()
    run_passes(gm, passes_until(PlanPrecision), checked=True)
    return gm


@pytest.fixture(scope="module")
def shown():
    """An operator that says that it returns its argument's memory, and whose fake kernel returns new memory."""
    library = torch.library.Library("amp_aliases", "FRAGMENT")
    library.define("shown(Tensor(a) x) -> Tensor(a)")
    library.impl("shown", lambda x: x.view(-1), "CompositeExplicitAutograd")
    torch.library.register_fake("amp_aliases::shown", lambda x: x.new_empty(x.numel()), lib=library)
    yield torch.ops.amp_aliases.shown
    library._destroy()


def test_schemas_of_other_libraries_are_asked_too(shown):
    assert error_of(Written(shown, True)) < 0.012
    gm = planned(lambda s, x: shown(F.linear(x, s.w)).mul_(2))
    linear, view = (
        next(n for n in gm.graph.nodes if name in str(n.meta.get(IDENTITY))) for name in ("linear", "shown")
    )
    memory = observe(gm, marks(gm))
    assert memory.storages[linear] == memory.storages[view]


def test_without_the_analysis_the_writes_are_lost(monkeypatch):
    """The control: what these tests compare does tell."""
    monkeypatch.setattr(Lookahead, "_shown", lambda self: {})
    assert error_of(Written(VIEWS["as_strided"], True)) > 0.2


WHOLE = torch.empty(4, 6, 24)
PAIRS = [
    (WHOLE, WHOLE[0], True),
    (WHOLE[0], WHOLE[1], False),
    (WHOLE[:, 1:3], WHOLE[:, 2:4], True),
    (*WHOLE.chunk(2, -1), False),
    (WHOLE.view(4, 6, 3, 8)[:, :, 0].transpose(0, 1), WHOLE.view(4, 6, 3, 8)[:, :, 2].transpose(0, 1), False),
    (WHOLE.view(4, 6, 8, 3)[..., 0], WHOLE.view(4, 6, 8, 3)[..., 2], False),
    (WHOLE[..., ::2], WHOLE[..., 1::2], False),
    (WHOLE[..., 2:9], WHOLE[..., 8:], True),
    (WHOLE.view(torch.int16)[..., 1::2], WHOLE, True),
    (WHOLE[:0], WHOLE, False),
]


@pytest.mark.parametrize(("a", "b", "expected"), PAIRS)
def test_overlap_is_that_of_the_elements(a, b, expected):
    assert may_overlap(a, b) is expected
    assert may_overlap(b, a) is expected


@layers(lambda view: dict(view=view))
def Shared(self, x, y, w, v):
    """Reads one input around a write to another, of which it may be a view."""
    seen = self.view(y)
    before = F.linear(seen, w)
    x.mul_(2)
    return before, F.linear(seen, v)


@pytest.mark.parametrize("view", [lambda y: y, lambda y: y.t().contiguous().t(), lambda y: y.view(16, 8)[:, :4]])
def test_a_graph_captured_for_tensors_apart_runs_for_a_tensor_and_its_view(view):
    """No guard of Dynamo's tells the two calls apart."""
    weights = [w[:, : view(X).shape[1]] for w in (W, V)]
    converted, eager = amp_graph.convert(Shared(view), "bf16"), Shared(view)
    with torch.no_grad():
        converted(X.clone(), X.clone(), *weights)
        for given in (lambda x: (x, x[:]), lambda x: (x.view(-1)[:64], x), lambda x: (x, x.clone())):
            got = converted(*given(X.clone()), *weights)
            assert max(errors(got, eager(*given(X.clone()), *weights))) < 0.012


def test_bits_are_those_of_fp32_where_code_reads_dtypes():
    """A capture under autocast would show the bits of bfloat16, two to a word."""
    assert error_of(Bits()) < 0.012


@forward_of(nn.Module)
def Bits(self, x, w, v):
    h = F.linear(x, w)
    h.view(torch.int32).bitwise_xor_(-(1 << 31))
    return torch.ones(ROWS, WIDTH).to(h.dtype) * h, h


@layers(lambda shown: dict(first=nn.Linear(8, 8), last=nn.Linear(8, 8), shown=shown))
def Reads(self, x):
    """A product that reads what overlapping outputs are parts of, and is itself no part of it."""
    h = torch.tanh(self.first(x))
    return self.last(h), *self.shown(x, h)


SHOWN = {
    "input": lambda x, h: (x[:2],),
    "input and a view": lambda x, h: (x, x.t()),
    "hidden": lambda x, h: (h, h[:3]),
    "none": lambda x, h: (),
}


@pytest.mark.parametrize("shown", SHOWN)
def test_what_only_reads_overlapping_outputs_is_low(shown):
    plain, x = Reads(SHOWN[shown]), torch.randn(6, 8)
    ours = amp_graph.convert(copy.deepcopy(plain), "bf16")
    found, expected = ours(x), plain(x)
    assert products(ours, x) == [torch.bfloat16] * 2
    torch.testing.assert_close(list(found), list(expected), rtol=2e-2, atol=2e-2)
    if shown == "hidden":
        with torch.no_grad():
            found[2].zero_()
        assert not found[1][:3].any(), "one memory"
