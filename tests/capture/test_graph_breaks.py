"""What escapes capture runs in fp32, or the call under autocast, and leaves nothing switched on behind it."""

import copy
import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture import captured_graphs
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphWarning
from tests.by_hand import step_of, twins
from tests.corpus.traps_capture import BranchesOnValue, LogsInForward, PrintsInForward
from tests.layers import forward_of, layers
from tests.measure import products
from tests.relative_error import errors
from tests.warned import heard, without_warnings

BF16, FP16, FULL = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16}
X = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))


@layers(lambda: dict(first=nn.Linear(16, 16), second=nn.Linear(16, 4)))
def Pair(self, x):
    return self.second(self.first(x))


@forward_of(Pair)
def Loops(self, x):
    """The loop is given up as a whole: its products are in no graph."""
    total = torch.zeros_like(self.first(x))
    for row in (x.sum(1) > 0).nonzero()[:, 0]:
        total[row] = torch.tanh(self.first(x[row]))
        torch._dynamo.graph_break()
    return self.second(total)


@layers(lambda: dict(up=nn.Linear(16, 32), down=nn.Linear(32, 16)))
def Part(self, x):
    x = F.gelu(self.up(x))
    torch._dynamo.graph_break()
    return self.down(x)


@layers(lambda: dict(part=Part(), head=nn.Linear(16, 4)))
def CallsItsPartOften(self, x):
    for _ in range(3):
        x = x + self.part(x)
    return self.head(x)


BROKEN = [LogsInForward, PrintsInForward, BranchesOnValue, Loops, CallsItsPartOften]


def gradients(model, x, context=None, scale=1.0):
    """Output and gradients of one step, as fp64."""
    out, *grads = step_of(model, x, loss=lambda out: out.float().square().sum() * scale, context=context)
    return [out.double(), *(grad.double() / scale for grad in grads)]


# -- precision, outputs and gradients -----------------------------------------------------------------


@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.parametrize("kind", BROKEN)
def test_every_product_is_low_from_the_second_call_on_and_outputs_are_fp32(kind, policy):
    model = amp_graph.convert(kind(), policy)
    if kind not in (Loops, CallsItsPartOften):
        assert set(products(model, X)) == {DTYPES[policy]}
    model(X)
    for _ in range(3):
        assert set(products(model, X)) == {DTYPES[policy]}
        assert model(X).dtype == FULL


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.parametrize("kind", BROKEN)
def test_gradients_are_as_exact_as_autocasts(kind, policy):
    model = kind()
    scale = 1024.0 if policy == "fp16" else 1.0
    exact = gradients(copy.deepcopy(model).double(), X.double())
    theirs = gradients(copy.deepcopy(model), X, torch.autocast("cpu", DTYPES[policy]), scale)
    amp_graph.convert(model, policy)
    for _ in range(2):  # the call that captures, and one that does not
        for mine, other, true in zip(gradients(model, X, scale=scale), theirs, exact, strict=True):
            assert mine.isfinite().all()
            assert (mine - true).norm() <= 1.15 * (other - true).norm() + 1e-6 * true.norm()
            assert (mine - true).norm() < 0.05 * true.norm()


@dataclass
class Found:
    value: torch.Tensor
    label: str


@layers(lambda made: dict(made=made), base=Pair)
def Returns(self, x):
    x = self.first(x)
    torch._dynamo.graph_break()
    return self.made(self.second(x), x)


@pytest.mark.parametrize(
    ("made", "read"),
    [
        (lambda a, b: (a, [b]), lambda out: (out[0], out[1][0])),
        (lambda a, b: {"a": a, "b": {"c": b}}, lambda out: (out["a"], out["b"]["c"])),
        (lambda a, b: Found(a, "a"), lambda out: (out.value,)),
        (lambda a, b: (a.double(), b), lambda out: (out[0].float(), out[1])),
    ],
)
def test_what_the_user_sees_is_fp32(made, read):
    model = amp_graph.convert(Returns(made))
    for _ in range(2):
        assert {t.dtype for t in read(model(X))} == {FULL}


def test_outputs_stay_as_computed_where_the_policy_says_so():
    model = amp_graph.convert(Returns(lambda a, b: (a, b)), "bf16,keep_outputs=false")
    assert [t.dtype for t in model(X)] == [BF16, FULL]  # the second is handed on between graphs


