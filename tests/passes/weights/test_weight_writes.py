"""Any elements of a weight, written by any way that Python has, between any two calls: the next call reads them."""

import copy
import ctypes
import gc
import random
import struct

import numpy as np
import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.inference import prepack_weights
from amp_graph.passes.torch_compat.cpu import multiplies_bf16
from amp_graph.passes.weights import memory_access_hooks
from amp_graph.passes.weights.held_weights import FOR_GOOD
from amp_graph.passes.weights.watched_memory import ADDRESS, OTHERS

packs = pytest.mark.skipif(not multiplies_bf16(), reason="nothing is packed on a CPU that does not multiply bf16")


def words(address, count):
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


# Each returns what has the memory of a parameter, as something whose elements can be set by a list of places.
HANDLES = {
    "data": lambda p: p.data.view(-1),
    "data in inference mode": lambda p: torch.inference_mode()(lambda: p.data)().view(-1),
    "data of a detached": lambda p: p.detach().data.view(-1),
    "a view of data": lambda p: p.data[None].unbind(0)[0].view(-1),
    "numpy": lambda p: p.detach().numpy().reshape(-1),
    "numpy by force": lambda p: p.numpy(force=True).reshape(-1),
    "asarray": lambda p: np.asarray(p.detach()).reshape(-1),
    "the array protocol": lambda p: p.detach().__array__().reshape(-1),
    "a capsule": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())).view(-1),
    "the DLPack protocol": lambda p: torch.from_dlpack(p.detach()).view(-1),
    "numpy by DLPack": lambda p: torch.from_numpy(np.from_dlpack(p.detach())).view(-1),
    "a storage": lambda p: torch.empty(0).set_(p.untyped_storage()),
    "a typed storage": lambda p: torch.empty(0).set_(p._typed_storage()._untyped_storage),
    "set_": lambda p: torch.empty(0).set_(p.detach()).view(-1),
    "unsafe_chunk": lambda p: torch.no_grad()(lambda: p.unsafe_chunk(1)[0])().view(-1),
    "unsafe_split": lambda p: torch.no_grad()(lambda: torch.unsafe_split(p, len(p))[0])().view(-1),
    "detach": lambda p: p.detach().view(-1),
    "as_strided": lambda p: torch.as_strided(p.detach(), (p.numel(),), (1,)),
}  # fmt: skip
ADDRESSES = {
    "data_ptr": lambda p: words(p.data_ptr(), p.numel()),
    "data_ptr of a view": lambda p: words(p.detach().view(-1).data_ptr(), p.numel()),
    "data_ptr of a storage": lambda p: words(p.untyped_storage().data_ptr(), p.numel()),
    "data_ptr of a typed storage": lambda p: words(p._typed_storage()._data_ptr(), p.numel()),
}


def through(handle):
    def write(p, places, value):
        handle(p)[places] = value

    return write


def apply(p, places, value):
    marks = torch.zeros(p.numel())
    marks[places] = 1
    marks = iter(marks.tolist())
    p.detach().apply_(lambda old: value if next(marks) else old)


def below_the_counter(p, places, value):
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):
        p.view(-1)[places] = value


def new_data(p, places, value):
    new = p.detach().clone()
    new.view(-1)[places] = value
    p.data = new


def data_of_numpy(p, places, value):
    new = p.detach().numpy().copy()
    p.data = torch.from_numpy(new)
    new.reshape(-1)[places] = value


def set_in_place(p, places, value):
    new = p.detach().clone()
    new.view(-1)[places] = value
    with torch.no_grad():
        p.set_(new)


def fused(p, places, value):
    """By a kernel of torch's optimizers, called without one."""
    grad = torch.zeros(p.numel())
    grad[places] = 1.0
    with torch.no_grad():
        options = {"weight_decay": 0.0, "momentum": 0.0, "lr": -value, "dampening": 0.0, "nesterov": False}
        torch._fused_sgd_([p], [grad.view(p.shape)], [], maximize=False, is_first_step=True, **options)


