"""Weights cast once an update: never stale, bit-equal to casting at each call, and no cast where nothing changed."""

import contextlib
import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import CaptureError, VerifyError
from amp_graph.passes.weights import cast_cache, memory_access_hooks, update_tracking
from amp_graph.passes.weights.copy_lifetimes import Lifetimes
from tests.measure import CastCounter

OFF = "bf16,weight_copies=false"
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Linears, a convolution, a weight that two operations read, and a norm in fp32."""

    def __init__(self, width=32):
        super().__init__()
        self.first, self.norm = nn.Linear(16, width), nn.LayerNorm(width)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.twice = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.second = nn.Linear(width, 4)

    def forward(self, x):
        x = F.gelu(self.norm(self.first(x)))
        x = x + self.conv(x[:, None]).mean(1)
        return self.second(F.linear(torch.tanh(x @ self.twice), self.twice))


def pair(kind=Net, on="bf16", **options):
    """The same model converted with copies and without."""
    torch.manual_seed(0)
    plain = kind()
    ours = amp_graph.convert(copy.deepcopy(plain), on, strict=True, **options)
    return ours, amp_graph.convert(plain, OFF, strict=True, **options)


def assert_equal_step(ours, theirs, x=X):
    """Output and all gradients, summed over what was there, are equal bit for bit."""
    results = []
    for model in (ours, theirs):
        out = model(x)
        out.square().mean().backward()
        results.append(out.detach())
    assert torch.equal(*results)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert p.grad is q.grad is None if p.grad is None or q.grad is None else torch.equal(p.grad, q.grad), name


def assert_equal_output(ours, theirs, x=X):
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


def weight_casts(model, x=X, *, grad=False):
    """How many weights a call casts on the way forward."""
    with torch.set_grad_enabled(grad), CastCounter(model) as casts:
        model(x)
    return len(casts.of("forward", "weight"))


class DataSGD(torch.optim.Optimizer):
    """An optimizer of the old kind: it writes to `.data`."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad.data, alpha=0.01)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.01, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "writes to data": DataSGD,
}


