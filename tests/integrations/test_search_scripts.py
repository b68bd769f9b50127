"""`amp-graph search --script` over trainers' scripts: the loss that it repeats is the one that the script printed."""

import copy
import re
import sys
from pathlib import Path

import pytest

from amp_graph.cli.script_steps import STEPS, first_steps
from amp_graph.policy import Policy
from amp_graph.run.script import execute, script_target
from tests.integrations.test_transformers import _alone

assert _alone  # a fixture


@pytest.mark.needs("accelerate", "lightning", "transformers")
@pytest.mark.parametrize(("name", "share"), [("accelerate", 0.5), ("lightning", 1), ("trainer", 1)])
def test_a_search_takes_the_loss_of_a_trainers_script(name, share, monkeypatch, capsys, tmp_path):
    """``share``: of the printed loss, where steps of two batches accumulate."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    source = (Path(__file__).with_name("audited") / f"with_{name}.py").read_text()
    path = str(tmp_path / f"search_with_{name}.py")
    Path(path).write_text(source.replace("bf16=True, ", ""))  # with which the Trainer puts autocast into the model
    execute(script_target(path), ["right"])  # imports draw random numbers
    capsys.readouterr()
    execute(script_target(path), ["right"])
    printed = [float(one) for one in re.findall(r"\d\.\d+", capsys.readouterr().out)]
    found = first_steps(script_target(path), ["right"], Policy())
    assert len(found.steps) == STEPS
    loss = found.steps[-1](copy.deepcopy(found.model), as_written=True)
    loss.backward()
    assert loss.item() == pytest.approx(share * printed[STEPS - 1], rel=1e-3)
    assert loss.item() != pytest.approx(share * printed[STEPS - 2], rel=1e-3)  # the control: another batch