def foreach(p, places, value):
    grad = torch.zeros(p.numel())
    grad[places] = value
    with torch.no_grad():
        torch._foreach_add_([p], [grad.view(p.shape)])


def bytes_of_a_storage(p, places, value):
    storage = p.untyped_storage()
    for place in places[:8]:
        for i, byte in enumerate(struct.pack("f", value)):
            storage[4 * place + i] = byte


WRITES = {name: through(handle) for name, handle in HANDLES.items()} | {
    f.__name__: f
    for f in (apply, below_the_counter, new_data, data_of_numpy, set_in_place, fused, foreach, bytes_of_a_storage)
}


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


def mlp():
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))


def images():
    return Images()


ROWS, FEW = torch.randn(4, 96, 32), torch.randn(3, 32)
PICTURES = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
# What reads the weights: (model, input, whether it trains).
FORMS = {
    "copies": (mlp, ROWS, True),
    "packed": (mlp, ROWS, False),
    "panels": (mlp, FEW, False),
    "folded": (images, PICTURES, False),
}


@pytest.fixture
def form(request, monkeypatch):
    kind, x, trains = FORMS[request.param]
    if request.param == "packed":
        monkeypatch.setattr(prepack_weights, "panels_are_profitable", lambda *given: False)
    torch.manual_seed(0)
    ours = kind().train(trains)
    theirs = copy.deepcopy(ours)
    return amp_graph.convert(ours, "bf16"), amp_graph.convert(theirs, "bf16"), x, trains


def called(model, x, trains):
    """Output and gradients of a call, and of a look at it without gradients."""
    if not trains:
        with torch.no_grad():
            return [model(x)]
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def assert_reads_what_is_there(ours, theirs, x, trains):
    """The second makes all copies anew for each call."""
    amp_graph.memory.drop_weight_copies(theirs)
    for a, b in zip(called(ours, x, trains), called(theirs, x, trains), strict=True):
        assert torch.equal(a, b)


def some_of(p, choose):
    count = choose.choice((1, 1, 5, p.shape[-1], p.numel()))
    start = choose.randrange(p.numel() - count + 1)
    return choose.choice((list(range(start, start + count)), sorted(choose.sample(range(p.numel()), count))))


def weights_of(ours, theirs, choose):
    pairs = [(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True) if p.dim() > 1]
    return choose.choice(pairs)


def written_and_read(form, writes, seed=0):
    ours, theirs, x, trains = form
    choose = random.Random(seed)
    for _ in range(3):
        assert_reads_what_is_there(*form)
    changed = 0
    for name in choose.sample(sorted(writes), len(writes)):
        p, q = weights_of(ours, theirs, choose)
        places, value = some_of(p, choose), choose.uniform(1, 50)
        before = called(ours, x, trains)[0].clone()
        for weight in (p, q):
            writes[name](weight, places, value)
        assert_reads_what_is_there(*form)
        changed += not torch.equal(called(ours, x, trains)[0], before)
        assert_reads_what_is_there(*form)
    assert changed >= len(writes) / 3, "what was written was to matter"


ALL_FORMS = pytest.mark.parametrize("form", [pytest.param(f, marks=() if f == "copies" else packs) for f in FORMS],
                                    indirect=True)  # fmt: skip


@pytest.mark.sampled(2)
@ALL_FORMS
def test_what_is_written_is_read(form):
    for seed in (0, 1):
        written_and_read(form, WRITES, seed)


@pytest.mark.sampled(2)
@ALL_FORMS
def test_copies_are_kept_again_once_nobody_has_the_memory(form):
    ours, _, x, trains = form
    store = conversion_of(ours)
    for _ in range(2):
        called(ours, x, trains)
    handles = [HANDLES["data"](p) for p in ours.parameters()]
    for _ in range(FOR_GOOD):
        called(ours, x, trains)
    assert store.copies._held.calls
    assert "is cast at each call: something else holds its memory" in amp_graph.report(ours).text()
    del handles
    for _ in range(2):
        called(ours, x, trains)
    assert not store.copies._held.calls
    assert all(kept.signs.mark is kept.watch.mark for kept in store.copies._all() if kept.held is None)


