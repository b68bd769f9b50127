"""What surrounds recordings: limits, reasons, the report, memory, failures."""

import gc
import weakref

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import PolicyError
from amp_graph.policy import Policy
from amp_graph.replay.eligibility import why_not_captured
from amp_graph.replay.guard_set import MOST
from tests.layers import layers
from tests.replay import stand_in


def model_of(word="true", width=6):
    model = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, 2))
    return amp_graph.convert(model, f"bf16,replay={word}", dynamic=False)


def steps(model, count, size=4, width=6):
    for _ in range(count):
        model.zero_grad()
        model(torch.randn(size, width)).square().mean().backward()


def notes_of(model):
    return "\n".join(note for note in amp_graph.report(model).notes if "replay" in note)


def test_a_call_is_recorded_at_its_fourth_sight(recorders):
    model = model_of()
    for count, recorded in ((3, 0), (1, 1), (5, 1)):
        steps(model, count)
        assert len(recorders) == recorded
    assert recorders[0].recorded == 2
    assert recorders[0].replayed == 12
    assert "replay=true: 1 recordings hold" in notes_of(model)


def test_at_most_eight_are_recorded_of_a_graph(recorders):
    model = amp_graph.convert(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 2)), "bf16,replay=true")
    for size in range(2, 12):
        steps(model, 5, size)
    assert len(recorders) == MOST + 1  # the first size has a graph of its own
    assert f"replay=true: {MOST + 1} recordings hold" in notes_of(model)


def test_reverting_and_dropping_frees_everything(recorders):
    model = model_of()
    steps(model, 6)
    held = [weakref.ref(t) for t in recorders[0].seen]
    recorders.clear()
    assert conversion_of(model).captured.replays.drop() > 0
    gc.collect()
    assert not [ref for ref in held if ref() is not None]
    assert "replay=true: 0 recordings" in notes_of(model)
    steps(model, 5)
    assert recorders
    replays = conversion_of(model).captured.replays
    amp_graph.revert(model)
    assert replays.bytes == 0


def test_a_call_that_waits_keeps_its_memory_when_all_is_dropped(recorders):
    model = model_of()
    steps(model, 6)
    x = torch.randn(4, 6)
    loss = model(x).square().mean()
    conversion_of(model).captured.replays.drop()
    model.zero_grad()
    loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    amp_graph.revert(model)
    amp_graph.convert(model, "bf16")
    model.zero_grad()
    model(x).square().mean().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))


def test_a_recording_that_fails_is_a_reason(recorders, monkeypatch):
    monkeypatch.setattr(stand_in.StandIn, "fails", "out of memory")
    model = model_of()
    steps(model, 6)
    assert "graph 0 is not recorded: out of memory" in notes_of(model)


def test_a_backward_whose_recording_fails_runs(recorders, monkeypatch):
    model = model_of()
    steps(model, 3)
    loss = model(torch.randn(4, 6)).square().mean()
    monkeypatch.setattr(stand_in.StandIn, "fails", "out of memory")
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert "graph 0 is not recorded: backward: out of memory" in notes_of(model)


def test_there_are_no_recordings_on_the_cpu():
    model = model_of()
    steps(model, 5)
    assert "graph 0 is not recorded: there are no CUDA graphs on cpu" in notes_of(model)
    assert "replay" not in "".join(amp_graph.report(amp_graph.convert(nn.Linear(2, 2))).notes)


def test_the_word(recorders):
    assert not Policy.parse("bf16").replays
    assert Policy(replay=True).replays
    assert not Policy.parse("O0,replay=true").replays
    with pytest.raises(PolicyError, match=r"replay value 'yes'\n  legal: false, true"):
        Policy.parse("replay=yes")


def test_a_copied_model_records_by_itself(recorders):
    import copy

    model = model_of()
    steps(model, 5)
    twin = copy.deepcopy(model)
    steps(twin, 5)
    assert len(recorders) == 2


@pytest.mark.parametrize("mode", ["anomaly", "hooks"])
def test_what_must_see_each_operation_does(recorders, mode):
    model = model_of()
    steps(model, 5)
    before = recorders[0].replayed
    around = {
        "anomaly": torch.autograd.set_detect_anomaly(mode == "anomaly", check_nan=False),
        "hooks": torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    }[mode]
    with around:
        steps(model, 1)
    assert recorders[0].replayed == before


def test_python_that_would_not_run_again_is_a_reason(recorders):
    graph = torch.fx.Graph()
    graph.output(graph.call_function(notes_of, (graph.placeholder("x"),)))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    assert "notes_of, Python code that would not run again" in why_not_captured(gm, [torch.ones(2)])


def test_a_custom_operator_is_a_reason(recorders):
    calls = []

    @torch.library.custom_op("tests_of_replay::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: grad * 2)

    @layers(lambda: dict(linear=nn.Linear(6, 2)))
    def Calls(self, x):
        return twice(self.linear(x))

    model = amp_graph.convert(Calls(), "bf16,replay=true")
    steps(model, 6)
    assert sum(calls) == 6
    assert "a custom operator, which may do more than launch kernels" in notes_of(model)


@pytest.mark.parametrize(("waiting", "recorded"), [(1, 1), (2, 2), (3, 2)])
def test_as_many_forwards_of_a_kind_as_wait_are_replayed_up_to_two(recorders, waiting, recorded):
    """The others run as they are, and all gradients are those without replays."""
    model, plain = model_of(), model_of("false")
    plain.load_state_dict(model.state_dict())
    steps(model, 4)
    xs = torch.randn(waiting, 4, 6)
    for _ in range(2):
        for one in (model, plain):
            one.zero_grad()
            sum(out.square().mean() for out in [one(x) for x in xs]).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert len(recorders) == recorded


@layers(lambda: dict(linear=nn.Linear(6, 5)))
def Several(self, x, n):
    h = self.linear(x).float()
    return h, h.relu().sum() * n, x, n


def test_outputs_that_are_given_back_and_gradients_of_any_layout(recorders):
    torch.manual_seed(0)
    model, plain = (amp_graph.convert(Several(), f"bf16,replay={word}") for word in ("true", "false"))
    plain.load_state_dict(model.state_dict())
    for loss in 4 * (
        lambda o: o[0].sum(),
        lambda o: o[1] * 2,
        lambda o: o[0].t().contiguous().t().square().sum() + o[1],
    ):
        x = torch.randn(4, 6)
        out, expected = model(x, 3), plain(x, 3)
        assert out[2] is x
        assert out[3] == 3
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        for p, q in pairs:
            (found,), (grad,) = (
                torch.autograd.grad(loss(o), of, retain_graph=True) for o, of in ((out, p), (expected, q))
            )
            assert torch.equal(found, grad)
    assert recorders[0].replayed


def test_inputs_that_are_written_between_forward_and_backward_are_an_error_as_in_autograd(recorders):
    @layers(lambda: dict(scale=nn.Parameter(torch.ones(6))))
    def Scales(self, x):
        return (x * self.scale).sum()

    model = amp_graph.convert(Scales(), "bf16,replay=true")
    for written in (False, False, False, False, True):
        x = torch.randn(4, 6)
        loss = model(x)
        if written:
            x += 1
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
    assert recorders[0].replayed