def test_data_of_another_shape():
    """As Hugging Face's `resize_token_embeddings` gives it; the copies before it keep nothing of the old shape."""
    ours, theirs = pair()
    for _ in range(3):
        assert_equal_step(ours, theirs)
    for model in (ours, theirs):
        torch.manual_seed(3)
        for p in (model.second.weight, model.second.bias):
            p.data, p.grad = torch.randn(7, *p.shape[1:]), None
    for _ in range(3):
        assert_equal_step(ours, theirs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("width", [32, 512], ids=["small", "large"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bit_equal(name, width, micro_batches):
    ours, theirs = pair(lambda: Net(width))
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (ours, theirs)]
    for step in range(4):
        for micro in range(micro_batches):
            assert_equal_step(ours, theirs, X + step + micro)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert_equal_output(ours, theirs)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.isfinite().all(), "what diverges shows nothing"


def test_control_an_update_that_nobody_hears_of_is_missed(monkeypatch):
    """Fused AdamW leaves version counters alone: without the hook, this very test sees old weights."""
    ours, theirs = pair()
    optimizers = [torch.optim.AdamW(model.parameters(), 0.01, fused=True) for model in (ours, theirs)]
    assert_equal_step(ours, theirs)
    assert_equal_step(ours, theirs)
    version = ours.second.weight._version
    with monkeypatch.context() as deaf:
        for hears in (update_tracking, memory_access_hooks):  # who steps, and which kernels are called
            deaf.setattr(hears, "were_written", lambda tensors: None)
        for optimizer in optimizers:
            optimizer.step()
    assert ours.second.weight._version == version
    with torch.no_grad():
        assert not torch.equal(ours(X), theirs(X))
    update_tracking.weights_were_written(ours.parameters())
    assert_equal_output(ours, theirs)


def test_no_cast_where_nothing_changed():
    ours, theirs = pair()
    count = weight_casts(theirs)
    assert count == 7
    assert weight_casts(theirs) == count
    ours(X)
    for grad in (False, True, False):
        assert weight_casts(ours, grad=grad) == 0
    with torch.inference_mode(), CastCounter(ours) as casts:
        ours(X)
    assert not casts.of("forward", "weight")
    ours.eval()
    assert weight_casts(ours) == 0, "another captured graph reads the same copies"
    assert weight_casts(ours, X[:3]) == 0


def test_micro_batches_cast_no_weight_but_in_the_first():
    ours, _ = pair()
    optimizer = torch.optim.AdamW(ours.parameters(), fused=True)
    counts = []
    for _ in range(3):
        for _ in range(3):
            with CastCounter(ours) as casts:
                ours(X).sum().backward()
            counts.append(len(casts.of("forward", "weight")))
        optimizer.step()
    assert counts == [7, 0, 0] * 3


def test_training_without_micro_batches_casts_as_often_as_before():
    ours, theirs = pair()
    counts = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            with CastCounter(model) as casts:
                model(X).sum().backward()
            counts.append(casts.weight)
            optimizer.step()
    assert counts[:4] == counts[4:]


@contextlib.contextmanager
def swapped(model, values):
    """An exponential average in the parameters' place for a while, as libraries do it."""
    held = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, value in zip(model.parameters(), values, strict=True):
            p.copy_(value)
        yield
        for p, value in zip(model.parameters(), held, strict=True):
            p.copy_(value)


def load(model):
    torch.manual_seed(5)
    model.load_state_dict(Net().state_dict())


def assign(model):
    torch.manual_seed(5)
    model.load_state_dict(Net().state_dict(), assign=True)


def edit_one_element(model):
    with torch.no_grad():
        model.first.weight[3, 5] = 7.0


def edit_detached(model):
    model.second.weight.detach().mul_(2)


def edit_in_inference_mode(model):
    with torch.inference_mode():
        model.second.weight.mul_(2)


def initialise(model):
    torch.manual_seed(5)
    nn.init.normal_(model.second.weight)


def replace(model):
    torch.manual_seed(5)
    model.second.weight = nn.Parameter(torch.randn(4, 32))


def exchange_data(model):
    torch.manual_seed(5)
    model.second.weight.data = torch.randn(4, 32)


def exchange_data_twice(model):
    """The first storage is freed, and its address free for the second."""
    shape = model.second.weight.shape
    model.second.weight.data = torch.empty(0)
    model.second.weight.data = torch.full(shape, 0.25)


def transpose_data(model):
    model.twice.data = model.twice.data.t()


def to_and_back(model):
    model.double()
    model.float()


WRITES = [
    load, assign, edit_one_element, edit_detached, edit_in_inference_mode, initialise, replace, exchange_data,
    exchange_data_twice, transpose_data, to_and_back,
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_every_write_is_seen(write, grad):
    ours, theirs = pair()
    check = assert_equal_step if grad else assert_equal_output
    for _ in range(2):
        check(ours, theirs)
    with torch.no_grad():
        before = ours(X)
    for model in (ours, theirs):
        model.zero_grad()
        write(model)
    for _ in range(3):
        check(ours, theirs)
    if write is not to_and_back:
        with torch.no_grad():
            assert not torch.equal(ours(X), before)


def test_a_swapped_average():
    ours, theirs = pair()
    assert_equal_output(ours, theirs)
    torch.manual_seed(5)
    values = [torch.randn_like(p) for p in ours.parameters()]
    with swapped(ours, values), swapped(theirs, values):
        assert_equal_output(ours, theirs)
    assert_equal_output(ours, theirs)
    assert_equal_step(ours, theirs)


def unseen(model):
    """One element, as an extension in C that keeps an address would write it."""
    torch._C.TensorBase.data.__get__(model.twice)[0, 1] = 7.0


def test_a_write_that_nothing_in_python_shows_needs_the_stated_way():
    ours, theirs = pair()
    assert_equal_output(ours, theirs)
    for model in (ours, theirs):
        unseen(model)
    with torch.no_grad():
        assert not torch.equal(ours(X), theirs(X)), "found by itself: say so in the documentation"
    assert amp_graph.memory.drop_weight_copies(ours) > 0
    assert_equal_output(ours, theirs)


def test_the_check_mode_finds_it(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_VERIFY", "1")
    ours, theirs = pair()
    for _ in range(2):
        assert_equal_step(ours, theirs)
    unseen(ours)
    with pytest.raises(VerifyError, match=r"shape \(32, 32\) was written(.|\n)*legal(.|\n)*fix"):
        ours(X)
    amp_graph.memory.drop_weight_copies(ours)
    ours(X)


def deep():
    return nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))


def updated_before_backward(kind, on="bf16"):
    """Outputs and gradients of a call whose weights were written to before its backward, and of the one after."""
    results = []
    for model in pair(kind, on):
        for _ in range(2):
            model(X)
        x = X.clone().requires_grad_()
        out = model(x)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "norm" not in name:  # which backward reads itself
                    p.mul_(2)
        second = model(X)  # casts anew, while the first graph is alive
        first_grad = torch.autograd.grad(out.sum(), [x, *model.parameters()])
        results.append([out, second, *first_grad, *torch.autograd.grad(second.sum(), list(model.parameters()))])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", [lambda: Net(512), deep], ids=["read twice", "read once"])
def test_an_update_between_forward_and_backward_leaves_that_backward_its_weights(kind):
    """A copy that a backward still needs is not written over: large ones are otherwise cast into the old memory."""
    for on in ("bf16", "bf16,weight_copies=true"):
        assert updated_before_backward(kind, on)


@pytest.mark.parametrize("kind", [lambda: Net(512), deep], ids=["read twice", "read once"])
def test_control_a_copy_that_is_written_over_changes_that_backward(kind, monkeypatch):
    monkeypatch.setattr(cast_cache, "is_nobody_elses", lambda kept: True)
    assert not updated_before_backward(kind, "bf16,weight_copies=true")


def test_a_large_copy_is_cast_into_its_own_memory():
    ours, _ = pair(lambda: Net(512))
    for _ in range(3):
        ours(X).sum().backward()
    places = []
    for _ in range(3):
        with torch.no_grad():
            ours.twice.mul_(0.5)
        ours(X).sum().backward()
        places.append(max(conversion_of(ours).copies.tensors, key=torch.numel).data_ptr())
    assert len(set(places)) == 1


@pytest.mark.parametrize("width", [8, 192], ids=["small", "large"])
@pytest.mark.parametrize("when", [None, Lifetimes()], ids=["kept", "freed with each backward"])
def test_a_channels_last_copy_is_so_again_after_a_write(width, when):
    copies = cast_cache.WeightCopies(torch.bfloat16, when=when)
    weight = nn.Parameter(torch.randn(width, width, 3, 3))
    for _ in range(3):
        for _ in range(2):  # a small copy that is read only once is not made after a write
            low = copies.read(weight, last=True)
            assert low.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(low, weight.bfloat16())
        low.float().sum().backward()
        del low
        with torch.no_grad():
            weight.mul_(0.5)


def test_calls_whose_gradients_meet_are_added_in_fp32_as_without_copies():
    grads = []
    for model in pair():
        model(X)
        (model(X) + model(X + 1) * model(X - 1)).sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_second_derivatives():
    found = []
    for model in pair(lambda: nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))):
        for _ in range(2):
            out = model(X).sum()
            grads = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in grads), list(model.parameters())[:3])
        found.append([*grads, *second])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_gradients_in_batches():
    found = []
    for model in pair(lambda: nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))):
        for _ in range(2):
            out = model(X)
            parameters = list(model.parameters())
            rows = torch.eye(16).view(16, 8, 2)
            batched = torch.autograd.grad(out, parameters, rows, is_grads_batched=True)
        found.append(batched)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_copy_made_without_gradients_serves_training(context):
    """autograd refuses to save what inference_mode made; autocast's cache lost gradients (pytorch#158232)."""
    ours, theirs = pair()
    for _ in range(2):
        with context():
            assert torch.equal(ours(X), theirs(X))
        assert_equal_step(ours, theirs)
        assert all(p.grad is not None for p in ours.parameters())


