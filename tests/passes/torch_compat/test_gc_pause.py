"""The garbage collector waits while a graph is captured, and only then."""

import gc
import threading

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.passes.torch_compat.dynamo_settings import collector_waits


@pytest.fixture
def collections():
    """Takes note of each time that the collector ran, as often as by its default."""
    counted, before = [], gc.get_threshold()
    gc.set_threshold(700, 10, 10)

    def hears(phase, info):
        if phase == "start":
            counted.append(info["generation"])

    gc.callbacks.append(hears)
    yield counted
    gc.set_threshold(*before)
    gc.callbacks.remove(hears)


def first_call(kind, compile="eager"):
    model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)]), torch.randn(4, 8)
    if kind == "convert":
        return lambda: amp_graph.convert(model, "bf16", compile=compile)(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return lambda: amp_graph.TrainStep(model, lambda out: out.sum(), optimizer, "bf16", compile=compile)(x)


@pytest.mark.parametrize("kind", ["convert", "TrainStep"])
def test_nothing_is_collected_while_a_first_call_captures(kind, collections, monkeypatch):
    def collected():
        torch._dynamo.reset()
        collections.clear()
        first_call(kind)()
        return len(collections)

    collected()  # what is imported at the first capture
    waited = collected()
    monkeypatch.setattr(gc, "disable", lambda: None)  # control: a collector that goes on
    assert waited < collected() / 3
    assert gc.isenabled()


def test_it_is_on_again_after_an_error_and_off_where_it_was():
    with pytest.raises(ValueError, match="False"), collector_waits():
        raise ValueError(gc.isenabled())
    assert gc.isenabled()
    with collector_waits(False):
        assert gc.isenabled()
    gc.disable()
    try:
        with collector_waits():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_threads_whichever_ends_last_leaves_it_on(first):
    within, may_leave = threading.Barrier(3), [threading.Event(), threading.Event()]

    def captures(i):
        with collector_waits():
            within.wait()
            may_leave[i].wait()

    threads = [threading.Thread(target=captures, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    within.wait()
    for i in (first, 1 - first):
        may_leave[i].set()
        threads[i].join()
    assert gc.isenabled()


def test_compilers_that_take_minutes_have_a_collector():
    seen = []

    def backend(gm, example_inputs):
        seen.append(gc.isenabled())
        return gm

    first_call("convert", compile=backend)()
    assert seen == [True]