@forward_of(Loops)
def LoopsAndReturns(self, x, low):
    """Returns what a call without graphs may change: values of several dtypes, an input, a parameter, a container."""
    out = Loops.forward(self, x)
    return {
        "out": out,
        "half": out.half(),
        "double": out.double(),
        "input": low,
        "more": (self.second.bias, None, 3),
    }


def test_the_results_of_a_call_without_graphs_are_those_of_the_first_but_for_rounding():
    low = X.bfloat16()
    model = amp_graph.convert(LoopsAndReturns(), "bf16")
    first = model(X, low)
    for _ in range(2):
        found = model(X, low)
        assert set(products(model, X, low)) == {BF16}
        assert [getattr(v, "dtype", v) for v in found.values()] == [getattr(v, "dtype", v) for v in first.values()]
        assert found["input"] is low
        assert found["more"][0] is model.second.bias
        torch.testing.assert_close(found["out"], first["out"], rtol=0.05, atol=0.05)


@layers(lambda: dict(table=nn.Embedding(4, 16), part=Part()))
def LooksUpInALoop(self, x):
    """The table alone is in no graph: its rows are chosen in a loop whose length depends on data."""
    for row in (x.sum(1) > 0).nonzero()[:, 0]:
        torch._dynamo.graph_break()
        x = x + self.table(row % 4)
    return self.part(x)


def test_a_table_that_no_graph_reads_leaves_calls_in_graphs():
    model = amp_graph.convert(LooksUpInALoop(), "bf16")
    for _ in range(3):
        before = conversion_of(model).runs
        model(X)
        assert conversion_of(model).runs > before


# -- the policy ---------------------------------------------------------------------------------------


def test_the_users_own_regions_are_obeyed():
    @layers(lambda: dict(first=nn.Linear(16, 16), part=Part(), last=nn.Linear(16, 4)))
    def Region(self, x):
        for _ in range(1):
            x = self.first(x)
            torch._dynamo.graph_break()
            with torch.autocast("cpu", enabled=False):
                x = self.part(F.linear(x.float(), self.first.weight))
        return self.last(x)

    model = amp_graph.convert(Region())
    model(X)
    assert products(model, X) == [BF16, FULL, FULL, FULL, BF16]


def wishes(model):
    amp_graph.precision("full")(model.part)
    return model


@pytest.mark.parametrize("policy", ["bf16,deny=gelu", "bf16,opaque=gelu", "bf16,keep_fp32=part", "bf16"])
def test_what_autocast_does_not_know_keeps_uncaptured_code_in_fp32(policy):
    model = amp_graph.convert((wishes if policy == "bf16" else lambda one: one)(CallsItsPartOften()), policy)
    with pytest.warns(AmpGraphWarning, match="runs in fp32"):
        model(X)
    assert products(model, X)[-1] == FULL
    assert amp_graph.report(model).escaped == "in fp32"
    assert set(products(model, X)[:-1]) == ({BF16} if "gelu" in policy else {FULL})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "policy",
    ["bf16-O2", "bf16-O3", "bf16,accuracy=fast", "bf16,accuracy=1.2", "bf16,planner=paint", "fp16,lists=autocast_cpu"],
)
@pytest.mark.parametrize("kind", [Loops, CallsItsPartOften])
def test_other_policies(policy, kind):
    model = kind()
    exact = gradients(copy.deepcopy(model), X)
    amp_graph.convert(model, policy)
    model(X)
    low = DTYPES[policy[:4]]
    assert set(products(model, X)) <= ({low, FULL} if "accuracy=1.2" in policy else {low})
    assert max(errors(gradients(model, X, scale=64.0), exact)) < 0.06


# -- whole graphs are as they were --------------------------------------------------------------------


@forward_of(Pair, ready=False)
def SetsUpOnce(self, x):
    if not self.ready:
        torch._dynamo.graph_break()
        self.ready = True
    return self.second(torch.relu(self.first(x)))


def test_a_model_that_breaks_at_its_first_call_only_is_whole_then():
    model = amp_graph.convert(SetsUpOnce())
    model(X)
    assert amp_graph.report(model).escaped
    model(X)
    assert len(conversion_of(model).graphs) == 2
    assert not amp_graph.report(model).graphs[-1].break_reason
    assert set(products(model, X)) == {BF16}


