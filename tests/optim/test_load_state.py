"""The state of an optimizer is loaded as a whole, or refused with one error and nothing changed."""

import copy

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.errors import ScaleError

X = torch.ones(2, 3)


def trained(kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = amp_graph.MixedPrecisionOptimizer(kind(model.parameters(), **options), loss_scale="dynamic")
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.backward(model(X).square().mean())
    optimizer.step()
    optimizer.zero_grad()


WRONG = {
    "no exp_avg": lambda s: s["state"][0].pop("exp_avg"),
    "a number": lambda s: s["state"][0].update(exp_avg=1.0),
    "sparse": lambda s: s["state"][0].update(exp_avg=torch.ones(4, 3).to_sparse()),
    "complex": lambda s: s["state"][0].update(exp_avg=torch.ones(4, 3, dtype=torch.complex64)),
    "of the meta device": lambda s: s["state"][0].update(exp_avg=torch.ones(4, 3, device="meta")),
    "minus one step": lambda s: s["state"][1].update(step=-1),
    "minus one step in a tensor": lambda s: s["state"][1].update(step=torch.tensor(-1.0)),
    "steps without end": lambda s: s["state"][0].update(step=float("inf")),
    "steps of no number": lambda s: s["state"][0].update(step=torch.tensor([float("nan")])),
    "another shape": lambda s: s["state"][1].update(exp_avg=torch.ones(3)),
    "the rate a text": lambda s: s["param_groups"][0].update(lr="x"),
    "betas of one": lambda s: s["param_groups"][0].update(betas=(0.9,)),
    "no rate": lambda s: s["param_groups"][0].pop("lr"),
    "one parameter": lambda s: s["param_groups"][0].update(params=[0]),
    "parameters a number": lambda s: s["param_groups"][0].update(params=2),
    "two groups": lambda s: s["param_groups"].append(s["param_groups"][0]),
    "groups a dict": lambda s: s.update(param_groups={}),
    "no state": lambda s: s.pop("state"),
    "state a list": lambda s: s["state"].update({0: [1]}),
}


@pytest.fixture(scope="module")
def pairs():
    """A model and its optimizer that are given states which do not fit, and a pair that is left alone."""
    return trained(), trained()


@pytest.mark.parametrize("wrong", WRONG)
def test_a_state_that_does_not_fit_is_refused_and_training_goes_on(wrong, pairs):
    (model, optimizer), (alone, expected) = pairs
    state = copy.deepcopy(optimizer.state_dict())
    WRONG[wrong](state["optimizer"])
    state["loss_scale"]["scale"] = 8.0
    with pytest.raises(ScaleError, match=r"MixedPrecisionOptimizer: (?s:.*)legal: (?s:.*)fix: "):
        optimizer.load_state_dict(state)
    assert optimizer.state_dict()["loss_scale"] == expected.state_dict()["loss_scale"]
    for one, it in ((model, optimizer), (alone, expected)):
        step(one, it)
    assert all(map(torch.equal, model.parameters(), alone.parameters()))


@pytest.mark.parametrize("master", [torch.ones(4, 3).to_sparse(), torch.ones(4, 3).long(), torch.ones(4, 3) + 0j])
def test_masters_of_another_kind_are_refused(master):
    optimizer = trained()[1]
    with pytest.raises(ScaleError, match="masters"):
        optimizer.load_state_dict({**optimizer.state_dict(), "masters": [master, torch.ones(4)]})


def test_numbers_that_no_float_holds_are_refused():
    scale = amp_graph.LossScale()
    for name in ("scale", "ceiling", "growth_interval", "_stuck"):
        with pytest.raises(ScaleError, match="legal"):
            scale.load_state_dict({**scale.state_dict(), name: 10**400})
    scale.load_state_dict({**scale.state_dict(), "growth_factor": torch.tensor(4.0)})
    assert scale.state_dict()["growth_factor"] == 4.0
    assert type(scale.growth_factor) is float


class Lookahead(torch.optim.SGD):
    """Saves its state by names of its own, as torch_optimizer's Lookahead does."""

    def state_dict(self):
        fast = super().state_dict()
        return {"fast_state": fast["state"], "slow_state": {0: 1}, "param_groups": fast["param_groups"]}

    def load_state_dict(self, given):
        assert given["slow_state"] == {0: 1}
        super().load_state_dict({"state": given["fast_state"], "param_groups": given["param_groups"]})


def test_an_optimizer_with_a_format_of_its_own_loads_it():
    model, optimizer = trained(Lookahead, lr=0.1, momentum=0.9)
    saved = copy.deepcopy(optimizer.state_dict())
    other, resumed = trained(Lookahead, lr=0.5, momentum=0.9)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == 0.1
    for one, it in ((model, optimizer), (other, resumed)):
        step(one, it)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