@pytest.mark.sampled(2)
@ALL_FORMS
def test_garbage_that_has_the_memory_is_no_holder(form):
    """As a capture leaves it, in cycles, until somebody collects it."""
    ours, _, x, trains = form
    for _ in range(2):
        called(ours, x, trains)
    gc.disable()
    try:
        cycle = [p.data for p in ours.parameters()]
        cycle.append(cycle)
        del cycle
        for _ in range(FOR_GOOD + 2):
            called(ours, x, trains)
    finally:
        gc.enable()
    assert not conversion_of(ours).copies._held.calls
    assert "is cast at each call" not in amp_graph.report(ours).text()


@ALL_FORMS
def test_what_is_kept_and_written_later_is_read(form):
    ours, theirs, *_ = form
    choose = random.Random(0)
    for handle in (*HANDLES.values(), ADDRESSES["data_ptr"]):
        for _ in range(2):
            assert_reads_what_is_there(*form)
        p, q = weights_of(ours, theirs, choose)
        handles = [handle(weight) for weight in (p, q)]
        for _ in range(2):
            assert_reads_what_is_there(*form)
            places, value = some_of(p[:1], choose), choose.uniform(1, 50)
            for held in handles:
                held[places] = value
            assert_reads_what_is_there(*form)
        del handles, held


@pytest.mark.parametrize("name", ADDRESSES)
@pytest.mark.parametrize("form", ["copies"], indirect=True)
def test_an_address_is_never_taken_back_but_by_the_users_word(form, name):
    ours, theirs, x, trains = form
    for _ in range(2):
        assert_reads_what_is_there(*form)
    held = [ADDRESSES[name](model[0].weight) for model in (ours, theirs)]
    for value in (2.0, 3.0):
        for one in held:
            one[7] = value
        assert_reads_what_is_there(*form)
    del held
    called(ours, x, trains)
    assert f"0.weight is cast at each call: {ADDRESS}" in amp_graph.report(ours).text()
    amp_graph.memory.drop_weight_copies(ours)
    for _ in range(2):
        assert_reads_what_is_there(*form)
    assert not conversion_of(ours).copies._held.calls


@ALL_FORMS
def test_memory_that_others_have_from_the_start_is_read_at_each_call(form):
    """An array of numpy, and a buffer of which all are parts."""
    ours, theirs, *_ = form
    for _ in range(2):
        assert_reads_what_is_there(*form)
    arrays = []
    for model in (ours, theirs):
        p = next(p for p in model.parameters() if p.dim() > 1)
        arrays.append(p.detach().numpy().copy())
        p.data = torch.from_numpy(arrays[-1])
    for _ in range(2):
        for array in arrays:
            array.reshape(-1)[3:9] += 1.5
        assert_reads_what_is_there(*form)
    assert OTHERS in {why for why, _ in conversion_of(ours).copies._held.calls.values()}
    vectors = []
    for model in (ours, theirs):
        vectors.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        nn.utils.vector_to_parameters(vectors[-1], model.parameters())
    for _ in range(2):
        assert_reads_what_is_there(*form)
        for vector in vectors:
            vector[5:60] += 0.5
    assert_reads_what_is_there(*form)


