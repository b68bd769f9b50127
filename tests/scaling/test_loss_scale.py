"""The loss scale by itself: which options and states are legal, and what a change of options does to its counts."""

import copy
import pickle

import pytest
import torch

from amp_graph import LossScale
from amp_graph.errors import ScaleError
from amp_graph.passes.loss_scaling.scale_loss import inverse_of

LARGEST = float(torch.finfo(torch.float32).max)
# The nearest illegal and legal values of each option.
REFUSED = {
    "init_scale": [0.0, -1.0, float("inf"), float("nan"), 4e38, "8", True],
    "growth_factor": [1.0, 0.5, float("inf"), None],
    "backoff_factor": [0.0, 1.0, 1.5, float("nan")],
    "growth_interval": [0, 1.5, 2**31, True],
    "hysteresis": [0, 2.5, 2**31],
    "floor": [0.0, -1.0, float("inf")],
    "ceiling": [0.5, 4e38],
    "dynamic": [1, None],
}
LEGAL = {
    "init_scale": [1e-30, LARGEST, torch.tensor(4.0)],
    "growth_factor": [1.0001, 1e30],
    "backoff_factor": [1e-6, 0.9999],
    "growth_interval": [1, 2**31 - 1, 3.0],
    "hysteresis": [1, 2**31 - 1],
    "floor": [1e-30, 2.0],
    "ceiling": [1.0, LARGEST],
    "dynamic": [True, False],
}


def test_options_are_refused_right_outside_of_their_bounds():
    for name, values in REFUSED.items():
        for value in values:
            with pytest.raises(ScaleError, match=f"{name}="):
                LossScale(**{"floor": 1.0, "dynamic": False, name: value})
    for name, values in LEGAL.items():
        for value in values:
            LossScale(**{"floor": 1.0, "dynamic": False, name: value})


def test_a_static_scale_never_changes_and_keeps_its_options():
    scale = LossScale(8.0, dynamic=False, growth_interval=1).to(torch.device("cpu"))
    for bad in (0.0, 1.0, 0.0, 1.0):
        scale.update(torch.tensor(bad))
    assert scale.values()[0] == 8.0
    assert scale.options() == (2.0, 1.0, 2**31 - 1, 1, 0.0, LARGEST)
    assert LossScale(8.0, growth_factor=3.0, growth_interval=7).options()[:3] == (3.0, 0.5, 7)


def test_a_state_is_loaded_as_a_whole_or_not_at_all():
    state = LossScale(4.0, growth_interval=5, hysteresis=3).state_dict() | {
        "_growth_tracker": 9,
        "_hysteresis_left": 2,
        "_stuck": 2,
    }
    for device in (None, torch.device("cpu")):
        loaded = LossScale(8.0)
        if device is not None:
            loaded.to(device)
        loaded.load_state_dict(state)
        assert loaded.values() == (4.0, 9, 2, 0, 2)
        assert (loaded.growth_interval, loaded.hysteresis) == (5, 3)
    with pytest.raises(ScaleError, match="has no 'backoff_factor'; it has 'scale'"):
        loaded.load_state_dict({k: v for k, v in state.items() if k in ("scale", "growth_factor")} | {
            "growth_interval": 1, "_growth_tracker": 0})  # fmt: skip


def test_a_scale_is_set_as_a_number_and_as_a_tensor():
    for scale in (LossScale(8.0), LossScale(8.0).to(torch.device("cpu"))):
        scale.set(2.0)
        assert scale.values() == (2.0, 0, 1, 0, 0)
        scale.set(torch.tensor([[4.0]]))
        assert scale.values()[0] == 4.0
        for wrong in (torch.ones(2), torch.tensor(1.0, requires_grad=True), 0.0):
            with pytest.raises(ScaleError, match="new_scale"):
                scale.set(wrong)
        assert scale.values()[0] == 4.0
        for copied in (copy.deepcopy(scale), pickle.loads(pickle.dumps(scale))):
            assert copied.values() == scale.values()
            assert not copied.ready


def test_the_inverse_is_correctly_rounded():
    for value in (3.0, 2.0**-120, 1e30):
        scale = LossScale(value, dynamic=False).to(torch.device("cpu")).scale
        assert float(inverse_of(scale)) == float(torch.tensor(1.0 / float(torch.tensor(value)), dtype=torch.float32))
    with pytest.raises(ScaleError, match="no device yet"):
        _ = LossScale(3.0).scale