# -- what is reported ---------------------------------------------------------------------------------


def test_the_report_says_where_and_how():
    model = amp_graph.convert(Loops())
    model(X)
    told = amp_graph.report(model)
    assert told.escaped == "under torch.autocast('cpu', torch.bfloat16)"
    assert any("for row in" in where and __file__ in where for where, _ in told.breaks)
    assert all(reason for _, reason in told.breaks)
    text = told.text(None)
    assert "escaped    code between the graphs runs under torch.autocast('cpu', torch.bfloat16)" in text
    assert "for row in" in text
    assert told.to_dict()["breaks"][0]["where"] == told.breaks[0][0]


# -- nothing is left behind ---------------------------------------------------------------------------


@forward_of(nn.Linear)
def Doubled(self, x):
    """Of the user's own code: captured by itself where the loop around it is not."""
    return nn.Linear.forward(self, x) * 2


@layers(lambda error, fc=Doubled: dict(fc=fc(16, 16), kept=nn.Linear(16, 4), error=error, fails=True))
def Fails(self, x):
    for _ in range(2):
        x = self.fc(x)
        torch._dynamo.graph_break()
        if self.fails:
            raise self.error
    return self.kept(x)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), StopIteration("mine"), SystemExit(3)])
def test_an_error_between_graphs_arrives_and_leaves_nothing_on(error):
    model = amp_graph.convert(Fails(error), "bf16")
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            model(X)
        assert caught.value is error
        assert not torch.is_autocast_enabled("cpu")
    model.fails = False
    model(X)
    assert products(model, X) == [BF16] * 3
    assert amp_graph.report(model).graphs


# What autocast cannot run.
ODD = {
    "numpy": lambda h: h + torch.from_numpy(np.tanh(h.detach().numpy())),
    "linalg": lambda h: h @ torch.linalg.inv(h.T @ h + torch.eye(16)),
    "scatter": lambda h: torch.zeros(6, 16).index_add(0, torch.arange(6), h),
    "dirichlet": lambda h: torch.distributions.Dirichlet(h.exp()).rsample().to(h.dtype) + h,
}


@layers(
    lambda kind: dict(
        first=nn.Linear(16, 16), norm=nn.BatchNorm1d(16), last=nn.Linear(16, 4), odd=ODD[kind], writes=False
    )
)
def Reads(self, x):
    """Has parts that autocast cannot run, behind a graph break: ``kind`` says which."""
    h = self.norm(self.first(x))
    if self.writes:
        x.add_(1)
    h = torch._dynamo.disable(self.odd)(F.linear(h, self.first.weight))
    return self.last(h)


@pytest.mark.parametrize("kind", ODD)
def test_code_that_fails_under_autocast_runs_in_fp32_between_graphs(kind):
    plain, model = twins(partial(Reads, kind))
    torch.manual_seed(1)
    exact = plain(X)
    torch.manual_seed(1)
    with without_warnings():
        found = model(X)
    bound = 0.5 if kind == "dirichlet" else 0.05  # draws follow the rounded values
    assert (found - exact).norm() <= bound * exact.norm()
    assert torch.allclose(model.norm.running_mean, plain.norm.running_mean, atol=0.02), "written once"
    assert int(model.norm.num_batches_tracked) == 1
    found.sum().backward()
    assert model.first.weight.grad.isfinite().all()


@layers(
    lambda kind: dict(
        first=nn.Linear(16, 16),
        norm=nn.BatchNorm1d(16),
        odd=ODD[kind],
        calls=0,
        seen=[],
        fails_from=1,
        writes_weights=False,
        steps=nn.Buffer(torch.zeros(())),
    )
)
def Unknown(self, x):
    """A loop that no graph holds, with weights, whose end fails under autocast; counts its calls in all ways."""
    self.calls += 1
    self.seen.append(x)
    self.steps = self.steps + 1
    for _ in (x.sum(1) > 0).nonzero()[:1, 0]:
        torch._dynamo.graph_break()
        h = F.dropout(self.norm(F.linear(x, self.first.weight)), 0.5, self.training)
        if self.writes_weights:
            with torch.no_grad():
                self.norm.weight.add_(0)
        h = F.linear(h, self.first.weight)
        h = self.odd(h) if self.calls >= self.fails_from else h * 2
    return h