def test_frozen_weights_and_those_that_train_again():
    ours, theirs = pair()
    for trained in (True, False, True, False):
        for model in (ours, theirs):
            model.zero_grad()
            model.second.requires_grad_(trained)
        results = []
        for model in (ours, theirs):
            x = X.clone().requires_grad_()
            model(x).sum().backward()
            results.append([x.grad, *[p.grad for p in model.parameters()]])
        for a, b in zip(*results, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
        assert (ours.second.weight.grad is not None) == trained


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_recomputes_reads_the_same_copy(reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    ours, theirs = pair(Checkpointed)
    x = X.clone().requires_grad_()
    for _ in range(2):
        assert_equal_step(ours, theirs, x)
    with CastCounter(ours) as casts:
        ours(x).sum().backward()
    assert not [c for c in casts.of(kind="weight") if c.target == torch.bfloat16], "recomputed forwards included"


def test_two_threads_while_a_third_writes():
    """Each result is that of the weights before or after a write, never of a mixture that no moment had."""
    model = amp_graph.convert(nn.Sequential(nn.Linear(16, 400), nn.Linear(400, 400), nn.Linear(400, 1)), "bf16")
    lock, errors, stop = threading.Lock(), [], threading.Event()

    def set_all(value):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(value)

    expected = {}
    for value in (0.25, 0.5):
        set_all(value)
        with torch.no_grad():
            expected[value] = model(X)
    current = [0.5]

    def reads():
        while not stop.is_set():
            with lock, torch.no_grad():
                if not torch.equal(model(X), expected[current[0]]):
                    errors.append("old weights")

    def writes():
        for turn in range(40):
            with lock:
                current[0] = (0.25, 0.5)[turn % 2]
                set_all(current[0])
        stop.set()

    threads = [threading.Thread(target=f) for f in (reads, reads, writes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors


def test_threads_that_train_one_model_together():
    ours, theirs = pair()
    for model in (ours, theirs):
        model(X).sum().backward()
        model.zero_grad()
        threads = [threading.Thread(target=lambda m=model: m(X).sum().backward()) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_model_has_copies_of_its_own_weights(copied):
    ours, theirs = pair()
    ours(X)
    twin = copied(ours)
    assert conversion_of(twin).copies is None
    assert_equal_output(twin, theirs)
    with torch.no_grad():
        twin.first.weight.zero_()
    assert_equal_output(ours, theirs)
    assert not torch.equal(twin(X), ours(X))
    assert list(ours.state_dict()) == list(Net().state_dict())


def test_copies_are_in_no_pickle_and_no_state_dict():
    ours, theirs = pair()
    ours(X), theirs(X)
    file = io.BytesIO()
    assert len(pickle.dumps(ours)) <= len(pickle.dumps(theirs))
    torch.save(ours.state_dict(), file)
    other = io.BytesIO()
    torch.save(theirs.state_dict(), other)
    assert len(file.getvalue()) == len(other.getvalue())
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert vars(p).keys() == vars(q).keys()


def test_copies_die_with_the_model_and_with_its_weights():
    ours, _ = pair()
    for _ in range(3):
        ours(X).sum().backward()
    low = [weakref.ref(t) for t in conversion_of(ours).copies.tensors]
    old = [weakref.ref(p) for p in ours.parameters()]
    assign(ours)
    for _ in range(2):
        ours(X).sum().backward()
    torch._dynamo.reset()
    gc.collect()
    assert not any(ref() is not None for ref in (*low, *old))
    assert amp_graph.report(ours).memory["weight copies"] > 0
    store = conversion_of(ours).copies
    amp_graph.revert(ours)
    assert store.bytes == 0


def test_memory_is_reported_and_given_back():
    ours, theirs = pair()
    ours(X), theirs(X)
    lowered = [ours.first.weight, ours.first.bias, ours.conv.weight, ours.conv.bias, ours.twice]
    size = sum(2 * p.numel() for p in (*lowered, ours.second.weight, ours.second.bias))
    told = amp_graph.report(ours)
    assert told.to_dict()["memory"]["weight copies"] == size
    assert "weight copies 3.4 KiB" in told.text()
    assert "7 of weights, all kept)" in told.text()
    assert "weight copies" not in amp_graph.report(theirs).to_dict()["memory"]
    assert "7 of weights)" in amp_graph.report(theirs).text()
    assert amp_graph.memory.drop_weight_copies(ours) == size
    assert "weight copies" not in amp_graph.report(ours).memory
    assert amp_graph.memory.drop_weight_copies(theirs) == 0
    with pytest.raises(CaptureError, match=r"not converted(.|\n)*fix"):
        amp_graph.memory.drop_weight_copies(Net())


def test_a_compiler_gets_plain_casts():
    ours = amp_graph.convert(Net(), "bf16", compile="aot_eager")
    ours(X)
    assert conversion_of(ours).copies is None
    assert "weight copies" not in amp_graph.report(ours).memory


def shared_memory(model):
    model.share_memory()


def in_one_buffer(model):
    """As FSDP, DeepSpeed and Megatron hold them: written to by way of the buffer."""
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())


@pytest.mark.parametrize("held", [shared_memory, in_one_buffer], ids=lambda f: f.__name__)
def test_weights_that_others_write_to_have_no_copies(held):
    ours, theirs = pair()
    for model in (ours, theirs):
        held(model)
    for _ in range(2):
        assert_equal_step(ours, theirs)
    assert weight_casts(ours) == weight_casts(theirs)
    assert "weight copies" not in amp_graph.report(ours).memory


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = nn.Linear(16, 16), nn.utils.parametrizations.weight_norm(nn.Linear(16, 4))

    def forward(self, x):
        halved = {name: p / 2 for name, p in self.net.named_parameters()}
        return self.head(torch.func.functional_call(self.net, halved, (x,)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_weights_that_are_computed_have_no_copies():
    ours, theirs = pair(Functional)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (ours, theirs)]
    for _ in range(3):
        assert_equal_step(ours, theirs)
        assert_equal_step(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()


class Returns(nn.Module):
    """What the forward returns, its caller may write to."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        turned = self.weight.t()
        return x @ turned, turned


def test_a_copy_is_never_handed_out():
    ours, theirs = pair(Returns, on="bf16,keep_outputs=false")
    amp_graph.revert(theirs)
    amp_graph.convert(theirs, OFF + ",keep_outputs=false")
    for _ in range(2):
        with torch.no_grad():
            for model in (ours, theirs):
                model(X)[1].zero_()
            assert torch.equal(ours(X)[0], theirs(X)[0])


def test_two_converted_models_share_weights():
    torch.manual_seed(0)
    one, other = Net(), Net()
    other.load_state_dict(one.state_dict())
    for mine, theirs in ((one.first, other.first), (one.second, other.second)):
        theirs.weight = mine.weight
    amp_graph.convert(one, "bf16"), amp_graph.convert(other, "fp16")
    with torch.no_grad():
        before = one(X), other(X)
        one.first.weight.zero_()
        after = one(X), other(X)
    for a, b in zip(before, after, strict=True):
        assert not torch.equal(a, b)
    assert torch.allclose(*after, atol=0.05)


def test_a_train_step_is_heard_of():
    """Its update is made by fused operators inside of a graph: no optimizer steps, no counter moves."""
    torch.manual_seed(0)
    net = Net()
    model = amp_graph.convert(copy.deepcopy(net), "bf16")
    for mine, theirs in zip(model.children(), net.children(), strict=True):
        mine.weight, mine.bias = theirs.weight, theirs.bias
    with torch.no_grad():
        before = model(X)
        assert torch.equal(model(X), before)
    step = amp_graph.TrainStep(
        net, lambda out: out.square().mean(), torch.optim.AdamW(net.parameters(), 0.1, fused=True), "bf16"
    )
    step(X)
    with torch.no_grad():
        assert not torch.equal(model(X), before)
        plain = amp_graph.convert(copy.deepcopy(amp_graph.revert(model)), OFF)
        amp_graph.convert(model, "bf16")
        assert torch.equal(model(X), plain(X))
