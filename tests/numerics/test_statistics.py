"""Statistics of a step: right numbers, of the steps that were asked for, in a training that stays the same."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import amp_graph
from amp_graph.errors import CaptureError
from tests.numerics.overflows import made


def step_of(name, kind="", policy="fp16", **options):
    model, batch = made(name, kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return amp_graph.TrainStep(model, cross_entropy, optimizer, policy, **options), batch


class Writer:
    def __init__(self):
        self.told = []

    def add_scalar(self, tag, number, step):
        self.told.append((tag, number, step))


def reference(model, batch, names):
    """Return the largest magnitudes of modules' outputs and their gradients in eager fp32, in eval mode."""
    kept = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: (out.retain_grad(), kept.__setitem__(name, out))[1:1] or None
        )
    cross_entropy(model(batch[0]), batch[1]).backward()
    return {name: (out.abs().max().item(), out.grad.abs().max().item()) for name, out in kept.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "modules"),
    [("mlp", ("first",)), ("cnn", ("conv",)), ("gpt", ("blocks.0.qkv", "blocks.1.mlp.0", "head"))],
)
def test_the_largest_magnitudes_are_those_of_values_and_gradients(name, modules):
    step, batch = step_of(name, loss_scale=2.0**8)
    step.model.eval()
    expected = reference(copy.deepcopy(step.model), batch, modules)
    found = amp_graph.report(step).statistics()
    step(*batch)
    rows = {(row["kind"], row["value"].rpartition("/")[0]): row for row in found.rows}
    for module, (value, gradient) in expected.items():
        assert rows["forward", module]["amax"] == pytest.approx(value, rel=0.01)
        assert rows["gradient", module]["amax"] == pytest.approx(gradient * 2**8, rel=0.01)
        assert rows["forward", module]["dtype"] == "f16"
    assert all(row["line"] for row in found.rows if row["value"].startswith("blocks"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"micro_batches": 5}, {"clip_norm": 1.0}])
def test_a_sampled_training_is_bit_for_bit_the_same(options):
    ran = []
    for sampled in (False, True):
        step, batch = step_of("mlp", **options)
        found = amp_graph.report(step).statistics(every=2) if sampled else None
        torch.manual_seed(3)
        losses = [step(*batch) for _ in range(5)]
        ran.append((losses, [p.detach() for p in step.model.parameters()], step.optimizer.state_dict()["state"]))
    for one, other in zip(*map(torch.utils._pytree.tree_leaves, ran), strict=True):
        assert torch.equal(one, other)
    assert sorted({row["step"] for row in found.rows}) == [1, 3, 5]
    assert found.missed == 0


def test_shares_are_those_of_the_low_precision():
    step, batch = step_of("mlp", "big", loss_scale=1.0)
    found = amp_graph.report(step).statistics()
    step(*batch)
    by_name = {(row["kind"], row["value"].rpartition("/")[0]): row for row in found.rows}
    assert by_name["forward", "plant"]["overflow"] == 1  # (|x| + 1) * 1e5
    assert by_name["forward", "first"]["overflow"] == 0
    assert by_name["forward", "second"]["overflow"] == 1  # what was infinite
    step, batch = step_of("cnn", loss_scale=2.0**-10)
    found = amp_graph.report(step).statistics()
    step(*batch)
    shares = [row["underflow"] for row in found.rows if row["kind"] == "gradient" and row["value"].startswith("conv/")]
    assert 0.5 < shares[0] <= 1


def test_a_writer_gets_each_sample_once():
    step, batch = step_of("mlp")
    writer = Writer()
    found = amp_graph.report(step).statistics(every=3, writer=writer, prefix="run")
    for _ in range(4):
        step(*batch)
    assert {step for _, _, step in writer.told} == {1, 4}
    assert len(writer.told) == 3 * len(found.rows)
    assert len({(tag, step) for tag, _, step in writer.told}) == len(writer.told)
    assert any(tag == "run/forward/first/linear/amax" for tag, _, _ in writer.told)
    found.detach()
    for _ in range(3):
        step(*batch)
    assert {step for _, _, step in writer.told} == {1, 4}


def test_forms_and_a_locator_beside_it():
    step, batch = step_of("mlp")
    found, locator = amp_graph.report(step).statistics(every=1), amp_graph.Locator(step)
    assert found.rows == []
    step(*batch)
    step(*batch)
    assert found.to_dict()["forward/first/linear"]["step"] == 2
    assert str(found).splitlines()[0].split() == ["value", "kind", "dtype", "amax", "underflow", "overflow"]
    assert len(str(found).splitlines()) == 1 + min(20, len(found.to_dict())) + (len(found.to_dict()) > 20)
    assert locator.skips == 0
    locator.detach()
    found.detach()
    assert step._watches == ()


def test_a_step_that_is_not_traced_whole_is_counted():
    step, (x, y) = step_of("mlp", max_graphs=3)
    found = amp_graph.report(step).statistics(every=1)
    for rows in (5, 4, 3, 2):
        step(x[:rows], y[:rows])
    assert found.missed == 2
    assert {row["step"] for row in found.rows} == {1, 2}


def test_what_cannot_be_sampled_is_refused_with_a_fix():
    step, _ = step_of("mlp")
    compiled, _ = step_of("mlp", compile="inductor")
    model = amp_graph.convert(made("mlp", "")[0], "bf16")
    for call, told in (
        (lambda: amp_graph.report(step).statistics(every=0), "every=0"),
        (lambda: amp_graph.report(step).statistics(writer=3), "a int has no add_scalar"),
        (lambda: amp_graph.report(compiled).statistics(), "compiled by 'inductor'"),
        (lambda: amp_graph.report(model).statistics(), "the report of MLP"),
    ):
        with pytest.raises(CaptureError, match=told) as raised:
            call()
        assert "fix:" in str(raised.value)