@pytest.mark.filterwarnings("ignore:amp_graph")
def test_control_a_later_call_that_has_written_to_a_weight_raises():
    model = amp_graph.convert(Unknown("scatter"), "bf16")
    model.fails_from, model.writes_weights = 4, True
    for _ in range(3):
        model(X)
    with pytest.raises(RuntimeError, match="same scalar type"):
        model(X)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    ("policy", "kind", "fails_from"),
    [("bf16", "numpy", 1), ("bf16", "scatter", 1), ("fp16", "scatter", 1), ("bf16", "scatter", 4)],
)
def test_a_call_without_graphs_that_fails_under_autocast_is_as_one_plain_call(kind, policy, fails_from, trains):
    """The first, or a later one whose branch has not run before: calls before it have run under autocast."""
    model = Unknown(kind).train(trains)
    model.fails_from, is_first = fails_from, fails_from == 1
    plain = copy.deepcopy(model)
    amp_graph.convert(model, policy)
    with heard() as said:
        for one in (model, plain):
            torch.manual_seed(1)
            for _ in range(5):
                out = one(X)
            out.square().sum().backward()
            one.end = out.detach(), torch.rand(3)
    assert torch.equal(model.end[1], plain.end[1]), "random numbers"
    assert (model.calls, len(model.seen), model.steps) == (plain.calls, len(plain.seen), plain.steps) == (5, 5, 5)
    found, exact = (
        [one.end[0], one.first.weight.grad, *(t.float() for t in one.state_dict().values())] for one in (model, plain)
    )
    if is_first:
        assert all(map(torch.equal, found, exact))
    else:  # statistics of norms were low ones
        assert max(errors(found, exact)) <= 0.05
    (told,) = [str(w.message) for w in said if "fails under torch.autocast" in str(w.message)]
    assert ("in fp32 from now on" in told) or not is_first


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.filterwarnings("ignore:amp_graph")
def test_a_write_to_an_input_is_done_once_where_the_call_fails_behind_it(trains):
    model = Reads("numpy").requires_grad_(trains)
    plain, (given, want) = copy.deepcopy(model), (X.clone(), X.clone())
    model.writes = plain.writes = True
    exact = plain(want)
    amp_graph.convert(model, "bf16")
    found = model(given)
    assert torch.equal(given, want)
    assert given.is_leaf
    assert (found - exact).norm() <= 0.05 * exact.norm()


def test_weights_are_those_of_now_inside_of_a_long_autocast_region():
    model = amp_graph.convert(Loops())
    with torch.autocast("cpu", BF16):
        model(X)
        before = model(X)
        model.first(X)  # the user's region keeps a cast of this weight
        with torch.no_grad():
            model.first.weight.zero_()
            model.first.bias.zero_()
        after = model(X)
    assert not torch.equal(before, after)
    assert torch.equal(after, model(X))


SEEN = []


