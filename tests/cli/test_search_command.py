"""`amp-graph search`: a model, a batch and a loss function by name, and the policy that was found."""

import json

import pytest
import torch

from amp_graph.cli.main import main
from tests.search.made_up_times import low_takes

SOURCE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

def with_input():
    return build(), torch.ones(4, 32)

loss = nn.functional.cross_entropy
"""


@pytest.fixture
def _search_is_quick(monkeypatch):
    low_takes(0.5, monkeypatch)


@pytest.mark.usefixtures("_search_is_quick")
def test_a_batch_and_a_loss_are_read_and_the_answer_is_held_to_another_batch(tmp_path, capsys):
    path, batches = tmp_path / "search_models.py", [tmp_path / "one.pt", tmp_path / "two.pt"]
    path.write_text(SOURCE)
    for file in batches:
        torch.save((torch.randn(16, 32), torch.randint(8, (16,))), file)
    words = ["--batch", str(batches[0]), "--held-out", str(batches[1]), "--loss", f"{path}:loss", "--budget", "2"]
    state = ["--state", str(tmp_path / "state.json")]
    assert main(["search", f"{path}:build", *words, *state, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["policy"].startswith("bf16-O")
    assert 0 < told["held_out"] <= 1.1 * told["goal"]["error"]
    assert main(["search", f"{path}:build", *words, *state]) == 0
    printed = capsys.readouterr()
    assert f'model = amp_graph.convert(model, "{told["policy"]}")' in printed.out
    assert not printed.err.count("times fp32's speed")  # all of it was in the file


@pytest.mark.usefixtures("_search_is_quick")
def test_a_model_in_evaluation_mode_is_searched_without_gradients(tmp_path, capsys):
    path = tmp_path / "search_models.py"
    path.write_text(SOURCE)
    assert main(["search", f"{path}:with_input", "--eval", "--json", "--runs", "3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in told["trials"]] == ["bf16-O0", "bf16-O1"]
    assert not any("O2" in one["policy"] for one in told["trials"])
    assert told["freeze"]
    assert main(["search", f"{path}:with_input", "--eval", "--runs", "3"]) == 0
    assert 'amp_graph.freeze(amp_graph.convert(model, "bf16' in capsys.readouterr().out


@pytest.mark.usefixtures("_search_is_quick")
def test_a_model_whose_weights_are_drawn_is_the_same_when_the_search_goes_on(tmp_path, capsys):
    path, before = tmp_path / "search_models.py", torch.get_rng_state()
    path.write_text(SOURCE.replace("torch.manual_seed(0)", "pass"))
    words = ["search", f"{path}:with_input", "--runs", "2", "--state", str(tmp_path / "state.json")]
    assert main(words) == 0
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)  # as of another process
    assert main(words) == 0, capsys.readouterr().err


def test_a_batch_with_targets_needs_a_loss(tmp_path, capsys):
    path = tmp_path / "search_models.py"
    path.write_text(SOURCE)
    torch.save((torch.randn(16, 32), torch.randint(8, (16,))), tmp_path / "one.pt")
    assert main(["search", f"{path}:build", "--batch", str(tmp_path / "one.pt")]) == 1
    assert "--batch has 2 parts" in capsys.readouterr().err


def test_a_budget_that_is_none_is_refused(tmp_path, capsys):
    path = tmp_path / "search_models.py"
    path.write_text(SOURCE)
    assert main(["search", f"{path}:with_input", "--budget", "-1"]) == 1
    assert "legal: a number from 0" in capsys.readouterr().err
