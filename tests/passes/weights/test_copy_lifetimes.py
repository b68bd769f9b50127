"""How long weight copies live in training: the peak of live bytes is at most autocast's, and no bit changes."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import amp_graph
from amp_graph.capture.conversion import conversion_of

WIDTH, DEPTH = 512, 4
COPY = WIDTH * WIDTH * 2  # bytes
# What small parameters add: the copies of biases are kept, and autograd computes the last bias's gradient one node
# earlier than under autocast, where it is still in low precision.
OF_BIASES = DEPTH * WIDTH * 2 + WIDTH * 2

WORDS = 4096
OF_HEAD = WORDS * 6  # the same of the head: the bias's copy, and its gradient


class Net(nn.Module):
    """Linears whose copies are large enough to be freed; the first one is called ``times``."""

    def __init__(self, bias=True, times=1):
        super().__init__()
        self.times = times
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias) for _ in range(DEPTH))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        for _ in range(self.times - 1):
            x = self.layers[0](x)
        return x


class Tied(nn.Module):
    """Words whose table, of 8 MiB, is the head as well."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.words(x))


def made(policy, batch=4, net=Net, **options):
    torch.manual_seed(0)
    model = net(**options)
    x = torch.randn(batch, WIDTH) if net is Net else torch.arange(batch) % 3
    return (amp_graph.convert(model, policy, strict=True) if policy else model), x


def loss_of(model, x, policy):
    with contextlib.nullcontext() if policy else torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def step(model, x, policy, batches=1):
    for _ in range(batches):
        loss_of(model, x, policy).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.1)
            p.grad = None


def peak(policy, batches=1, batch=4, **options):
    """The most bytes that steps after the first ones hold at once, beyond the weights."""
    model, x = made(policy, batch, **options)
    for _ in range(2):
        step(model, x, policy, batches)
    if policy:
        amp_graph.memory.drop_weight_copies(model)  # the profiler sees no end of what began before
    held = top = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in range(3):
            step(model, x, policy, batches)
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            top = max(top, held)
    return top


def copies(model):
    return conversion_of(model).copies


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("batches", [1, 2, 3, 5])
def test_the_peak_is_at_most_autocasts(batches, times):
    assert peak("bf16", batches, bias=False, times=times) <= peak("", batches, bias=False, times=times)


@pytest.mark.parametrize("batches", [1, 3])
def test_the_peak_with_biases(batches):
    assert peak("bf16", batches) <= peak("", batches) + OF_BIASES


@pytest.mark.parametrize(("batches", "batch"), [(1, 1024), (5, 512)])
def test_the_peak_with_room_for_copies(batches, batch):
    assert peak("bf16", batches, batch, bias=False) <= peak("", batches, batch, bias=False)


@pytest.mark.parametrize("batches", [1, 3])
def test_the_gradients_of_a_tied_table_are_added_in_place(batches):
    assert peak("bf16", batches, 64, net=Tied) <= peak("", batches, 64, net=Tied) + OF_HEAD


@pytest.mark.multiplied  # elsewhere no linear of ours gives its weight the gradient in fp32
def test_control_added_to_a_view_they_are_above(monkeypatch):
    monkeypatch.setattr("amp_graph.passes.weights.cache_weight_casts._is_tied", lambda cast: False)
    assert peak("bf16", 1, 64, net=Tied) > 1.2 * peak("", 1, 64, net=Tied)


def test_control_kept_copies_are_above():
    assert peak("bf16,weight_copies=true") > 1.1 * peak("")


def test_copies_end_with_their_graph_and_the_report_says_so():
    model, x = made("bf16")
    for _ in range(2):
        loss_of(model, x, "bf16").backward()
        assert copies(model).bytes <= DEPTH * WIDTH * 2, "biases alone"
        model.zero_grad()
    (note,) = (note for note in amp_graph.report(model).notes if note.startswith("weight copies"))
    assert note == (
        "weight copies of graph 0: 2.0 MiB of 2.0 MiB are freed when backward needs them no more, as they would raise "
        "the peak of memory (backward frees 16.0 KiB of activations, allocates 4.0 MiB of gradients); "
        "weight_copies=true keeps them: fewer casts, more memory"
    )


def test_large_batches_make_room_for_copies_and_the_report_says_so():
    model, x = made("bf16", batch=8192, times=2)
    loss_of(model, x, "bf16").backward()
    assert copies(model).bytes >= DEPTH * COPY
    (note,) = (note for note in amp_graph.report(model).notes if note.startswith("weight copies"))
    assert "all 2.0 MiB stay until the next update and do not raise the peak of memory (backward frees" in note


def test_the_report_says_that_all_copies_are_kept_and_what_the_other_choice_is():
    model, x = made("bf16,weight_copies=true")
    loss_of(model, x, "bf16").backward()
    (note,) = (note for note in amp_graph.report(model).notes if note.startswith("weight copies"))
    assert note.startswith("weight copies: all stay until the next update, 2.0 MiB now; weight_copies=auto")


def test_copies_stay_where_gradients_exist_and_end_where_they_do_not():
    model, x = made("bf16", batch=1024)
    for _ in range(3):
        loss_of(model, x, "bf16").backward()
    assert copies(model).bytes >= 2 * COPY
    model.zero_grad()
    loss_of(model, x, "bf16").backward()
    assert copies(model).bytes < 2 * COPY


def test_training_is_bit_equal_to_kept_copies():
    found = []
    for policy in ("bf16", "bf16,weight_copies=true", "bf16,weight_copies=false"):
        model, x = made(policy)
        for batches in (1, 2, 1, 1):
            step(model, x, policy, batches)
        found.append(list(model.parameters()))
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def test_a_second_backward_and_a_second_forward_before_it():
    grads = []
    for policy in ("bf16", "bf16,weight_copies=false"):
        model, x = made(policy)
        one, other = loss_of(model, x, policy), loss_of(model, 2 * x, policy)
        one.backward(retain_graph=True)
        one.backward()
        other.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_inference_between_steps_keeps_copies_and_equals_plain_casts():
    """Without prepacked weights, which round otherwise."""
    found = []
    for copied in ("auto", "false"):
        policy = f"bf16,skip=prepack_weights,weight_copies={copied}"
        model, x = made(policy)
        step(model, x, policy)
        with torch.no_grad():
            found.append(model(x))
        if copied == "auto":
            assert copies(model).bytes >= DEPTH * COPY
            loss_of(model, x, policy).backward()
            assert copies(model).bytes <= DEPTH * WIDTH * 2, "a step frees what inference kept"
    assert torch.equal(*found)


def test_inference_with_prepacked_weights_is_the_same_before_and_after_training():
    trained, x = made("bf16")
    step(trained, x, "bf16")
    fresh = amp_graph.convert(amp_graph.revert(copy.deepcopy(trained)), "bf16")
    with torch.no_grad():
        assert torch.equal(trained(x), fresh(x))
