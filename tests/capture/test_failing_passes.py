"""What fails inside of amp_graph does not fail a call: passes, plans, and rewritten graphs stand aside, and say so."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import AmpGraphWarning, PassError
from amp_graph.passes.backends.cpu.linear.lower_weight_gradients import LowerWeightGradients
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.casts.share_casts import ShareCasts
from amp_graph.passes.graph.meta_keys import UNPLANNED
from amp_graph.passes.manager import run_passes
from amp_graph.passes.precision.plan_precision import PlanPrecision
from amp_graph.passes.recognize.gelu import FuseGelu
from tests.by_hand import step_of
from tests.layers import layers
from tests.passes.graphs import BF16, body_text, capture_function, standard_passes

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


@layers(lambda: dict(first=nn.Linear(8, 16), norm=nn.LayerNorm(16), last=nn.Linear(16, 4)))
def Net(self, x):
    return self.last(F.gelu(self.norm(self.first(x))))


@dataclass(frozen=True)
class BreaksHalfWay(Pass):
    def run(self, gm):
        node = next(n for n in gm.graph.nodes if n.op == "call_function")
        gm.left_behind = nn.Linear(1, 1)
        node.target = torch.bmm
        node.replace_all_uses_with(node.args[0])
        raise KeyError("lost")


@dataclass(frozen=True)
class Lints(Pass):
    """Leaves a graph in which a value is read before it is made."""

    def run(self, gm):
        nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
        nodes[-1].append(nodes[0])
        return PassResult(gm, (Change("lints", "moved", nodes[0].name, "for the test"),))


@pytest.fixture(autouse=True)
def _not_strict(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_STRICT", "0")


def fails(monkeypatch, kind, after=False):
    own = kind.run

    def run(self, gm):
        if after:
            own(self, gm)
        raise KeyError("made to fail")

    monkeypatch.setattr(kind, "run", run)


@pytest.mark.parametrize("bad", [BreaksHalfWay, Lints])
def test_the_graph_is_what_it_is_without_the_pass(bad):
    graph = capture_function(lambda s, x: (x @ s.w).exp() @ s.w, X[:, :4], w=torch.randn(4, 4))
    plain, ours = graph.fresh(), graph.fresh()
    run_passes(plain, standard_passes())
    passes = standard_passes()
    with pytest.warns(AmpGraphWarning, match=f"the pass {bad.name} is left out"):
        done = run_passes(ours, [*passes[:2], bad(), *passes[2:]], strict=False)
    assert body_text(ours) == body_text(plain)
    assert not hasattr(ours, "left_behind")
    (failed,) = [timed for timed in done if timed.failure]
    assert failed.name == bad.name
    assert bad.name in failed.failure


def test_a_required_pass_that_fails_leaves_the_graph_as_it_was(monkeypatch):
    fails(monkeypatch, PlanPrecision, after=True)
    gm = capture_function(lambda s, x: x @ s.w, X[:, :4], w=torch.randn(4, 4)).fresh()
    before = body_text(gm)
    with pytest.raises(PassError, match="plan-precision failed: KeyError"):
        run_passes(gm, standard_passes(), strict=False)
    assert body_text(gm) == before


@pytest.mark.parametrize("compile", ["eager", "aot_eager"])
def test_a_call_goes_on_without_the_pass_and_the_report_names_it(monkeypatch, compile):
    fails(monkeypatch, ShareCasts, after=True)
    model = Net()
    exact, theirs = step_of(model, X), step_of(model, X, context=torch.autocast("cpu", BF16))
    amp_graph.convert(model, "bf16", compile=compile)
    told = r"the pass share-casts is left out of a graph: .*KeyError: 'made to fail'"
    with pytest.warns(AmpGraphWarning, match=told):
        found = step_of(model, X)
    for ours, autocasts, true in zip(found, theirs, exact, strict=True):
        assert (ours - true).norm() <= 1.5 * (autocasts - true).norm() + 2.0**-9 * true.norm()
    assert "pass share-casts is left out of this graph" in amp_graph.report(model).text()
    (graph,) = amp_graph.report(model).to_dict()["graphs"]
    assert graph["left_out"][0]["rule"] == "share-casts"


def test_a_pass_that_fails_in_many_graphs_is_told_once(monkeypatch, recwarn):
    @layers(lambda: dict(a=nn.Linear(8, 8), b=nn.Linear(8, 8)))
    def Breaks(self, x):
        y = self.a(x)
        torch._dynamo.graph_break()
        return self.b(y)

    fails(monkeypatch, ShareCasts)
    model = amp_graph.convert(Breaks(), "bf16")
    for rows in (4, 5):
        model(torch.randn(rows, 8))
    assert len([w for w in recwarn if "share-casts is left out" in str(w.message)]) == 1
    assert amp_graph.report(model).text().count("pass share-casts is left out") > 1


def converted(model):
    found = step_of(amp_graph.convert(model, "bf16"), X)
    assert "this graph runs under torch.autocast('cpu'" in amp_graph.report(model).text()
    return found


def compiled(model):
    torch._dynamo.reset()
    return step_of(torch.compile(model, backend="amp_graph"), X)


def rewritten(model):
    gm = amp_graph.rewrite(torch.export.export(model, (X,)).module(), "bf16")
    assert "autocast" in gm.meta[UNPLANNED]
    with torch.no_grad():
        return [gm(X)]


def stepped(model):
    """The updates at a learning rate of 1 are the gradients."""
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    loss = amp_graph.TrainStep(model, lambda out, x: out.float().square().sum(), optimizer, "bf16")(X, X)
    return [loss, *(b - p.detach() for b, p in zip(before, model.parameters(), strict=True))]


def assert_as_autocast(found, theirs):
    """Check outputs to the bit, and gradients but for the rounding of what flows into them."""
    assert found[0].dtype == torch.float32
    assert torch.equal(found[0], theirs[0].float())
    for a, b in zip(found[1:], theirs[1:], strict=False):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", [converted, compiled, rewritten, stepped])
def test_a_graph_without_a_plan_runs_as_under_autocast(monkeypatch, how):
    fails(monkeypatch, PlanPrecision)
    model = Net()
    theirs = step_of(model, X, context=torch.autocast("cpu", BF16))
    if how is stepped:
        theirs[0] = theirs[0].float().square().sum()
    told = r"a graph runs under torch.autocast\('cpu', torch.bfloat16\), without a plan"
    with pytest.warns(AmpGraphWarning, match=told):
        found = how(model)
    assert_as_autocast(found, theirs)


@layers(lambda: dict(fc=nn.Linear(8, 8)))
def Mixed(self, x):
    """What autocast cannot run."""
    return torch.cdist(self.fc(x).view(6, 8), x) + torch.dot(self.fc(x)[0], x[0])


@pytest.mark.parametrize(
    ("kind", "policy", "told"),
    [
        (Mixed, "bf16", "runs as captured: under torch.autocast it fails"),
        (Net, "bf16,deny=aten.cdist", "runs as captured, without a plan"),
    ],
)
def test_a_graph_without_a_plan_is_fp32_where_autocast_cannot_run_it_or_does_not_know_the_policy(
    monkeypatch, kind, policy, told
):
    fails(monkeypatch, PlanPrecision)
    model = kind()
    exact = model(X)
    amp_graph.convert(model, policy)
    with pytest.warns(AmpGraphWarning, match=told):
        assert torch.equal(model(X), exact)


@pytest.mark.parametrize("policy", ["bf16", "bf16,deny=aten.cdist"])
def test_a_kernel_that_raises_has_its_call_run_as_captured(monkeypatch, policy):
    @layers(lambda: dict(fc=nn.Linear(8, 8)))
    def Tanh(self, x):
        h = self.fc(x)
        return 0.5 * h * (1.0 + torch.tanh(0.7978845608028654 * (h + 0.044715 * torch.pow(h, 3.0))))

    own, calls = F.gelu, []

    def gelu(x, **options):
        if type(x) is torch.Tensor or type(x) is nn.Parameter:
            calls.append(x)
            raise RuntimeError("no kernel for this")
        return own(x, **options)

    model = Tanh()
    exact, theirs = step_of(model, X), step_of(model, X, context=torch.autocast("cpu", BF16))
    amp_graph.convert(model, policy)
    monkeypatch.setattr("amp_graph.passes.recognize.gelu.F.gelu", gelu)
    with pytest.warns(AmpGraphWarning, match="a rewritten graph failed, and calls of it run as captured.*no kernel"):
        found = step_of(model, X)
    assert calls, "the stand-in was called"
    for one in (found, step_of(model, X)):  # and later calls
        if policy == "bf16":
            assert_as_autocast(one, theirs)
        else:
            assert all(map(torch.equal, one, exact))
    assert len(calls) == 1
    assert any("run as captured" in note for note in amp_graph.report(model).notes)


@layers(lambda region: dict(fc=nn.Linear(8, 8), rows=nn.Embedding(4, 8), region=region))
def Looks(self, x, i):
    """Looks rows up inside of a region."""
    h = self.fc(x)
    if self.region == "vmap":
        return torch.vmap(lambda row, place: row + self.rows(place))(h, i)
    if self.region == "no_grad":
        with torch.no_grad():
            return h + self.rows(i)
    if self.region == "break":
        torch._dynamo.graph_break()
        return h + self.rows(i)
    if self.region == "inference":
        with torch.inference_mode():
            return h + self.rows(i)
    with torch.autocast("cpu", BF16):
        return self.fc(h + self.rows(i))


@pytest.mark.parametrize("region", ["vmap", "no_grad", "inference", "autocast", "break"])
def test_an_error_of_the_users_is_eagers_and_leaves_no_mode_on(region):
    model, good, bad = amp_graph.convert(Looks(region), "bf16"), torch.tensor([0, 1]), torch.tensor([0, 9])
    model(X[:2], good)
    for _ in range(2):
        with pytest.raises(IndexError, match="index out of range in self"):
            model(X[:2], bad)
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()
        assert model(X[:2], good).isfinite().all()
    assert not [note for note in amp_graph.report(model).notes if "index out of range" in note]
    with torch.no_grad(), pytest.raises(IndexError):
        model(X[:2], bad)
    assert torch.is_grad_enabled()


def test_strict_conversions_raise(monkeypatch):
    fails(monkeypatch, FuseGelu)
    with pytest.raises(PassError, match="pass fuse-gelu failed"):
        amp_graph.convert(Net(), "bf16", strict=True)(X)


def test_a_step_goes_on_without_a_pass_and_its_note_is_one_line(monkeypatch):
    def run(self, gm):
        raise ValueError("made to fail\nand more about it")

    monkeypatch.setattr(LowerWeightGradients, "run", run)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = amp_graph.TrainStep(model, lambda y, x: y.square().sum(), optimizer, "bf16")
    with pytest.warns(AmpGraphWarning, match="the pass lower-weight-gradients is left out"):
        step(X, X)
    (note,) = [note for note in amp_graph.report(step).notes if note.startswith("lower-weight-gradients: ")]
    assert note.startswith("lower-weight-gradients: left out: ")
    assert note.endswith("ValueError: made to fail")