@torch.library.custom_op("amp_graph_tests::looks_at_cast_cache", mutates_args=())
def looks_at_cast_cache(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(("run", torch.is_autocast_cache_enabled()))
    return x.clone()


@looks_at_cast_cache.register_fake
def _(x):
    SEEN.append(("tried", torch.is_autocast_cache_enabled()))
    return torch.empty_like(x)


@layers(lambda: dict(first=nn.Linear(16, 16)))
def LooksAtCastCache(self, x):
    x = looks_at_cast_cache(self.first(x))
    torch._dynamo.graph_break()
    return x + 1


def test_a_capture_leaves_autocasts_cache_alone():
    """Its lock and Python's were taken in two orders: a capture waited for a thread that was leaving autocast."""
    SEEN.clear()
    amp_graph.convert(LooksAtCastCache(), "bf16")(X)
    assert {cached for what, cached in SEEN if what == "tried"} == {False}
    assert {cached for what, cached in SEEN if what == "run"} == {True}
    assert torch.is_autocast_cache_enabled()
    SEEN.clear()
    torch.compile(LooksAtCastCache(), backend="eager")(X)  # control: Dynamo's own way
    assert {cached for what, cached in SEEN if what == "tried"} == {True}


# -- errors, wherever they come from ------------------------------------------------------------------


def test_an_error_that_forward_handles_itself():
    @forward_of(Pair)
    def Handles(self, x):
        try:
            x = self.first(x)
            torch._dynamo.graph_break()
            raise ValueError("mine")
        except ValueError:
            x = self.first(x)
        return self.second(torch.relu(x))

    model = amp_graph.convert(Handles())
    with without_warnings():
        model(X)
        assert products(model, X) == [BF16] * 3
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_while_a_piece_is_rewritten(error, monkeypatch):
    model, rewrite = amp_graph.convert(CallsItsPartOften()), captured_graphs.rewrite_in_place

    def interrupted(*args, **kwargs):
        monkeypatch.setattr(captured_graphs, "rewrite_in_place", rewrite)
        assert not torch.is_autocast_enabled("cpu")
        raise error

    monkeypatch.setattr(captured_graphs, "rewrite_in_place", interrupted)
    with pytest.raises((error, torch._dynamo.exc.BackendCompilerFailed)):
        model(X)
    assert not torch.is_autocast_enabled("cpu")
    assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
    with without_warnings():
        model(X)
    assert set(products(model, X)) == {BF16}


def test_code_on_which_tracing_fails_runs_as_written_and_once():
    """Dynamo raises an error of its own at a list whose length data decides."""

    @layers(lambda: dict(part=Part(), head=nn.Linear(16, 4), calls=0))
    def Routes(self, x):
        self.calls += 1
        total = torch.zeros_like(x)
        for group in (x.sum(1) > 0).long().unique().tolist():
            rows = ((x.sum(1) > 0).long() == group).nonzero()[:, 0]
            total = total.index_add(0, rows, self.part(x[rows]).to(x.dtype))
        return self.head(total)

    model, plain = Routes(), Routes()
    plain.load_state_dict(model.state_dict())
    amp_graph.convert(model)
    for call in range(1, 4):
        torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
        assert model.calls == call
    assert set(products(model, X)) == {BF16}
    assert any("tracing failed" in reason for _, reason in amp_graph.report(model).skipped)


@layers(lambda: dict(part=nn.Linear(8, 8), turns=0))
def WhileLarge(self, x):
    """Shrinks its input, a turn at a time, until a value says that it is small enough."""
    self.turns = 0
    while x.norm() > 10:
        x = 0.9968 * x + 1e-5 * self.part(x)
        self.turns += 1
    return self.part(x)


@pytest.mark.filterwarnings("ignore:amp_graph")
def test_a_loop_of_a_thousand_turns_that_values_decide():
    """Turns that are calls inside of each other end in a RecursionError."""
    model, x = WhileLarge(), 100 * torch.randn(4, 8)
    with torch.no_grad():
        want, turns = model(x), model.turns
        assert turns > sys.getrecursionlimit() // 2 + 200
        amp_graph.convert(model, "bf16")
        for _ in range(2):
            torch.testing.assert_close(model(x), want, rtol=0.05, atol=0.05)
            assert abs(model.turns - turns) <= 2


@layers(lambda: dict(part=nn.Linear(8, 8)))
def WritesToTheBase(self, x, view, z):
    """Gives an input a gradient of which another input is a view: Dynamo has no fake tensor for that."""
    x.copy_(z)
    return self.part(z), view


@forward_of(WritesToTheBase)
def ReadsItsBatch(self, x, view, z):
    """Makes a constant of a size that its caller has marked as dynamic."""
    return self.part(z) * (2 if z.shape[0] == 4 else 3), view


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:amp_graph")
def test_what_the_user_makes_low_stays_so_behind_a_graph_break(dtype):
    @layers(lambda: dict(first=nn.Linear(8, 8), second=nn.Linear(8, 8)))
    def Embeds(self, x, held):
        h = self.first(x)
        torch._dynamo.graph_break()
        low = h.bfloat16() if dtype is torch.bfloat16 else h.half()
        torch._dynamo.graph_break()
        return self.second(h), low, low[0].relu(), h * 2, low * x, held + 1, low.float()

    model, given = Embeds(), (torch.randn(4, 8), torch.ones(4, dtype=dtype))
    want = model(*given)
    amp_graph.convert(model, "bf16" if dtype is torch.bfloat16 else "fp16")
    for _ in range(2):
        found = model(*given)
        for one, exact in zip(found, want, strict=True):
            assert one.dtype == exact.dtype
            torch.testing.assert_close(one, exact, rtol=0.05, atol=0.05)


# What is read of a value, what is written then, and what is returned; each in a piece of its own.
WRITES = {
    "behind float": (lambda h: h.float(), lambda h, read: h.mul_(2), lambda h, read, x: read + x),
    "to what float returns": (lambda h: h.to(FULL), lambda h, read: read.mul_(2), lambda h, read, x: h + x),
    "to a view of it": (lambda h: h[1:].float(), lambda h, read: read[0].zero_(), lambda h, read, x: h + x),
    "to a low copy": (lambda h: h.bfloat16(), lambda h, read: read.mul_(2), lambda h, read, x: read + h + x),
    "to a complex view": (
        lambda h: torch.view_as_complex(h.view(-1, 2)).mul_(1j),
        lambda h, read: None,
        lambda h, read, x: h + x,
    ),
}


def written(name, h, x):
    read, write, result = WRITES[name]
    seen = read(h)
    torch._dynamo.graph_break()
    write(h, seen)
    torch._dynamo.graph_break()
    return result(h, seen, x)


def write_that_a_backward_would_miss(h, x):
    h = h.relu()
    low = h.bfloat16()
    torch._dynamo.graph_break()
    low[:2] += 1
    return low + h + x


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "writes", [*(partial(written, name) for name in WRITES), write_that_a_backward_would_miss], ids=[*WRITES, "missed"]
)
@pytest.mark.filterwarnings("ignore:amp_graph")
def test_a_write_behind_a_conversion_and_a_graph_break_is_seen(writes):
    """Autocast loses them: there ``h.float()`` is another memory, and ``h.bfloat16()`` the same."""

    @layers(lambda: dict(first=nn.Linear(8, 8), second=nn.Linear(8, 8)))
    def Model(self, x):
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.second(writes(h, x))

    model, x = Model(), torch.randn(4, 8, requires_grad=True)
    weights = (x, *model.parameters())

    def call():
        out = model(x)
        return out, *torch.autograd.grad(out.square().sum(), weights)

    want = call()
    amp_graph.convert(model, "bf16")
    for _ in range(2):
        assert max(errors(call(), want)) <= 0.03


