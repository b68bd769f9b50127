"""Callbacks that audit: the training keeps its bits, and the report is that of the trainer's own precision."""

import importlib
from pathlib import Path

import pytest
import torch

from amp_graph.errors import AmpGraphError
from tests.audit.running import run_script
from tests.audit.test_planted import assert_found_at_its_line
from tests.integrations import training
from tests.integrations.test_lightning import QUIET, loader, module
from tests.integrations.test_transformers import _alone, gpt2, trainer

assert _alone  # a fixture
STEPS = 6


@pytest.mark.needs("accelerate", "lightning", "transformers")
@pytest.mark.parametrize("name", ["accelerate", "lightning", "trainer"])
def test_a_fault_of_a_trainers_script_is_found_at_its_line_and_changes_no_bit(name):
    path = Path(__file__).with_name("audited") / f"with_{name}.py"
    run_script(path, "right", audited=False)  # the first run in a process imports, which draws random numbers
    assert_found_at_its_line(path)


def audit_of(trainers, **options):
    return importlib.import_module(f"amp_graph.integrations.{trainers}").AmpGraphAudit(**options)


def fit(callbacks, name="lightning.pytorch", made=None):
    """Train under Lightning's own bf16 autocast; return the module."""
    pl = importlib.import_module(name)
    found = made or module(pl=pl)
    how = {**QUIET, "enable_checkpointing": False, "max_steps": STEPS, "precision": "bf16-mixed"}
    pl.Trainer(callbacks=callbacks, **how).fit(found, loader(training.batches(STEPS)))
    return found


@pytest.mark.needs("lightning", "pytorch_lightning")
@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_is_audited_and_keeps_its_bits(name, tmp_path, capsys):
    plain = fit([], name)
    callback = audit_of(name.partition(".")[0], page=tmp_path / "audit.html", every=5)
    found = fit([callback], name)
    training.assert_same(training.weights(found.net), training.weights(plain.net))
    assert found.losses == plain.losses
    assert f"looked at steps 2, 3, 5 of {STEPS}" in capsys.readouterr().err
    assert "bf16" in (tmp_path / "audit.html").read_text()
    rows = {row.module: row for row in callback.report.rows}
    layer = rows["net.0"]  # as the LightningModule has it, although its step calls self.net
    assert {*layer.parameters} == {*layer.gradients} == {*layer.states} == {"float32"}
    assert {*layer.forward} == {*layer.flops} == {"bfloat16"}
    assert torch.autograd.backward.__module__ == "torch.autograd", "nothing of torch is replaced any more"


@pytest.mark.needs("lightning")
def test_an_error_under_lightning_ends_the_audit(capsys):
    found, callback = module(), audit_of("lightning")
    step = found.training_step

    def fails(batch, batch_idx):
        if batch_idx == 3:
            raise ValueError("of the training")
        return step(batch, batch_idx)

    found.training_step = fails
    with pytest.raises(ValueError, match="of the training"):
        fit([callback], made=found)
    assert callback.report.looked_at == [2, 3]
    assert "looked at steps 2, 3" in capsys.readouterr().err


@pytest.mark.needs("transformers", "accelerate")
def test_the_trainer_is_audited_and_keeps_its_bits(tmp_path, capsys):
    plain, found, callback = gpt2(), gpt2(), audit_of("transformers", page=str(tmp_path / "audit.html"))
    trainer(plain, tmp_path, max_steps=STEPS, bf16=True).train()
    trainer(found, tmp_path, None, callback, max_steps=STEPS, bf16=True).train()
    training.assert_same(training.weights(found), training.weights(plain))
    assert f"looked at steps 2, 3 of {STEPS}" in capsys.readouterr().err
    assert "bf16" in (tmp_path / "audit.html").read_text()
    rows = {row.module: row for row in callback.report.rows}
    (fc,) = [row for name, row in rows.items() if name.endswith("h.0.mlp.c_fc")]
    assert ({*fc.parameters}, {*fc.forward}, {*fc.states}) == ({"float32"}, {"bfloat16"}, {"float32"})


@pytest.mark.needs("lightning", "transformers")
@pytest.mark.parametrize("trainers", ["lightning", "transformers"])
def test_wrong_options_are_errors_before_a_training(trainers):
    with pytest.raises(AmpGraphError, match="every=-1"):
        audit_of(trainers, every=-1)
    with pytest.raises(AmpGraphError, match="no code 'AMP000'"):
        audit_of(trainers, ignore=["AMP000"])
