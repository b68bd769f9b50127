"""An error at any place of `convert`, `revert`, `TrainStep` and `MixedPrecisionOptimizer` changes nothing.

Each call of a function of the files that change something is made to raise, one at a time.
"""

import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture import conversion
from amp_graph.capture.conversion import conversion_of
from amp_graph.optim import master_weight_updates, master_weights, optimizer_guards
from amp_graph.scaling import mixed_precision_optimizer
from amp_graph.step import train_step

CHANGING = {
    *(m.__file__ for m in (conversion, master_weights, mixed_precision_optimizer, train_step, master_weight_updates)),
    *(m.__file__ for m in (optimizer_guards, sys.modules["amp_graph.convert"])),
}


class Fault(BaseException):
    """What no code expects, as an interrupt."""


class RaisesAt:
    """Has the n-th call of a function in `CHANGING` raise; counts them."""

    def __init__(self, n):
        self.n, self.count = n, 0

    def __call__(self, frame, event, arg):
        goes_on = sys.version_info < (3, 11) and frame.f_lasti >= 0  # a generator, in none of its blocks yet
        finalizes = frame.f_back is not None and frame.f_back.f_code.co_filename == weakref.__file__
        own = frame.f_code.co_filename in CHANGING and "genexpr" not in frame.f_code.co_name and not finalizes
        if event == "call" and own:
            if goes_on:
                return
            self.count += 1
            if self.count == self.n:
                raise Fault

    def run(self, act, *given):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            act(*given)
        except Fault:
            pass
        finally:
            sys.settrace(before)
        return self.count >= self.n


def state_of(model, optimizer):
    """All that is to stay: tensors by identity and memory, gradients, masters, attributes, hooks, groups and state."""
    hooks = ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
    return (
        [(n, id(p), p.dtype, p.data_ptr(), id(p.grad), _own(p)) for n, p in model.named_parameters()],
        [(n, id(b), b.data_ptr()) for n, b in model.named_buffers()],
        [(n, sorted(vars(m)), id(m.__dict__.get("forward"))) for n, m in model.named_modules()],
        [(id(vars(m)[kind]), [*vars(m)[kind].items()]) for m in model.modules() for kind in hooks],
        [(id(g), id(g["params"]), [*map(id, g["params"])]) for g in optimizer.param_groups],
        [(id(p), [(n, id(v), v.dtype) for n, v in s.items()]) for p, s in optimizer.state.items()],
        [*optimizer._optimizer_load_state_dict_pre_hooks.items()],
        [*optimizer._optimizer_load_state_dict_post_hooks.items()],
        sorted(vars(optimizer)),
    )


def _own(parameter):
    """Names of the attributes that are not Dynamo's."""
    return sorted(name for name in vars(parameter) if not name.startswith("_dynamo"))


def make(prepare=lambda model: None):
    """A model with gradients and an optimizer with state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    prepare(model)
    model.register_state_dict_post_hook(lambda *given: None)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    return model, optimizer


ACTS = {
    "convert": (lambda m, o, policy: amp_graph.convert(m, policy), lambda m, policy: None),
    "revert": (lambda m, o, policy: amp_graph.revert(m), amp_graph.convert),
    "TrainStep": (lambda m, o, policy: amp_graph.TrainStep(m, F.cross_entropy, o, policy), lambda m, policy: None),
    "MixedPrecisionOptimizer": (
        lambda m, o, policy: amp_graph.MixedPrecisionOptimizer(o),
        lambda m, policy: m.bfloat16() if policy == "by hand" else amp_graph.convert(m, policy),
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("act", "policy"),
    [
        *(("convert", policy) for policy in ("bf16", "bf16-O2", "bf16-O3")),
        *(("revert", policy) for policy in ("bf16-O2", "bf16-O3")),
        *(("TrainStep", policy) for policy in ("bf16", "fp16-O2")),
        *(("MixedPrecisionOptimizer", policy) for policy in ("bf16-O2", "by hand")),
    ],
)
def test_an_error_at_any_place_changes_nothing(act, policy):
    run, prepare = ACTS[act]
    given = (*make(lambda model: prepare(model, policy)), policy)
    run(*given)  # imports what is imported late
    n = 1
    while True:
        model, optimizer = make(lambda model: prepare(model, policy))
        before, converted = state_of(model, optimizer), conversion_of(model)
        if not RaisesAt(n).run(run, model, optimizer, policy):
            break
        if state_of(model, optimizer) != before or conversion_of(model) is not converted:
            raise AssertionError(f"{act} under {policy}: what call {n} raised left something behind")
        n += 1
    assert n > 10  # else nothing was made to raise


def test_a_users_handle_removes_its_hook_after_revert():
    model, seen = nn.Linear(4, 4), []
    handle = model.register_state_dict_post_hook(lambda *given: seen.append(1))
    amp_graph.revert(amp_graph.convert(model, "bf16-O2"))
    handle.remove()
    model.state_dict()
    assert not seen


def test_a_train_step_refused_for_hooks_leaves_the_model_unconverted():
    model = nn.Linear(4, 2)
    model.register_forward_hook(lambda *given: None)
    with pytest.raises(amp_graph.AmpGraphError, match="hooks"):
        amp_graph.TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), "bf16-O2")
    assert conversion_of(model) is None
    assert model.weight.dtype is torch.float32
