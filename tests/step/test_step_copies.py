"""A TrainStep copied and pickled, and several made by threads at once."""

import copy
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import amp_graph
from amp_graph.errors import CaptureError
from tests.copied import WAYS, saved
from tests.step.test_train_step import Net, batches, build, parameters, same, with_step


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["bf16-O0", "fp16", "fp16-O2", "bf16-O3"])
@pytest.mark.parametrize("copied", WAYS)
def test_a_copy_trains_a_model_of_its_own(copied, policy):
    """With the optimizer's state, the masters and the loss scale of the moment; and the original goes on."""
    model, optimizer = build(optimizer=SGD if "O3" in policy else torch.optim.AdamW, fused=True)
    StepLR(optimizer, 2)  # which puts a step of its own into the optimizer
    scale = amp_graph.LossScale(2.0**10, growth_interval=2)
    step = amp_graph.TrainStep(
        model, F.cross_entropy, optimizer, policy, loss_scale=scale, clip_norm=1.0, micro_batches=2, outputs=True
    )
    given = list(batches(6))
    for one in given[:3]:
        step(*one)
    twin = copied(step)
    was = parameters(model)
    theirs = [twin(*one)[0].item() for one in given[3:]]
    assert same(was, parameters(model))
    assert twin.model is not model
    assert not same(was, parameters(twin.model))
    assert [step(*one)[0].item() for one in given[3:]] == theirs
    assert same(parameters(model), parameters(twin.model))
    assert step.state_dict() == twin.state_dict()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["fp16-O2", "bf16-O2"])
@pytest.mark.parametrize("first", [copy.deepcopy, saved])
@pytest.mark.parametrize("what", ["step", "model"])
def test_a_copy_of_a_copy_has_all_bits_of_its_masters(what, first, policy):
    model, _, step = with_step(build(), policy)
    for one in batches(3):
        step(*one)
    twin = copy.deepcopy(first(step)) if what == "step" else copy.deepcopy(first(model))
    theirs = twin.model if what == "step" else twin
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), theirs.state_dict().values(), strict=True)
    )
    assert any(hasattr(p, "_amp_graph_master") for p in theirs.parameters())


class Named(amp_graph.TrainStep):
    """With arguments of its own, and what it counts."""

    def __init__(self, name):
        self.name, self.count = name, 0
        super().__init__(*build(Net)[:1], F.cross_entropy, SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), "bf16")


def test_a_subclass_is_copied_with_what_it_has():
    step = Named("one")
    step.count, step.note = 3, ["later"]
    twin = copy.deepcopy(step)
    assert type(twin) is Named
    assert (twin.name, twin.count, twin.note) == ("one", 3, ["later"])
    assert twin.note is not step.note
    assert twin.model is not step.model


def test_what_is_copied_along_stays_one_object():
    model, optimizer, step = with_step(build(), "bf16")
    twin, other, its = copy.deepcopy((step, model, optimizer))
    assert twin.model is other
    assert twin.optimizer is its
    assert its.param_groups[0]["params"][0] is other.first.weight


def test_a_shallow_copy_is_another_step_of_the_same_model():
    model, optimizer, step = with_step(build(), "fp16")
    twin = copy.copy(step)
    assert twin.model is model
    assert twin.optimizer is optimizer
    assert twin.loss_scale is step.loss_scale
    other, _, alone = with_step(build(), "fp16")
    for i, one in enumerate(batches(4)):
        (twin if i % 2 else step)(*one)
        alone(*one)
    assert same(parameters(model), parameters(other))


def test_a_step_over_a_process_group_of_its_own_is_not_copied(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        model, optimizer = build()
        for group in (None, torch.distributed.group.WORLD):
            step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", process_group=group)
            assert copy.deepcopy(step).process_group is None
        group = torch.distributed.new_group([0])
        step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", process_group=group)
        with pytest.raises(CaptureError, match=r"its own process group(.|\n)*fix:"):
            pickle.dumps(step)
    finally:
        torch.distributed.destroy_process_group()


THREADS = """
import faulthandler, sys, threading
from contextlib import nullcontext
import torch.nn.functional as F
import amp_graph
from amp_graph.step import trace_step as build_step
from tests.step.test_train_step import Net, batches, build

if sys.argv[1] == "apart":
    build_step.one_capture_at_a_time = nullcontext
losses, start = [], threading.Barrier(4)

def steps(number):
    start.wait()
    for _ in range(2):
        model, optimizer = pairs.pop()
        step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", clip_norm=1.0)
        losses.append([step(*one).item() for one in batches(2)])

def converted(number):
    start.wait()
    for _ in range(4):
        model = amp_graph.convert(pairs.pop()[0], "bf16")
        for x, y in batches(2):
            F.cross_entropy(model(x), y).backward()

failed = []
threading.excepthook = failed.append
pairs = [build(Net) for _ in range(10)]
threads = [threading.Thread(target=work, args=(n,)) for n, work in enumerate([steps, steps, steps, converted])]
faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failed, failed
assert len(losses) == 6 and len({tuple(found) for found in losses}) == 1, losses
"""


def in_threads(how, seconds):
    """Run it in a process of its own: what races leave behind is no state to test in. One that hangs fails."""
    command = [sys.executable, "-c", THREADS, how, str(seconds)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_steps_and_models_that_are_captured_in_threads_at_once():
    done = in_threads("together", 200)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("known", [False, True])
def test_a_call_while_another_thread_traces(known):
    """A tracer of torch.fx patches all modules and raises a flag, for all threads."""
    model = Net()
    ((x, _),) = batches(1)
    exact = model(x)
    amp_graph.convert(model, "bf16", strict=True)
    if known:
        model(x)
    begun = threading.Event()

    def slow(a):
        begun.set()
        time.sleep(0.3)
        return a + 1

    thread = threading.Thread(target=lambda: make_fx(slow)(torch.ones(2)))
    thread.start()
    assert begun.wait(60)
    found = model(x)
    thread.join()
    assert not torch.equal(found, exact), "captured, in bf16"
    assert torch.equal(found, model(x))


@pytest.mark.slow
def test_control_traced_while_another_thread_captures():
    assert any(in_threads("apart", 20).returncode for _ in range(5)), "a wrong loss, an error or a deadlock"
