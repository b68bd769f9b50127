"""The predicted speed of a plan over full precision's, counted by hand; and what is left alone for it."""

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphWarning, CaptureError
from amp_graph.passes.precision import predict_time
from amp_graph.passes.precision.machine_rates import DTYPES, FAMILIES, Machine, machine_text
from amp_graph.passes.precision.plan_precision import PlanPrecision
from amp_graph.policy import Policy
from tests.by_hand import descend
from tests.layers import forward_of, layers
from tests.passes.graphs import passes_for
from tests.passes.planning import machine
from tests.warned import heard

FLOPS, BYTES = 1e9, 1e8  # of the machine below: a product of n x n x n is not bound by what it moves
PLAN = "amp_graph.passes.precision.plan_precision.machine_for"


@pytest.fixture
def plain(monkeypatch):
    """A machine with round rates, on which calls cost nothing and bf16 products take half the time."""
    rates = {name: dict.fromkeys(DTYPES, BYTES) for name in FAMILIES}
    rates |= {name: {"float32": FLOPS, "bfloat16": 2 * FLOPS} for name in ("matmul", "convolution", "attention")}
    found = Machine("plain", "cuda", "round", 0.0, 0.0, BYTES, True, dict.fromkeys(DTYPES, 0.0), rates)
    monkeypatch.setattr(PLAN, lambda device: found)


def predicted(model, x, policy="bf16", grad=True):
    amp_graph.convert(model, policy)
    with torch.set_grad_enabled(grad):
        model(x)
    (graph,) = amp_graph.report(model).graphs
    return graph.predicted


N = 512


PRODUCT = 2 * N**3 / FLOPS
CAST = N * N * (4 + 2) / BYTES
KEPT = N * N * 2 / BYTES


@pytest.mark.parametrize(
    ("policy", "grad", "products", "more"),
    [
        ("bf16", False, 1, 3 * CAST),  # of the input, the weight and the output
        ("bf16,skip=prepack_weights", False, 1, 3 * CAST),  # a weight is cast at each call
        # The input needs no gradient; casts of the input, of weight and output, and of their gradients; the low
        # copies of both are kept, where in full precision they are there anyway.
        ("bf16", True, 2, (1 + 2 + 2) * CAST + 2 * KEPT),
    ],
)
def test_one_linear_by_hand(plain, policy, grad, products, more):
    found = predicted(nn.Linear(N, N, bias=False), torch.randn(N, N), policy, grad=grad)
    product = products * PRODUCT
    assert found.speed == pytest.approx(product / (product / 2 + more))
    assert found.machine == "plain"
    if not grad:
        assert found.full == pytest.approx(product)
        assert found.autocast == pytest.approx(found.speed), "one product has one plan"


def test_autocasts_rules_lower_what_the_plan_leaves(plain):
    @layers(lambda: dict(large=nn.Linear(N, N, bias=False), thin=nn.Linear(N, 2, bias=False)))
    def Two(self, x):
        return self.large(x), self.thin(x.exp())  # exp stays full: its cast takes longer than a thin product gains

    told = "bf16,skip_unprofitable=true"
    found = predicted(Two(), torch.randn(N, N), told, grad=False)
    assert found.speed > found.autocast


def test_the_call_of_a_graph_counts_but_not_in_a_step(on):
    on("cpu_bf16", graph=1.0)  # a second
    assert predicted(nn.Linear(N, N), torch.randn(N, N)).speed < 1 / 20
    model = nn.Linear(N, N)
    step = amp_graph.TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    step(torch.randn(N, N), torch.randn(N, N))
    assert amp_graph.report(step).graphs[0].predicted.speed > 1


def test_all_in_full_precision_has_no_prediction():
    assert predicted(nn.Linear(8, 8), torch.randn(4, 8), "bf16,deny=linear") is None


