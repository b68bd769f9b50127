"""Copies that are kept between the micro-batches of an update, as on a GPU, here on the CPU: bit for bit as casts."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.base import PassResult, VerifyError
from amp_graph.passes.profitability import thresholds
from amp_graph.passes.weights import batch_weight_casts, foreach_casts, group_copies, memory_access_hooks
from amp_graph.passes.weights.cache_weight_casts import CacheWeightCasts
from amp_graph.passes.weights.update_tracking import UPDATES

KEPT, CAST = "bf16", "bf16,skip=batch_weight_casts"
COUNT = 4  # weights and biases


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(batch_weight_casts, "LEAST_TRAINED", 3)
    monkeypatch.setattr(batch_weight_casts, "few_calls_are_profitable", lambda device: True)
    monkeypatch.setattr(batch_weight_casts, "keeping_between_updates_is_profitable", lambda *given: True)
    monkeypatch.setattr(CacheWeightCasts, "run", lambda self, gm: PassResult(gm))


@pytest.fixture
def casts(monkeypatch):
    """How many weights were cast together, by call."""
    seen, plain = [], foreach_casts.WeightGroup.cast
    monkeypatch.setattr(
        foreach_casts.WeightGroup,
        "cast",
        lambda self, low, weights: seen.append(len(weights)) or plain(self, low, weights),
    )
    return seen


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.last(F.gelu(self.first(x)))


def net(policy=KEPT):
    return amp_graph.convert(Net(), policy, strict=True)


def batch(seed=0):
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(seed))


def micro(model, seed=0):
    out = model(batch(seed))
    out.square().sum().backward()
    return out


def group_of(model):
    (found,) = conversion_of(model).copies.groups
    return found


def test_later_micro_batches_are_not_cast(casts):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for seed in range(4):
            micro(model, seed)
        assert casts == [COUNT] * 2, "the first, which has no gradients, and the second, which keeps them"
        casts.clear()
        optimizer.step()
        assert not group_of(model).kept
        optimizer.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "make", [torch.optim.SGD, torch.optim.AdamW, lambda p, lr: torch.optim.AdamW(p, lr, fused=True)]
)
def test_training_has_the_same_bits(make, set_to_none):
    def trained(policy):
        model = net(policy)
        optimizer = make(model.parameters(), 0.01)
        for turn in range(3):
            for seed in range(3):
                micro(model, 3 * turn + seed)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return list(model.parameters())

    assert all(map(torch.equal, trained(KEPT), trained(CAST)))


def fused(model):
    p = model.first.weight
    torch._fused_sgd_(
        [p], [torch.ones_like(p)], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=True,
    )  # fmt: skip


def unseen(model):
    """A write that moves no counter."""
    weight = model.first.weight
    version = weight._version
    with torch.no_grad():
        weight.mul_(2)
    plain = next(before for _, name, before in memory_access_hooks._undo if name == "_unsafe_set_version_counter")
    plain((weight,), (version,))


def replayed(model):
    memory_access_hooks._replay(lambda graph: unseen(model))(None)


def compiled_step(model):
    unseen(model)
    UPDATES.mark = object()


def load(model):
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


def replace(model):
    model.first.weight.data = model.first.weight.data.clone() * 2


def in_place(model):
    with torch.no_grad():
        model.first.weight.mul_(2)


WRITES = {
    "in place": in_place,
    "through data": lambda model: model.first.weight.data.mul_(2),
    "another memory": replace,
    "loaded": load,
    "a fused kernel": fused,
    "a replayed graph": replayed,
    "a compiled step": compiled_step,
    "an optimizer's step": lambda model: torch.optim.SGD(model.parameters(), 0.1).step(),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_between_micro_batches_is_read(name, casts):
    model = net()
    for _ in range(3):
        micro(model)
    assert casts == [COUNT] * 2
    WRITES[name](model)
    plain = amp_graph.convert(Net(), CAST)
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(micro(model), plain(batch()))
    assert len(casts) == 3


def test_control_stale_copies_are_seen(monkeypatch):
    monkeypatch.setattr(group_copies, "is_current", lambda kept, weight: True)
    with pytest.raises(AssertionError):
        test_what_is_written_between_micro_batches_is_read("in place", [COUNT] * 2)


def test_control_an_unseen_write_needs_a_mark():
    model = net()
    for _ in range(2):
        micro(model)
    before = micro(model)
    unseen(model)
    assert torch.equal(micro(model), before), "stale: nothing told of the write"


def test_while_a_cuda_graph_is_recorded_all_is_cast(monkeypatch, casts):
    model = net()
    for _ in range(2):
        micro(model)
    assert group_of(model).between.tensors
    monkeypatch.setattr(group_copies, "stream_of", lambda tensor: None)
    for _ in range(2):
        micro(model)
    assert casts == [COUNT] * 4
    assert not group_of(model).between.tensors


def test_another_stream_casts(monkeypatch, casts):
    model = net()
    for _ in range(2):
        micro(model)
    monkeypatch.setattr(group_copies, "stream_of", lambda tensor: 7)
    for _ in range(2):
        micro(model)
    assert casts == [COUNT] * 3


def test_memory_that_somebody_holds_is_cast(casts):
    model = net()
    alias = model.first.weight.data
    for _ in range(3):
        micro(model)
    assert casts == [COUNT] * 3
    assert not group_of(model).between.tensors
    del alias


def test_they_count_and_are_freed():
    model = net()
    for _ in range(2):
        micro(model)
    size = sum(2 * p.numel() for p in model.parameters())
    assert sum(t.nbytes for t in group_of(model).kept) == size
    assert amp_graph.memory.drop_weight_copies(model) >= size
    assert not group_of(model).kept


def test_a_graph_kept_for_a_second_backward_survives_the_step():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for _ in range(2):
        micro(model)
    out = model(batch())
    (before,) = torch.autograd.grad(out.sum(), model.first.weight, retain_graph=True)
    optimizer.step()
    micro(model, 1)
    assert torch.equal(before, torch.autograd.grad(out.sum(), model.first.weight)[0])


def test_verify_compares_what_is_read(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_VERIFY", "1")
    model = net()
    for _ in range(2):
        micro(model)
    group_of(model).between.tensors[0].mul_(2)
    with pytest.raises(VerifyError, match="a parameter of shape"):
        micro(model)


# -- the decision --------------------------------------------------------------------------------------------------


def reason(policy):
    model = net(policy)
    micro(model)
    done = {p.name: p.result.changes for p in conversion_of(model).graphs[0].rewritten.passes}
    return done["batch-weight-casts"][0].reason


def test_the_report_says_what_was_decided_and_why(monkeypatch):
    assert reason("bf16").startswith("with 3 others; kept between the micro-batches of an update: ")
    assert "MB of casts" in reason("bf16")
    monkeypatch.setattr(batch_weight_casts, "keeping_between_updates_is_profitable", lambda *given: False)
    assert "; cast at each call: " in reason("bf16")
    assert reason("bf16,weight_copies=true").endswith("weight_copies=true")


def test_casts_at_each_call_keep_nothing(monkeypatch, casts):
    monkeypatch.setattr(batch_weight_casts, "keeping_between_updates_is_profitable", lambda *given: False)
    model = net()
    for _ in range(3):
        micro(model)
    assert casts == [COUNT] * 3
    assert not group_of(model).kept


def test_when_it_is_profitable():
    gb = 1 << 30
    pays = thresholds.keeping_between_updates_is_profitable
    assert pays("cuda", 7 * gb, 4 * gb, 2 * gb), "Llama 1B, a micro-batch of one"
    assert not pays("cuda", 7 * gb, 64 * gb, 2 * gb), "a large batch: casts are a small part of it"
    assert not pays("cuda", 7 * gb, gb, 2 * gb), "kept copies would add to the peak at the end of backward"
    assert not pays("cuda", gb // 8, gb // 8, 0), "a check of the weights takes as long"
    assert not pays("cpu", 7 * gb, 4 * gb, 2 * gb)
