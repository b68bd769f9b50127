"""The loops and the corpus with calls recorded as CUDA graphs: the bits of calls that are not."""

import re
import threading

import pytest
import torch

import amp_graph
from amp_graph.replay import recorder
from tests.corpus import CASES, make
from tests.measure import to_device
from tests.replay import loops
from tests.replay.loops import DECLINED, LOOPS
from tests.replay.test_loops import differences


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch):
    monkeypatch.setattr(loops, "DEVICE", ["cuda"])


@pytest.fixture
def recordings(monkeypatch):
    """Count recordings and replays."""
    made = {"recordings": 0, "replays": 0}
    plain = recorder.CudaRecorder.record

    def record(self, run, args):
        replay, results = plain(self, run, args)
        made["recordings"] += 1

        def counted():
            made["replays"] += 1
            replay()

        return counted, results

    monkeypatch.setattr(recorder.CudaRecorder, "record", record)
    return made


def run(name, word, monkeypatch):
    torch.manual_seed(0)
    models = []
    plain = loops.converted
    with monkeypatch.context() as patch:
        patch.setattr(loops, "converted", lambda *a, **k: models.append(plain(*a, **k)) or models[-1])
        found = LOOPS[name](word)
    return found, "\n".join(note for model in models for note in amp_graph.report(model).notes if "replay" in note)


@pytest.mark.parametrize("name", LOOPS)
def test_a_recorded_loop_has_the_bits_of_one_that_is_not(name, recordings, monkeypatch):
    found, notes = run(name, "true", monkeypatch)
    expected, _ = run(name, "false", monkeypatch)
    assert differences(found, expected) == [], notes
    if name in DECLINED:
        assert re.search(f"is not recorded.*({DECLINED[name]})", notes), notes
    else:
        assert recordings["replays"] >= 2, notes


@pytest.mark.parametrize("name", sorted(CASES)[::6])
def test_the_corpus_has_the_bits_of_autograd_or_a_reason(name, recordings):
    found = {}
    for word in ("false", "true"):
        model, args, kwargs = make(name)
        model.to("cuda")
        args, kwargs = to_device((args, kwargs), "cuda")
        amp_graph.convert(model, f"bf16,replay={word}")
        torch.manual_seed(1)
        found[word] = []
        for _ in range(7):
            model.zero_grad()
            loss = CASES[name].loss(model(*args, **kwargs))
            if "integer" not in CASES[name].tags:
                loss.backward()
            found[word] += [loss.detach().clone(), *(p.grad for p in model.parameters() if p.grad is not None)]
    notes = [note for note in amp_graph.report(model).notes if "is not recorded" in note]
    if differences(found["true"], found["false"]):  # kernels that add by atomics are not deterministic
        for a, b in zip(found["true"], found["false"], strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-2, atol=1e-2 * b.double().abs().max().item())
    assert notes or recordings["replays"] or not amp_graph.report(model).graphs


def test_a_thread_that_pins_memory_does_not_disturb_a_recording(recordings, monkeypatch):
    stop = threading.Event()

    def pin():
        while not stop.is_set():
            torch.empty(1000).pin_memory()

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        _, notes = run("simple", "true", monkeypatch)
    finally:
        stop.set()
        thread.join()
    assert recordings["replays"] >= 2
    assert "is not recorded" not in notes


def test_revert_gives_the_memory_back():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
    amp_graph.convert(model, "bf16,replay=true")
    for _ in range(6):
        model.zero_grad()
        model(torch.randn(4096, 1024, device="cuda")).sum().backward()
    assert any("1 recordings hold" in note for note in amp_graph.report(model).notes)
    amp_graph.revert(model)
    model.zero_grad()
    own = sum(p.numel() * 4 for p in model.parameters())
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= 1.05 * (before + own) + 2**25