@pytest.mark.parametrize(("batch", "policy", "pays"), [(1, "bf16", False), (512, "bf16", True), (512, "fp16", False)])
def test_what_does_not_pay_is_said(batch, policy, pays, on, tmp_path):
    on("cpu_bf16")
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    found = predicted(model, torch.randn(batch, 256), policy)
    assert (found.speed > 1) == pays
    report = amp_graph.report(model)
    report.html(tmp_path / "report.html")
    for text in (report.text(), (tmp_path / "report.html").read_text()):
        assert ("low precision is not profitable on cpu_bf16: predicted speed " in text) == (not pays)
    assert report.to_dict()["graphs"][0]["predicted"]["speed"] == found.speed


# -- left alone ---------------------------------------------------------------------------------------------

by_profit = pytest.mark.by_profit


def own(said):
    """Return the warnings of amp_graph; on Python 3.13.0 torch adds its own."""
    return [one for one in said if one.category is AmpGraphWarning]


def mlp(width=256):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def converted(policy, *shape, grad=True, calls=3):
    """A model after some calls, its results, and those of the model as it was written."""
    model, x = mlp(), torch.randn(*shape, 256)
    with torch.set_grad_enabled(grad):
        plain = model(x)
        amp_graph.convert(model, policy)
        found = [model(x) for _ in range(calls)]
    return model, found, plain


@by_profit
def test_a_call_that_does_not_pay_runs_as_it_is_written(on):
    on("cpu_bf16")
    with pytest.warns(AmpGraphWarning, match="runs in fp32, as bf16 is not profitable") as said:
        model, found, plain = converted("auto", 1)
    (told,) = own(said)
    assert told.filename == __file__  # the user's line, behind torch's modules, and not one of ours
    assert Policy.parse(str(told.message).rpartition("'")[0].rpartition("'")[2]).dtype == "bf16"
    assert all(torch.equal(one, plain) for one in found)
    assert conversion_of(model).runs == 1  # the others do not go by way of the graph
    (graph,) = amp_graph.report(model).graphs
    assert graph.predicted.left_alone
    assert not graph.casts
    assert {n.precision for n in graph.operations} == {"full"}
    assert graph.operations[0].reason.startswith("not profitable: with bfloat16 the graph is predicted to have")
    text = amp_graph.report(model).text()
    assert "left in full precision: low precision is not profitable on cpu_bf16" in text
    assert "note: calls for which bf16 is not profitable run in fp32" in text


@by_profit
@pytest.mark.parametrize("policy", ["bf16", "auto,skip_unprofitable=false", "auto-O2"])
def test_what_was_asked_for_is_done_whatever_it_takes(on, policy):
    on("cpu_bf16")
    model, found, plain = converted(policy, 1)
    assert not torch.equal(found[0], plain)
    assert conversion_of(model).runs == 3
    assert amp_graph.report(model).graphs[0].predicted is None or amp_graph.report(model).graphs[0].predicted.speed < 1


@by_profit
@pytest.mark.filterwarnings("ignore:amp_graph:amp_graph.errors.AmpGraphWarning")
def test_left_alone_a_model_is_what_it_was(on):
    """Gradients, hooks and edits of its code go as they always did; autocast around it is off, and no trace is made."""
    on("cpu_bf16")
    model, _, _ = converted("auto", 1)
    x = torch.randn(1, 256)
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    assert found.dtype == torch.float32
    found.sum().backward()
    assert model[0].weight.grad is not None
    with pytest.raises(CaptureError, match="cannot be traced"):
        torch.export.export(model, (x,))
    assert torch.equal(found, amp_graph.revert(model)(x))


@by_profit
@pytest.mark.filterwarnings("ignore:amp_graph:amp_graph.errors.AmpGraphWarning")
def test_moved_a_model_is_judged_anew(on):
    on("cpu_bf16")
    model, _, _ = converted("auto", 1)
    runs = conversion_of(model).runs
    assert model.to("meta")(torch.randn(1, 256, device="meta")).shape == (1, 256)
    assert conversion_of(model).runs == runs + 1