@pytest.mark.parametrize("kind", [WritesToTheBase, ReadsItsBatch])
@pytest.mark.filterwarnings("ignore:amp_graph")
def test_what_dynamo_cannot_trace_runs_as_it_is_written(kind):
    model = kind()

    def call():
        torch.manual_seed(0)
        x, z = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)
        if kind is ReadsItsBatch:
            torch._dynamo.mark_dynamic(z, 0)
        out, view = model(x, x.view(-1)[4:28], z)
        return out, view, *torch.autograd.grad(out.sum() + view.sum(), (z, model.part.weight), allow_unused=True)

    want = call()
    amp_graph.convert(model, "bf16")
    for _ in range(2):
        torch.testing.assert_close(list(call()), list(want), rtol=0.02, atol=0.02)
    assert any("tracing failed" in reason for _, reason in amp_graph.report(model).skipped)


def test_the_users_tensors_are_written_as_under_autocast():
    @layers(lambda: dict(part=Part(), head=nn.Linear(16, 4), seen=nn.Buffer(torch.zeros(16))))
    def Writes(self, x, out):
        for _ in range(2):
            x = self.part(x)
            self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            out[0] = x.detach()[0]
        return self.head(x)

    ours, theirs = Writes(), Writes()
    theirs.load_state_dict(ours.state_dict())
    out, their_out = torch.zeros(1, 16), torch.zeros(1, 16)
    amp_graph.convert(ours)
    for _ in range(2):
        ours(X, out)
        with torch.autocast("cpu", BF16):
            theirs(X, their_out)
    assert ours.seen.dtype == out.dtype == FULL
    torch.testing.assert_close(ours.seen, theirs.seen, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(out, their_out, rtol=1e-2, atol=1e-2)


@forward_of(Pair)
def Seeds(self, x):
    """As transformers' Reformer: a graph of its own that only asks for a seed, and computes on no tensor."""
    torch.seed()
    print(end="")
    return self.second(torch.relu(self.first(x)))


def test_a_piece_without_any_tensor():
    model = amp_graph.convert(Seeds(), "bf16")
    model(X)
    assert products(model, X) == [BF16, BF16]
    assert model(X).dtype == FULL
