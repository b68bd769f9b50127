"""What is fuzzed of states: dicts that torch.load or json.load gave.

A state is loaded as a whole, and then saves again and trains; or it is refused, and nothing has changed.
"""

import copy
import json
import random
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from amp_graph.errors import ScaleError
from amp_graph.scaling.grad_scaler import GradScaler
from amp_graph.scaling.loss_scale import LossScale
from amp_graph.scaling.mixed_precision_optimizer import MixedPrecisionOptimizer
from amp_graph.step.train_step import TrainStep

NUMBERS = (None, True, 0, 1, -1, 2.5, 1e308, float("nan"), float("inf"), 10**400, 1 << 62, 1j, 2**31)
OBJECTS = ("x", "", b"x", (), [], {}, {1}, object, ..., [1, 2], {"scale": 1.0}, (0.9, 0.99))
ODD_TENSORS = (
    lambda: torch.tensor(2.0),
    lambda: torch.ones(3),
    lambda: torch.ones(4, 3, dtype=torch.float64),
    lambda: torch.ones(4, 3, dtype=torch.float16),
    lambda: torch.ones(4, 3, dtype=torch.complex64),
    lambda: torch.ones(4, 3, dtype=torch.int64),
    lambda: torch.ones(4, 3).to_sparse(),
    lambda: torch.full((), float("nan")),
    lambda: torch.ones(4, 3, device="meta"),
    lambda: torch.ones(0),
    lambda: torch.ones(4, 3, requires_grad=True) * 2,
)


def changed(rng: random.Random, state: Any) -> Any:
    """Change some places of nested dicts and lists: set, drop, copy, rename; now and then, all of it."""
    if rng.random() < 0.02:
        return _odd(rng)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        _change(rng, state)
    return state


def _odd(rng: random.Random) -> Any:
    kind = rng.random()
    found = rng.choice(NUMBERS) if kind < 0.4 else rng.choice(OBJECTS) if kind < 0.7 else rng.choice(ODD_TENSORS)()
    return copy.copy(found) if isinstance(found, (list, dict, set)) else found


def _change(rng: random.Random, place: Any) -> None:
    while isinstance(place, (dict, list)) and place:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.75:
            place = place[key]
            continue
        kind = rng.random()
        if kind < 0.6:
            place[key] = _odd(rng)
        elif kind < 0.8:
            del place[key]
        elif isinstance(place, dict):
            place[rng.choice(("params", "lr", "step", "scale", "state", 0, 7, None, "", "x"))] = place[key]
        else:
            place.append(place[key])
        return


def plain(state: Any) -> Any:
    """Return a state in a form that compares: tensors as dtype, shape and numbers."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape), repr(state.tolist())
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(one) for one in state] if isinstance(state, (list, tuple)) else repr(state)


def loaded_or_unchanged(target: Any, given: Any) -> None:
    """Load ``given``; where it is refused, the state must be as before."""
    before = plain(target.state_dict())
    try:
        target.load_state_dict(given)
    except Exception:
        assert plain(target.state_dict()) == before, "something has changed"
        raise


# -- loss scales -----------------------------------------------------------------------------------------------


def scale_state(rng: random.Random) -> Any:
    return changed(rng, LossScale(init_scale=1024.0, hysteresis=2).state_dict())


def use_scale_state(given: Any) -> None:
    scale = LossScale(hysteresis=3)
    scale.to(torch.device("cpu"))
    loaded_or_unchanged(scale, given)
    again = LossScale()
    again.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    assert again.state_dict() == scale.state_dict()
    loaded_or_unchanged(GradScaler("cpu"), given)


def step_state(rng: random.Random) -> Any:
    return changed(rng, {"loss_scale": LossScale().state_dict()})


@lru_cache
def _step() -> TrainStep:
    model = nn.Linear(3, 4)
    return TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), "fp16")


def use_step_state(given: Any) -> None:
    loaded_or_unchanged(_step(), given)


# -- optimizers ------------------------------------------------------------------------------------------------


def _optimizer() -> tuple[nn.Module, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters(), 0.01), loss_scale="dynamic")
    _train(model, optimizer)
    return model, optimizer


def _train(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> None:
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()


@lru_cache
def _optimizer_state() -> Any:
    return _optimizer()[1].state_dict()


def optimizer_state(rng: random.Random) -> Any:
    return changed(rng, copy.deepcopy(_optimizer_state()))


def use_optimizer_state(given: Any) -> None:
    model, optimizer = _optimizer()
    before = plain(model.state_dict())
    try:
        loaded_or_unchanged(optimizer, given)
    except Exception:
        assert plain(model.state_dict()) == before, "a parameter has changed"
        _train(model, optimizer)
        raise
    _train(model, optimizer)


PROMISED = (ScaleError,)
STATES = {
    "loss scales": (scale_state, use_scale_state, PROMISED),
    "train steps": (step_state, use_step_state, PROMISED, _step),
    "optimizers": (optimizer_state, use_optimizer_state, PROMISED, _optimizer_state),
}
