"""Compiled graphs, which are recorded by running autograd: the same bits as unrecorded."""

import pytest
import torch

import amp_graph
from amp_graph.replay.flat_call import ONCE, Tape
from tests.replay import stand_in
from tests.replay.loops import Net


@pytest.fixture
def recorders(monkeypatch):
    """Record with the stand-in, which needs autograd's graph for each replay: on a GPU kernels alone run again."""
    monkeypatch.setattr(Tape, "keeps", True)
    with torch._functorch.config.patch(donated_buffer=False):
        yield stand_in.install(monkeypatch).made


def trained(word, compile, loss_of, steps=9):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(drop=0.2 if compile != "inductor" else 0.0, norm=True)
    amp_graph.convert(model, f"bf16,replay={word}", compile=compile)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for i in range(steps):
        loss = loss_of(model, i)
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    notes = "\n".join(note for note in amp_graph.report(model).notes if "replay" in note)
    return [*found, *model.buffers()], notes


def first_output(model, i):
    return model(torch.randn(8, 6))[0].square().mean()


def outputs_in_turn(model, i):
    out, extra = model(torch.randn(8, 6))
    return extra * 3 if i % 3 == 2 else out.square().mean()


def two_forwards(model, i):
    return (model(torch.randn(8, 6))[0] - model(torch.randn(8, 6))[0]).square().mean()


def kept(model, i):
    loss = model(torch.randn(8, 6))[0].square().mean()
    if i > 5:
        loss.backward(retain_graph=True)
    return loss


CASES = [
    pytest.param("aot_eager", first_output, "", id="aot_eager"),
    pytest.param("aot_eager", two_forwards, "", id="two forwards", marks=pytest.mark.slow),
    pytest.param("aot_eager", outputs_in_turn, ONCE, id="outputs in turn", marks=pytest.mark.slow),
    pytest.param("aot_eager", kept, ONCE, id="kept", marks=pytest.mark.slow),
    pytest.param("inductor", first_output, "", id="inductor", marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("compile", "loss_of", "why"), CASES)
def test_a_compiled_graph_that_is_recorded_has_the_bits_of_one_that_is_not(compile, loss_of, why, recorders):
    found, notes = trained("true", compile, loss_of)
    assert sum(r.replayed for r in recorders) > 2, notes
    expected, _ = trained("false", compile, loss_of)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert why in notes
    assert bool(why) == ("is not recorded" in notes)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_nothing_is_recorded_where_inductor_records(mode, recorders):
    torch._dynamo.reset()
    model = amp_graph.convert(torch.nn.Linear(6, 2), "bf16,replay=true", compile="inductor", mode=mode)
    for _ in range(5):
        model(torch.randn(4, 6)).square().mean().backward()
    notes = "\n".join(note for note in amp_graph.report(model).notes if "replay" in note)
    assert bool(recorders) == (mode == "default"), notes
    assert ("Inductor records it" in notes) == (mode != "default")