@pytest.mark.parametrize("form", [f for f in FORMS if f != "copies"], indirect=True)
@packs
def test_the_same_input_and_weights_have_the_same_bits(form):
    """From the first call on; whatever another model's optimizer does; while somebody has the memory; and read anew."""
    ours, _, x, _ = form
    other = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(other.parameters(), 0.1), torch.optim.AdamW(other.parameters(), fused=True)]
    with torch.no_grad():
        first = ours(x)
        for _ in range(3):
            assert torch.equal(ours(x), first)
    for optimizer in optimizers:
        other(torch.randn(3, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(ours(x), first)
    held = [p.data for p in ours.parameters()]
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(ours(x), first)
        del held
        assert torch.equal(ours(x), first)
        amp_graph.memory.drop_weight_copies(ours)
        assert torch.equal(ours(x), first)


@packs
def test_another_models_optimizer_makes_no_copy_old():
    ours, other = amp_graph.convert(mlp().eval(), "bf16"), nn.Linear(2, 2)
    called(ours, ROWS, False)
    kept = conversion_of(ours).copies._all()
    other(torch.randn(3, 2)).sum().backward()
    torch.optim.AdamW(other.parameters(), fused=True).step()
    called(ours, ROWS, False)
    assert all(a is b for a, b in zip(kept, conversion_of(ours).copies._all(), strict=True))
    assert kept


@pytest.mark.parametrize("form", ["copies", pytest.param("packed", marks=packs)], indirect=True)
def test_control_accesses_that_nobody_notices_are_found(form, monkeypatch):
    monkeypatch.setattr(memory_access_hooks, "handed_out", lambda tensor: None)
    with pytest.raises(AssertionError):
        written_and_read(form, {"data": WRITES["data"]})


def test_a_step_graph_reads_what_is_written():
    torch.manual_seed(0)
    model = mlp()
    models = [model, copy.deepcopy(model)]
    ours, theirs = (
        amp_graph.TrainStep(m, lambda out: out.square().mean(), torch.optim.SGD(m.parameters(), 0.01), "bf16")
        for m in models
    )
    choose = random.Random(0)
    for name in [*WRITES, *ADDRESSES]:
        p, q = weights_of(*models, choose)
        places, value = some_of(p, choose), choose.uniform(1, 5)
        for weight in (p, q):
            WRITES.get(name, through(ADDRESSES.get(name)))(weight, places, value)
        theirs.refresh()
        assert torch.equal(ours(ROWS), theirs(ROWS)), name
        theirs.refresh()
        assert torch.equal(ours(ROWS), theirs(ROWS)), name


@pytest.mark.parametrize("how", ["data", "numpy", "a storage"])
def test_what_is_written_into_a_parameter_in_low_precision_outlasts_its_update(how):
    """At O2 optimizers update fp32 masters: what was written counts, and else the masters keep their bits."""
    torch.manual_seed(0)
    model = amp_graph.convert(mlp().train(), "bf16-O2")
    weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for turn in range(3):
        if turn == 1:
            before = model.state_dict()["0.weight"].clone()
            if how == "data":
                weight.data[3, 5] = 7.0
            elif how == "numpy":
                weight.detach().view(torch.int16).numpy()[3, 5] = torch.tensor(7.0).bfloat16().view(torch.int16)
            else:
                torch.empty(0, dtype=torch.bfloat16).set_(weight.untyped_storage())[3 * 32 + 5] = 7.0
        model(ROWS).square().mean().backward()
        optimizer.step()
    assert weight[3, 5] == 7.0
    after = model.state_dict()["0.weight"]
    assert after[3, 5] == 7.0
    assert (after != before).sum() == 1
    assert not torch.equal(after, after.bfloat16().float())


class DecaysItself(nn.Module):
    """Writes to a weight in its own forward, where it trains."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        if self.training:
            self.first.weight.data[3].mul_(5.0)
        return self.second(torch.relu(self.first(x)))


def test_what_a_captured_graph_writes_through_data_is_seen():
    model, x = DecaysItself(), torch.randn(16, 64)
    plain = copy.deepcopy(model)
    amp_graph.convert(model, "bf16")
    for trains in (False, False, True, False, True, True, False):
        for one in (model, plain):
            one.train(trains)
        with torch.set_grad_enabled(trains):
            found, exact = model(x), plain(x)
        assert (found - exact).norm() <= 0.02 * exact.norm()