@by_profit
def test_fp16_on_a_cpu_is_left_alone_where_that_is_asked_for(on):
    on("cpu_amx")
    with pytest.warns(AmpGraphWarning, match="fp16 is not profitable"):
        model, found, plain = converted("fp16,skip_unprofitable=graphs", 512)
    assert torch.equal(found[-1], plain)
    assert amp_graph.report(model).graphs[0].predicted.speed < predict_time.WORTH_IT


@by_profit
def test_a_whole_step_is_left_alone(on):
    on("cpu_bf16")
    model, x = mlp(64), torch.randn(2, 64)
    exact = mlp(64)
    step = amp_graph.TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(AmpGraphWarning, match="runs in fp32, as bf16 is not profitable") as said:
        *losses, _ = [step(x[:rows], x[:rows]) for rows in (2, 2, 2, 1)]
    assert len(own(said)) == 1, "of the first capture alone"
    assert len(step.captured) == 2
    optimizer = torch.optim.SGD(exact.parameters(), lr=0.1)
    assert all(torch.equal(loss, descend(optimizer, F.mse_loss(exact(x), x))) for loss in losses)


@by_profit
@pytest.mark.filterwarnings("ignore:amp_graph:amp_graph.errors.AmpGraphWarning")
@pytest.mark.parametrize(
    ("name", "rows", "pays"), [("cpu", 512, False), ("cpu_bf16", 3, False), ("cpu_bf16", 512, True)]
)
def test_symbolic_sizes_are_judged_as_in_the_call_at_hand(on, name, rows, pays):
    on(name)
    model = amp_graph.convert(mlp(), "auto", dynamic=True)
    model(torch.randn(rows, 256))
    report = amp_graph.report(model)
    assert {n.precision for n in report.graphs[0].operations} == {"low" if pays else "full"}
    assert ("leaves such graphs" in report.text()) is False


@by_profit
@pytest.mark.filterwarnings("ignore:amp_graph:amp_graph.errors.AmpGraphWarning")
def test_a_small_batch_in_fp32_does_not_take_the_large_ones_with_it(on):
    on("cpu_bf16")
    model, many = mlp(), torch.randn(512, 256)
    exact = model(many)
    amp_graph.convert(model)
    for rows in (512, 3, 512, 5, 512):
        found = model(many[:rows])
        assert torch.equal(found, exact[:rows]) == (rows < 512) or torch.allclose(found, exact[:rows], 1e-5, 1e-6)
        assert (torch.dist(found, exact[:rows]) > 1e-4) == (rows == 512)


COMPILERS = ["aot_eager", "eager", lambda gm, inputs: gm.forward]


@by_profit
@pytest.mark.filterwarnings("ignore:amp_graph:amp_graph.errors.AmpGraphWarning")
@pytest.mark.parametrize("compile", COMPILERS, ids=["aot_eager", "eager", "a function"])
@pytest.mark.parametrize(("name", "pays"), [("cpu", False), ("cpu_bf16", True)])
def test_other_compilers_get_the_graph_that_is_predicted_to_be_faster(on, compile, name, pays):
    on(name)
    model = amp_graph.convert(mlp(), "auto", compile=compile)
    for rows in (512, 512, 300):
        model(torch.randn(rows, 256))
    assert {g.predicted.left_alone for g in amp_graph.report(model).graphs} == {not pays}
    if compile != "eager" and not pays:
        assert not conversion_of(model)._alone.kinds, "a compiler was asked for"


@by_profit
@pytest.mark.parametrize("policy", [None, "bf16"])
def test_the_backend_says_what_it_chose(on, policy):
    on("cpu")
    x, model = torch.randn(4, 256), mlp()
    options = {} if policy is None else {"options": {"policy": policy}}
    compiled = torch.compile(model, backend="amp_graph", **options)
    with heard() as said:
        found = compiled(x)
    assert torch.equal(found, model(x)) == (policy is None)
    assert any("a graph of torch.compile runs in fp32" in str(one.message) for one in own(said)) == (policy is None)


