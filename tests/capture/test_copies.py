"""A converted model copied, pickled, loaded, averaged, and called by two threads."""

import copy
from operator import attrgetter

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from tests.by_hand import descend
from tests.capture.test_capture import assert_runs_low
from tests.capture.test_convert import Net
from tests.copied import WAYS, pickled
from tests.corpus import make
from tests.threads import in_threads


@pytest.mark.sampled(2)
@pytest.mark.parametrize("copied", WAYS)
@pytest.mark.parametrize("called", [False, True])
def test_a_copy_is_converted_and_its_own(copied, called):
    model, x = amp_graph.convert(Net(), "fp16,accuracy=fast,keep_outputs=false", strict=True), torch.randn(6, 16)
    if called:
        model(x)
    twin = copied(model)
    assert type(twin) is Net
    mine, theirs = conversion_of(model), conversion_of(twin)
    assert theirs is not mine
    assert theirs.model is twin
    options = attrgetter("policy", "compile", "dynamic", "strict")
    assert options(theirs) == options(mine)
    assert not theirs.graphs
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    assert all(p.data_ptr() != q.data_ptr() and torch.equal(p, q) for p, q in pairs)
    runs = mine.runs
    assert_runs_low(twin, x, dtype=torch.float16)
    assert mine.runs == runs
    assert_runs_low(model, x, dtype=torch.float16)


def test_a_copy_computes_with_its_own_weights():
    model, x = amp_graph.convert(Net().eval()), torch.randn(6, 16)
    before = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        twin.second.weight.zero_()
        twin.second.bias.fill_(2.0)
    assert torch.equal(twin(x), torch.full((6, 4), 2.0) + twin.shift)
    assert torch.equal(model(x), before)
    twin(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_model_that_holds_a_converted_one(copied):
    outer, x = nn.ModuleDict({"encoder": amp_graph.convert(Net()), "head": nn.Linear(4, 2)}), torch.randn(6, 16)
    twin = copied(outer)
    assert conversion_of(twin["encoder"]).model is twin["encoder"]
    assert_runs_low(twin["encoder"], x)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_tied_weights_stay_tied(copied):
    model, args, kwargs = make("tied_weights")
    twin = copied(amp_graph.convert(model, "bf16"))
    assert twin.head.weight is twin.embed.weight
    assert_runs_low(twin, *args, **kwargs)


def test_an_exponential_moving_average():
    model, x = amp_graph.convert(Net()), torch.randn(6, 16)
    model(x)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    start = model.first.weight.detach().clone()
    average.update_parameters(model)
    for _ in range(2):
        descend(optimizer, model(x).square().mean())
        expected = (average.module.first.weight.detach() + model.first.weight.detach()) / 2
        average.update_parameters(model)
        torch.testing.assert_close(average.module.first.weight.detach(), expected)
    assert not torch.equal(average.module.first.weight, start)
    assert average.module.first.weight.dtype == torch.float32
    assert_runs_low(average.module, x)


@pytest.mark.parametrize("called", [False, True])
def test_two_threads_call_one_model(called):
    """Also when it is captured there: each call of each thread runs the captured graph."""
    model, inputs = amp_graph.convert(Net().eval()), [torch.randn(6, 16), torch.randn(6, 16)]
    if called:
        model(inputs[0])
    results = {}

    def calls(i):
        def work():
            results[i] = [model(inputs[i]).detach() for _ in range(20)]

        return work

    in_threads(calls(0), calls(1))
    for i, x in enumerate(inputs):
        wanted = model(x)
        assert all(torch.equal(got, wanted) for got in results[i])
    assert not [note for note in amp_graph.report(model).notes if not note.startswith("torch's kernels in place of")]
