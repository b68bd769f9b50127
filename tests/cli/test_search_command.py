"""`amp-graph search`: a model, a batch and a loss function by name, and the policy that was found."""

import json

import pytest
import torch

from tests.search.made_up_times import low_takes

SOURCE = """
import torch
from torch import nn

def drawn():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

def build():
    torch.manual_seed(0)
    return drawn()

def drawn_with_input():
    return drawn(), torch.ones(4, 32)

def with_input():
    return build(), torch.ones(4, 32)

loss = nn.functional.cross_entropy
"""


@pytest.fixture
def _search_is_quick(monkeypatch):
    low_takes(0.5, monkeypatch)


@pytest.mark.usefixtures("_search_is_quick")
def test_a_batch_and_a_loss_are_read_and_the_answer_is_held_to_another_batch(amp, tmp_path):
    batches = [tmp_path / "one.pt", tmp_path / "two.pt"]
    for batch in batches:
        torch.save((torch.randn(16, 32), torch.randint(8, (16,))), batch)
    words = ["--batch", str(batches[0]), "--held-out", str(batches[1]), "--loss", "FILE:loss", "--budget", "2"]
    state = ["--state", str(tmp_path / "state.json")]
    status, out, _ = amp("search", "FILE:build", *words, *state, "--json")
    assert status == 0
    told = json.loads(out)
    assert told["policy"].startswith("bf16-O")
    assert 0 < told["held_out"] <= 1.1 * told["goal"]["error"]
    status, out, err = amp("search", "FILE:build", *words, *state)
    assert status == 0
    assert f'model = amp_graph.convert(model, "{told["policy"]}")' in out
    assert not err.count("times fp32's speed")  # all of it was in the file


@pytest.mark.usefixtures("_search_is_quick")
def test_a_model_in_evaluation_mode_is_searched_without_gradients(amp):
    status, out, _ = amp("search", "FILE:with_input", "--eval", "--json", "--runs", "3")
    assert status == 0
    told = json.loads(out)
    assert [one["policy"] for one in told["trials"]] == ["bf16-O0", "bf16-O1"]
    assert not any("O2" in one["policy"] for one in told["trials"])
    assert told["freeze"]
    assert (
        'amp_graph.freeze(amp_graph.convert(model, "bf16'
        in amp("search", "FILE:with_input", "--eval", "--runs", "3")[1]
    )


@pytest.mark.usefixtures("_search_is_quick")
def test_a_model_whose_weights_are_drawn_is_the_same_when_the_search_goes_on(amp, tmp_path):
    before = torch.get_rng_state()
    words = ["search", "FILE:drawn_with_input", "--runs", "2", "--state", str(tmp_path / "state.json")]
    assert amp(*words)[0] == 0
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)  # as of another process
    assert amp(*words)[0] == 0


def test_a_batch_with_targets_needs_a_loss(amp, tmp_path):
    torch.save((torch.randn(16, 32), torch.randint(8, (16,))), tmp_path / "one.pt")
    status, _, err = amp("search", "FILE:build", "--batch", str(tmp_path / "one.pt"))
    assert (status, "--batch has 2 parts" in err) == (1, True)


def test_a_budget_that_is_none_is_refused(amp):
    status, _, err = amp("search", "FILE:with_input", "--budget", "-1")
    assert (status, "legal: a number from 0" in err) == (1, True)
