"""Steps that are recorded and replayed: the same bits as steps that run, on a GPU, or with a stand-in for one.

A CUDA graph runs nothing while it is recorded, and a replay reads and writes the memory that it was recorded with. The
stand-in keeps to both, so that what is not copied, or not recorded anew, shows on the CPU as well.
"""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import CaptureError
from amp_graph.replay import recorder, slots
from amp_graph.step import cuda_graph
from amp_graph.step.trace_step import StepBuilder
from tests.layers import layers
from tests.replay import stand_in
from tests.step.test_train_step import same

STEPS = 9  # three as they are, one recording, and replays
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@layers(
    lambda: dict(first=nn.Linear(6, 24), norm=nn.BatchNorm1d(24), last=nn.Linear(24, 3), drop=nn.Dropout(0.2)), seed=0
)
def Normed(self, x):
    """With buffers that forward writes, and dropout."""
    return self.last(self.drop(F.gelu(self.norm(self.first(x)))))


@pytest.fixture
def recordings(monkeypatch):
    """Let steps on the CPU be recorded by the stand-in; returns a list that has an entry for each recording."""
    monkeypatch.setattr(cuda_graph, "on_side_stream", lambda run, args: run(*args))
    monkeypatch.setattr("amp_graph.step.train_step.check_cuda_graph", lambda *_: None)
    return stand_in.install(monkeypatch).made


def trained(replayed, device="cpu", change=lambda step, i: None, sizes=(8,), **options):
    """Train some steps; return losses, parameters, buffers and the optimizer's state."""
    model = Normed().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"policy": "bf16", **options}
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, cuda_graph=replayed, **options)
    results = []
    for i in range(STEPS):
        change(step, i)
        x, y = (
            torch.randn(sizes[i % len(sizes)], 6, device=device),
            torch.randint(3, (sizes[i % len(sizes)],), device=device),
        )
        results.append(step(x, y))
    losses = [(r[0] if isinstance(r, tuple) else r).detach().clone() for r in results]
    state = [t for p in model.parameters() for t in optimizer.state[p].values()]
    return losses, [*model.parameters(), *model.buffers(), *state], results


