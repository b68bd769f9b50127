"""``mode=`` and ``options=``: what reaches Inductor, from every door, and what is refused before anything changes."""

import copy
import pickle

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import CaptureError, PolicyError
from tests.layers import layers

pytestmark = [  # what importing Inductor says, by torch 2.11 to 2.13
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*jit.script_method:DeprecationWarning"),
]


@layers(lambda: dict(linear=nn.Linear(8, 8)))
def Net(self, x):
    return self.linear(x).relu()


@pytest.fixture
def patches(monkeypatch):
    """The options that compile_fx was called with, each time; what it compiles runs as it is."""
    from torch._inductor import compile_fx

    seen = []

    def heard(gm, inputs, config_patches):
        seen.append(config_patches)
        return gm.forward

    monkeypatch.setattr(compile_fx, "compile_fx", heard)
    return seen


def converted(**how):
    return amp_graph.convert(Net(), "bf16", **{"compile": "inductor", **how})


def train_step(**how):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how = {"compile": "inductor", **how}
    return amp_graph.TrainStep(model, lambda out: out.square().mean(), optimizer, "bf16", **how)


def through_torch(mode=None, options=None):
    # torch.compile takes a mode or options.
    options = {"policy": "bf16", **(options or {}), **({"mode": mode} if mode else {})}
    return torch.compile(Net(), backend="amp_graph", options=options)


DOORS = {"convert": converted, "TrainStep": train_step, "torch.compile": through_torch}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_mode_and_options_reach_inductor(patches, door):
    mode, options = "max-autotune-no-cudagraphs", {"shape-padding": False, "coordinate_descent_tuning": False}
    door(mode=mode, options=options)(torch.randn(2, 8))
    (found,) = patches
    assert found["max_autotune"] is True  # the mode's
    assert found["shape_padding"] is False  # the user's, in torch.compile's other spelling
    assert found["coordinate_descent_tuning"] is False  # both: the user's option takes precedence


REFUSED = {
    "mode": ({"mode": "fast"}, r"unknown mode='fast'\n  legal: default, (?s:.*)\n  fix: "),
    "option": ({"options": {"max_autotun": True}}, r"unknown option 'max_autotun'\n  legal: (?s:.*)max_autotune"),
    "eager": ({"mode": "max-autotune", "compile": "eager"}, r"one of Inductor's, and compile='eager'(?s:.*)fix: "),
    "a callable": ({"mode": "max-autotune", "compile": print}, r"one of Inductor's, and compile='print'"),
    "no dictionary": ({"options": "max_autotune"}, r"options='max_autotune' is a str\n  legal: a dictionary"),
}


@pytest.mark.parametrize(("how", "told"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("door", [amp_graph.convert, amp_graph.TrainStep], ids=["convert", "TrainStep"])
def test_what_is_refused_changes_nothing(door, how, told):
    model = Net()
    before = {*vars(model)}
    more = () if door is amp_graph.convert else (torch.sum, torch.optim.SGD(model.parameters()))
    with pytest.raises(PolicyError, match=told) as caught:
        door(model, *more, policy="bf16", **{"compile": "inductor", **how})
    assert str(caught.value).startswith("convert: " if door is amp_graph.convert else "TrainStep: ")
    assert {*vars(model)} == before


@pytest.mark.parametrize("how", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}])
def test_a_step_is_recorded_as_a_whole_or_not_at_all(how):
    with pytest.raises(PolicyError, match=r"(?s)legal: mode='max-autotune-no-cudagraphs'.*cuda_graph=True"):
        train_step(**how)
    train_step(mode="max-autotune", options={"triton.cudagraphs": False})


def test_copies_and_pickles_keep_them(patches):
    model = converted(options={"shape_padding": False})
    step = train_step(options={"shape_padding": False})
    for one in [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(step)]:
        one(torch.randn(2, 8))
    assert [found["shape_padding"] for found in patches] == [False] * 3


def test_another_conversion_is_told_of_them():
    model = converted(options={"shape_padding": False})
    assert amp_graph.convert(model, "bf16", compile="inductor", options={"shape_padding": False}) is model
    with pytest.raises(CaptureError, match=r"compile='inductor' \(shape_padding=False\)"):
        amp_graph.convert(model, "bf16", compile="inductor")
    assert conversion_of(model).options == {"shape_padding": False}


def test_the_report_names_them():
    assert "compile=inductor (shape_padding=False)" in str(
        amp_graph.report(converted(options={"shape_padding": False}))
    )
    assert amp_graph.report(train_step(mode="max-autotune-no-cudagraphs")).compile.startswith("inductor (coord")
    assert amp_graph.report(converted()).compile == "inductor"
