"""Products in full precision: what a machine gains by lowering them decides the level, and not whether it is told."""

import re

import pytest
import torch
from torch import nn

from amp_graph.audit.records import NOWHERE, Call, Totals
from amp_graph.audit.session import Audit
from amp_graph.audit.speed import missed_operations
from amp_graph.audit.speed.predicted_time import family_of, seconds_of
from amp_graph.passes.precision.machine_rates import MACHINES, machine_for
from amp_graph.passes.precision.predict_time import WORTH_IT
from tests.audit.running import trained


def findings_of(call, **modules):
    """Run ``call`` with a product in bfloat16 beside it; return what was found of products."""
    modules = nn.ModuleDict(modules)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            low = modules["low"](torch.randn(256, 256)).float().mean()
        return low + call(modules)

    report = trained(loss, modules.parameters()).report()
    assert not report.unseen
    return [f for f in report.findings if f.code.startswith("AMP6") or f.code == "AMP105"]


@pytest.mark.parametrize(("machine", "level"), [("cpu_amx", "warning"), ("cpu", "note")])
def test_it_is_a_warning_where_low_precision_is_profitable(machine, level, monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_MACHINE", str(MACHINES / f"{machine}.toml"))
    modules = {"low": nn.Linear(256, 256), "full": nn.Linear(256, 256)}
    (found,) = findings_of(lambda m: (torch.randn(256, 256) @ m["full"].weight).mean(), **modules)
    assert (found.code, found.level) == ("AMP601", level)
    assert ("not profitable" in found.text) == (level == "note")
    assert (found.evidence["seconds_low"] < found.evidence["seconds"]) == (level == "warning")
    # two looked-at steps; the gradient of the input is not asked for
    assert found.evidence["flops"] == 2 * 2 * 2 * 256**3


@pytest.mark.parametrize(("width", "level"), [(1024, "warning"), (8, "note")])
def test_a_model_that_is_called_outside_is_told_once_at_its_call_with_the_gain(width, level):
    """It is not trained, so it is a note, unless it takes a large part of the step."""
    full = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).requires_grad_(False)
    (found,) = findings_of(lambda m: m["full"](torch.randn(width, width)).mean(), low=nn.Linear(256, 256), full=full)
    assert (found.code, found.level, found.evidence["products"]) == ("AMP105", level, 2 * 2)
    line = test_a_model_that_is_called_outside_is_told_once_at_its_call_with_the_gain.__code__.co_firstlineno
    assert found.place.line == line + 4
    assert re.search(r"; bfloat16 is predicted to take \d+\.\d\d of their time on \S", found.text)


@pytest.mark.parametrize(("margin", "is_advised"), [(0.99, True), (1.01, False)])
def test_a_training_in_float32_is_advised_by_the_margin_of_conversions(margin, is_advised, monkeypatch):
    def unused():
        model = nn.Linear(512, 512)
        audit = trained(lambda: model(torch.randn(512, 512)).mean(), model.parameters())
        return next(f for f in audit.report().findings if f.code == "AMP606")

    speed = unused().evidence["speed"]
    assert speed > WORTH_IT
    monkeypatch.setattr(missed_operations, "WORTH_IT", speed * margin)
    assert unused().fix.startswith("with torch.autocast" if is_advised else "none: ")


def test_a_product_of_an_optimizer_is_its_own_business():
    class Whitening(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for p in (p for group in self.param_groups for p in group["params"]):
                p.grad = (p.grad @ p.grad.T) @ p.grad if p.dim() == 2 else p.grad
            return super().step(closure)

    model = nn.Linear(256, 256)
    optimizer = Whitening(model.parameters(), lr=0.1)
    with Audit() as audit:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(256, 256)).float().mean().backward()
            optimizer.step()
    assert [f.code for f in audit.report().findings if f.code.startswith("AMP6")] == []


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_torch_itself_casts_up_is_its_own_business(dropout):
    """Dropout in an attention on a CPU has no fused kernel: torch computes it by products in float32."""
    seen = []

    def attention(modules):
        q = modules["low"](torch.randn(2, 4, 64, 256))
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.nn.functional.scaled_dot_product_attention(*[modules["low"](q)] * 3, dropout_p=dropout)
        seen.append(found.dtype)
        return found.float().mean()

    codes = [f.code for f in findings_of(attention, low=nn.Linear(256, 256))]
    assert codes == ["AMP105"]  # of the call outside of the region
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize(("rows", "told"), [(64, 1), (2048, 2)])
def test_what_saves_little_of_the_step_is_not_told(rows, told):
    def two_products(modules):
        large = (torch.randn(4096, 512) @ modules["full"].weight).mean()
        return large + (torch.randn(rows, 512) @ modules["full"].weight).mean()

    found = findings_of(two_products, low=nn.Linear(256, 256), full=nn.Linear(512, 512))
    assert [f.code for f in found] == ["AMP601"] * told
    assert min(f.evidence["share"] for f in found) > 0.02


def test_what_is_small_is_not_told():
    assert findings_of(lambda m: (torch.ones(2, 2) @ torch.ones(2, 2)).mean(), low=nn.Linear(256, 256)) == []


@pytest.mark.parametrize(
    ("operator", "family"),
    [
        ("aten.addmm.default", "matmul"),
        ("aten.addmm_.default", "matmul"),
        ("aten._grouped_mm.default", "matmul"),
        ("aten.convolution_backward.default", "convolution"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", "attention"),
        ("aten._to_copy.default", "cast"),
        ("aten.t.default", ""),
        ("aten.view.default", ""),
        ("aten.gelu_backward.default", "activation"),
        ("aten.add.Tensor", "elementwise"),
        ("unknown.operator.default", "elementwise"),
        ("flex_attention", "elementwise"),
    ],
)
def test_each_operator_has_the_rate_of_its_family(operator, family):
    assert family_of(operator) == family


def test_a_product_takes_the_time_of_its_flops_or_of_its_bytes():
    machine = machine_for("cpu")
    rates, call = machine.rates, Call("aten.mm.default", "", NOWHERE, "forward", ("float32", "float32"), "float32")
    overhead = 3 * (machine.call + machine.product_call["float32"])
    large = seconds_of(call, Totals(calls=3, flops=10**12, bytes=10**6), machine)
    assert large == pytest.approx(10**12 / rates["matmul"]["float32"] + overhead)
    thin = seconds_of(call, Totals(calls=3, flops=10**6, bytes=10**12), machine)
    assert thin == pytest.approx(10**12 / rates["matvec"]["float32"] + overhead)
    assert seconds_of(call, Totals(calls=3, flops=10**12, bytes=10**6), machine, "float64") == pytest.approx(
        2 * (large - overhead) + overhead
    )