@by_profit
@pytest.mark.filterwarnings("ignore:amp_graph:amp_graph.errors.AmpGraphWarning")
def test_checkpoints_of_low_parameters_that_are_left_alone(on):
    on("cpu_bf16")
    model = amp_graph.convert(mlp(), "bf16,O2,skip_unprofitable=graphs")
    for _ in range(3):
        torch.utils.checkpoint.checkpoint(model, torch.randn(1, 256), use_reentrant=False).sum().backward()


@by_profit
@pytest.mark.filterwarnings("ignore:amp_graph:amp_graph.errors.AmpGraphWarning")
def test_sizes_in_containers_are_looked_at(on):
    on("cpu_bf16")

    @layers(lambda: dict(layer=mlp()))
    def Takes(self, batch):
        return self.layer(batch["x"])

    model = amp_graph.convert(Takes())
    with torch.no_grad():
        for _ in range(3):
            model({"x": torch.randn(1, 256)})
        runs = conversion_of(model).runs
        model({"x": torch.randn(4096, 256)})
    assert conversion_of(model).runs == runs + 1


@layers(lambda: dict(one=nn.Linear(64, 64), two=nn.Linear(64, 64)))
def Broken(self, x):
    h = self.one(x)
    torch._dynamo.graph_break()
    return self.two(h.relu())


@forward_of(Broken, escapes=torch._dynamo.disable(lambda self, h: self.two(h.relu()) @ h.t()))
def Uncaptured(self, x):
    return self.escapes(self.one(x))


@by_profit
@pytest.mark.filterwarnings("ignore:amp_graph:amp_graph.errors.AmpGraphWarning")
@pytest.mark.parametrize("compile", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", [Broken, Uncaptured])
def test_pieces_and_what_escapes_capture_stay_in_fp32_where_nothing_pays(on, kind, compile):
    on("cpu")
    model = kind()
    for rows in (2, 7, 30):
        x = torch.randn(rows, 64)
        exact = model(x)
        amp_graph.convert(model, compile=compile)
        assert torch.equal(model(x), exact)
        assert torch.equal(model(x), exact)
        amp_graph.revert(model)


@by_profit
@pytest.mark.filterwarnings("ignore:amp_graph:amp_graph.errors.AmpGraphWarning")
@pytest.mark.parametrize(("rows", "low"), [(2, False), (4096, True)])
def test_each_piece_is_judged_where_low_precision_pays(on, rows, low):
    on("cpu_bf16")
    model = amp_graph.convert(Broken())
    model(torch.randn(rows, 64)).sum().backward()
    first, *_ = amp_graph.report(model).graphs  # the second may have to take what code under autocast hands on
    assert first.operations[0].precision == ("low" if low else "full")


@pytest.mark.parametrize("sizes", [((0, 4, 8), (0, 8, 4)), ((3, 0, 8), (3, 8, 0)), ((2, 4, 0), (2, 0, 4))], ids=str)
def test_products_of_nothing_take_no_time(sizes):
    @forward_of(nn.Module)
    def Product(self, a, b):
        return torch.bmm(a, b)

    given = [torch.randn(size) for size in sizes]
    assert torch.equal(amp_graph.convert(Product(), "bf16")(*given), torch.bmm(*given))


def test_ragged_tensors_without_gradients():
    given = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    model = nn.Linear(8, 8)
    with torch.no_grad():
        exact = model(given).values()
        found = amp_graph.convert(model, "bf16")(given).values()
    assert (found - exact).norm() <= 0.01 * exact.norm()


def test_rates_of_another_device_are_not_those_of_a_gpu(monkeypatch, tmp_path):
    file = tmp_path / "machine.toml"
    monkeypatch.setenv("AMP_GRAPH_MACHINE", str(file))
    for time, device in enumerate(("cpu", "cuda"), 1):
        file.write_text(machine_text(replace(machine("cpu_bf16"), device=device)))
        os.utime(file, (time, time))
        plans = next(p for p in passes_for(Policy.parse("auto"), "cuda", eager=True) if isinstance(p, PlanPrecision))
        assert plans._knows_costs == (device == "cuda")