CASES = {
    "bf16": {},
    "fp16": {"policy": "fp16", "clip_norm": 0.5},
    "O2": {"policy": "bf16-O2"},
    "micro-batches": {"micro_batches": 2},
    "outputs": {"outputs": True},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_replayed_steps_have_the_bits_of_steps_that_run(recordings, options):
    losses, tensors, results = trained(True, **options)
    assert len(recordings) == 1
    expected, others, _ = trained(False, **options)
    assert same(losses, expected)
    assert same(tensors, others)
    if "outputs" in options:  # what earlier steps returned is not overwritten by later ones
        assert len({out.sum().item() for _, out in results}) == STEPS


def slower(step, i):
    step.optimizer.param_groups[0]["lr"] = 0.01 / (1 + i)


def moved(step, i):
    if i == 6:
        p = step.model.last.weight
        p.data = p.data.clone() * 2


# What changes, and how many recordings are made.
CHANGES = {
    "learning rates": ({"change": slower}, 1),
    "shapes": ({"sizes": (8, 5)}, 2),
    "where parameters are": ({"change": moved}, 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_read_at_each_replay_or_recorded_anew(name, recordings):
    how, count = CHANGES[name]
    losses, tensors, _ = trained(True, **how)
    assert len(recordings) == count
    expected, others, _ = trained(False, **how)
    assert same(losses, expected)
    assert same(tensors, others)
    assert not same(losses, trained(False)[0])


def test_a_batch_that_is_not_copied_is_found(recordings, monkeypatch):
    monkeypatch.setattr(StepBuilder, "_batch_in", lambda self, args: ())
    monkeypatch.setattr(slots, "addresses_of", lambda args, numbers: [])
    assert not same(trained(True)[0], trained(False)[0])


def test_inputs_that_the_model_writes_to_are_written(recordings):
    @layers(lambda: dict(linear=nn.Linear(4, 4)))
    def Writes(self, x):
        x.add_(1)
        return self.linear(x)

    model = Writes()
    step = amp_graph.TrainStep(
        model, lambda out: out.square().mean(), torch.optim.SGD(model.parameters()), "bf16", cuda_graph=True
    )
    for _ in range(STEPS):
        x = torch.zeros(2, 4)
        step(x)
        assert torch.equal(x, torch.ones(2, 4))
    assert len(recordings) == 1


def test_what_cannot_be_recorded_is_an_error_that_says_so(recordings, monkeypatch):
    monkeypatch.setattr(stand_in.StandIn, "fails", "operation not permitted when stream is capturing")
    with pytest.raises(
        CaptureError, match=r"not permitted when stream is capturing\n  legal: .*\n  fix:   cuda_graph=False"
    ):
        trained(True)


class StreamCapture:
    """Stands for ``torch.cuda.graph``: CUDA forbids some calls while it is open, to all threads or to its own."""

    opened = None  # the capture that is open

    def __init__(self, graph, pool=None, stream=None, capture_error_mode="global"):
        self.mode, self.thread, self.broken = capture_error_mode, threading.get_ident(), False

    def __enter__(self):
        StreamCapture.opened = self

    def __exit__(self, *_):
        StreamCapture.opened = None
        if self.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    @classmethod
    def forbidden_call(cls):
        """What pinning memory and freeing an event do."""
        if cls.opened and (cls.opened.mode == "global" or cls.opened.thread == threading.get_ident()):
            cls.opened.broken = True


class Event:
    """In a reference cycle, so that only the garbage collector frees it, by a call that CUDA forbids."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        StreamCapture.forbidden_call()


@pytest.fixture
def captures(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph", StreamCapture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: type("Graph", (), {"replay": lambda self: None})())
    stream = type("Stream", (), {"wait_stream": lambda self, other: None})
    for name, found in (("Stream", stream), ("current_stream", stream), ("graph_pool_handle", tuple)):
        monkeypatch.setattr(torch.cuda, name, found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return recorder.CudaRecorder("cuda").record


def test_a_thread_that_pins_memory_does_not_end_a_recording(captures):
    def run(x):
        other = threading.Thread(target=StreamCapture.forbidden_call)
        other.start()
        other.join()
        return (x,)

    _, (out,) = captures(run, [1])
    assert out == 1
    StreamCapture.forbidden_call()
    with pytest.raises(recorder.CannotRecord, match="during capture"):
        captures(lambda: StreamCapture.forbidden_call(), [])


def test_nothing_is_collected_during_a_recording(captures):
    before = weakref.ref(Event())
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)  # collects at nearly every allocation

    def run():
        assert before() is None  # what was garbage before is gone
        Event()
        return [[] for _ in range(100)]

    try:
        assert len(captures(run, [])[1]) == 100
        assert gc.isenabled()
        gc.disable()
        captures(run, [])
        assert not gc.isenabled()  # a user who switched it off finds it off
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)


def test_a_recording_that_fails_switches_the_collector_on_again(captures):
    with pytest.raises(recorder.CannotRecord, match="ZeroDivisionError"):
        captures(lambda: 1 / 0, [])
    assert gc.isenabled()


def test_a_model_on_the_cpu_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(CaptureError, match=r"Linear has parameters on: cpu\n  legal: a model on a CUDA device"):
        amp_graph.TrainStep(model, None, torch.optim.SGD(model.parameters()), cuda_graph=True)


def test_several_ranks_are_refused():
    with pytest.raises(CaptureError, match="averaged over several ranks"):
        cuda_graph.check_cuda_graph(True, nn.ReLU(), object())


@on_gpu
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_on_a_gpu(options):
    losses, tensors, _ = trained(True, "cuda", **options)
    expected, others, _ = trained(False, "cuda", **options)
    assert same(losses, expected)
    assert same(tensors, others)
