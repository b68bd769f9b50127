"""Large results in memory that is used again, made in parts: never while somebody has it, and the same numbers."""

import ctypes
import gc
import threading

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import VerifyError
from amp_graph.passes.backends.cpu.inference import chunk_upcast_linears, chunked_linear, prepack_weights
from amp_graph.passes.memory import huge_pages
from amp_graph.passes.memory.huge_pages import LargeResults
from amp_graph.passes.profitability import thresholds
from amp_graph.passes.torch_compat.cpu import multiplies_bf16
from amp_graph.passes.torch_compat.onednn import pack_linear_weight
from amp_graph.passes.weights.packed_copies import PARTS
from tests.memory_holders import SEEN

pytestmark = pytest.mark.skipif(
    not multiplies_bf16(), reason="no weight is packed on a CPU that does not multiply bf16"
)
X, Y = (torch.randn(2, 32, 24, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
KEEP = "bf16,keep_memory=true"
PLAIN = f"{KEEP},skip=reuse_output_buffers"


@pytest.fixture(autouse=True)
def small_results_are_large(monkeypatch):
    monkeypatch.setattr(thresholds, "LEAST_MAPPED", 4096)
    monkeypatch.setattr(prepack_weights, "panels_are_profitable", lambda *given: False)
    monkeypatch.setattr(chunk_upcast_linears, "outputs_at_once", lambda rows, outputs: 128)


class Head(nn.Module):
    """A language model's last layer, of a number of outputs that parts of 128 do not divide."""

    def __init__(self, bias=True, twice=False):
        super().__init__()
        self.first, self.last, self.twice = nn.Linear(24, 24), nn.Linear(24, 330, bias=bias), twice

    def forward(self, x):
        x = self.first(x).relu()
        return (self.last(x), self.last(x * 2)) if self.twice else self.last(x)


def pair(**how):
    torch.manual_seed(0)
    ours, theirs = Head(**how).eval(), Head(**how).eval()
    theirs.load_state_dict(ours.state_dict())
    return amp_graph.convert(ours, KEEP), amp_graph.convert(theirs, PLAIN)


@torch.no_grad()
def called(model, x=X, times=4):
    for _ in range(times):
        out = model(x)
    return out


def text_of(model):
    return amp_graph.report(model).graphs[0].text


def parts(model):
    return len(conversion_of(model).copies.packed[PARTS])


@pytest.mark.parametrize("verify", ["0", "1"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("x", [X, X[0], X[0, 0]], ids=["batch", "rows", "row"])
def test_parts_are_the_whole(x, bias, verify, monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_VERIFY", verify)
    monkeypatch.setattr(thresholds, "LEAST_MAPPED", 1024)
    ours, theirs = pair(bias=bias)
    for _ in range(4):
        found, expected = called(ours, x, 1), called(theirs, x, 1)
        assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
        assert torch.equal(found, found.bfloat16().float()), "rounded as before"
    assert parts(ours) == 3
    assert "linear_widened(" in text_of(ours)
    assert "packed_parts(" in text_of(ours)
    assert "widen(" in text_of(theirs)


def test_control_a_part_of_another_weight_is_seen(monkeypatch):
    monkeypatch.setattr(chunked_linear, "pack_linear_weight", lambda part: pack_linear_weight(part.flip(0)))
    ours, theirs = pair()
    assert not torch.allclose(called(ours), called(theirs), rtol=2**-7, atol=2**-7)


KEPT = {
    "itself": lambda out: out,
    "a view": lambda out: out[0, 1:3],
    "an alias": lambda out: out.detach(),
    "an array": lambda out: out.numpy(),
    "for backward": lambda out: (out.requires_grad_().square(), out.detach())[1],
}


@pytest.mark.parametrize("hold", KEPT.values(), ids=KEPT)
def test_what_somebody_has_is_not_written_over(hold):
    ours, _ = pair()
    called(ours)
    out = called(ours, times=1)
    kept = torch.as_tensor(hold(out))
    known = kept.clone()
    del out
    for _ in range(5):
        called(ours, Y)
        assert torch.equal(kept, known)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("hold", SEEN.values(), ids=SEEN)
def test_memory_that_somebody_has_without_a_tensor_is_not_written_over(hold):
    ours, _ = pair()
    called(ours)
    out = called(ours, times=1)
    known, place, kept = out.clone(), out.data_ptr(), [hold(out)]
    del out
    places = {called(ours, Y, times=1).data_ptr() for _ in range(4)}
    assert place not in places
    assert ctypes.string_at(place, 4 * known.numel()) == known.numpy().tobytes()
    kept.clear()


def test_control_what_looks_free_is_written_over(monkeypatch):
    monkeypatch.setattr(huge_pages, "is_free", lambda own: True)
    ours, _ = pair()
    called(ours)
    kept = called(ours, times=1)
    known = kept.clone()
    called(ours, Y)
    assert not torch.equal(kept, known)


def test_what_nobody_has_is_used_again():
    ours, theirs = pair()
    called(ours), called(theirs)
    places = {called(ours, x, 1).data_ptr() for x in (X, Y, X)}
    assert len(places) == 1
    out, places = None, []
    for _ in range(6):  # as in a loop: the last result goes once the next one is there
        out = called(ours, times=1)
        places.append(out.data_ptr())
    assert len(set(places)) == 2
    held = [called(ours, times=1) for _ in range(4)]
    assert len({one.data_ptr() for one in held}) == 4
    assert len(conversion_of(ours).copies.results.tensors) == 2
    assert not conversion_of(theirs).copies.results.tensors


def test_two_results_of_a_call_are_apart():
    ours, theirs = pair(twice=True)
    for _ in range(4):
        for found, expected in zip(called(ours, times=1), called(theirs, times=1), strict=True):
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


def test_other_sizes_have_memory_of_their_own():
    ours, theirs = pair()
    for x in (X, X[:, :30], X, X[:1], Y):
        torch.testing.assert_close(called(ours, x), called(theirs, x), rtol=2**-7, atol=2**-7)


def edit(model):
    with torch.no_grad():
        model.last.weight[300] = 2.0


def load(model):
    model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})


@pytest.mark.parametrize("write", [edit, load], ids=lambda f: f.__name__)
def test_writes_are_seen(write):
    ours, theirs = pair()
    before = called(ours).clone()
    write(ours), write(theirs)
    for _ in range(4):
        found = called(ours, times=1)
        assert not torch.allclose(found, before, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found, called(theirs, times=1), rtol=2**-7, atol=2**-7)
    assert parts(ours) == 3


def test_verification_compares_parts(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_VERIFY", "1")
    ours, _ = pair()
    called(ours)
    kept = list(conversion_of(ours).copies.packed[PARTS].values())[1]
    kept.low = pack_linear_weight(kept.low.to_dense() + 1)
    with pytest.raises(VerifyError, match="was written"):
        called(ours, times=1)


def test_memory_is_given_back():
    ours, theirs = pair()
    called(ours), called(theirs)
    size = conversion_of(ours).copies.bytes
    assert size == conversion_of(theirs).copies.bytes, "parts are no more than the whole"
    out = called(ours, times=1)
    known, results = out.clone(), out.numel() * 4
    assert amp_graph.memory.drop_weight_copies(ours) == size + 2 * results
    assert parts(ours) == 0
    called(ours, Y)
    assert torch.equal(out, known)
    results = conversion_of(ours).copies.results
    assert results.tensors
    del ours, out
    gc.collect()
    assert not results.tensors


def test_results_of_inference_mode_are_usable():
    ours, _ = pair()
    for _ in range(4):
        with torch.inference_mode():
            out = ours(X)
    out.mul_(2.0)
    out.requires_grad_().sum().backward()
    assert torch.equal(out.grad, torch.ones_like(out))


def test_no_results_are_kept_unless_asked_for():
    torch.manual_seed(0)
    model = amp_graph.convert(Head().eval(), "bf16")
    called(model)
    assert "widen(" in text_of(model)
    assert not conversion_of(model).copies.results.tensors


def test_threads_have_memory_of_their_own():
    ours, theirs = pair()
    expected = {id(x): called(theirs, x).clone() for x in (X, Y)}
    called(ours)
    wrong = []

    def call(x):
        for _ in range(200):
            with torch.no_grad():
                found = ours(x)
            if not torch.allclose(found, expected[id(x)], rtol=2**-7, atol=2**-7):
                wrong.append(found)

    threads = [threading.Thread(target=call, args=(x,)) for x in (X, Y, X, Y)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_shapes_that_are_alike_are_no_more():
    results = LargeResults()
    first = results.taken((4, 6), 0)
    pointer = first.data_ptr()
    del first
    assert results.taken((6, 4), 0).shape == (6, 4)
    assert results.taken((4, 6), 1).data_ptr() != pointer, "of another result"
