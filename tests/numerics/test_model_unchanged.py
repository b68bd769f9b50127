"""A model and its batches come back unchanged from each numerics function, also where one raises in the middle."""

import copy
import random
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import AmpGraphError
from amp_graph.model_state import ModelState, unchanged
from tests.layers import layers

# -- models, each of which writes something else in forward ------------------------------------------------------


class Writing(nn.Module):
    """Has what forward writes: a batch norm, buffers that it adds to and replaces, a weight, attributes, an input."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.last.weight.requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", None)
        self.calls, self.seen, self.options, self.kept = 0, [], {"n": {"calls": 0}}, torch.zeros(6)
        self.first.register_forward_hook(lambda module, given, out: out * 2)

    def forward(self, x):
        with torch.no_grad():
            self.first.weight.mul_(0.9)
            self.last.weight.data.clamp_(-0.3, 0.3)  # leaves the version counter as it is
        self.count += 1
        self.kept.add_(1)
        self.mean, self.output = x.detach().mean(0), x
        self.calls += 1
        self.seen.append(self.calls)
        self.options["n"]["calls"] += 1
        x.mul_(1.5)
        return self.last(F.dropout(self.norm(self.first(x)), 0.25, self.training))


class Broken(Writing):
    """Breaks the graph, and draws numbers of Python."""

    def forward(self, x):
        out = super().forward(x)
        print("", end="")
        return out * (1.0 + random.random())


@layers(lambda: dict(norm=nn.BatchNorm1d(6).requires_grad_(False).eval(), last=nn.Linear(6, 3).requires_grad_(False)))
def Frozen(self, x):
    """Trains nothing, and is in eval mode in part."""
    return self.last(self.norm(x))


def state(model, batches):
    """Return what must be as before, with the values as lists: NaN would be unequal to itself."""

    def told(t):
        return None if t is None else (id(t), t.requires_grad, t.is_leaf, str(t.dtype), t.detach().flatten().tolist())

    found = {"random": (torch.get_rng_state().tolist(), random.getstate()), "grad mode": torch.is_grad_enabled()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            value = {k: id(v) for k, v in value.items()} if key.startswith("_") and isinstance(value, dict) else value
            found[name, key] = told(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    found |= {("tensor", n): (told(t), told(t.grad)) for n, t in (*model.named_parameters(), *model.named_buffers())}
    return found | {("batch", i, j): told(t) for i, batch in enumerate(batches) for j, t in enumerate(batch)}


def fails_later(out, y):
    if y.shape[0] == 5:
        raise ZeroDivisionError("of the user's")
    return F.mse_loss(out, y)


CALLS = {
    "calibrate": lambda model, batches, loss: amp_graph.calibrate(model, batches, loss),
    "compare": lambda model, batches, loss: amp_graph.compare(model, batches, loss),
    "bisect": lambda model, batches, loss: amp_graph.bisect(model, batches, loss, tolerance=0.5),
    "locate": lambda model, batches, loss: amp_graph.locate(model, batches[-1], loss, policy="fp16"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [Writing, Broken, Frozen])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.filterwarnings("ignore::amp_graph.errors.AmpGraphWarning")
def test_all_is_as_before(kind, name, fails):
    model = kind()
    if kind is not Frozen:
        F.mse_loss(model(torch.randn(4, 6)), torch.randn(4, 3)).backward()  # gradients of the user's
        model.output = None
    batches = [(torch.randn(4, 6), torch.randn(4, 3)), (torch.randn(5, 6), torch.randn(5, 3))]
    before = state(model, batches)
    if fails:
        with pytest.raises(ZeroDivisionError, match="of the user's"):
            CALLS[name](model, batches, fails_later)
    else:
        assert CALLS[name](model, batches, F.mse_loss) is not None
    after = state(model, batches)
    assert [key for key in {*before, *after} if before.get(key) != after.get(key)] == []


def test_comparison_gives_each_mode_the_same_batch_and_state():
    """Each mode would otherwise see inputs that the mode before has written, and compare what is not the same."""
    found = amp_graph.compare(Writing(), [(torch.randn(4, 6), torch.randn(4, 3))], F.mse_loss)
    assert max(one.fp32 for one in found.operations) < 1e-5
    assert {one.key for one in found.operations} >= {"first:linear", "last:linear", "norm:batch_norm"}


def test_memory_that_a_parameter_leaves_and_hooks_that_are_added_are_restored():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    weight, values, own = model[0].weight, model[0].weight.detach().clone(), model[0].weight.data_ptr()
    with unchanged(model):
        weight.data = torch.ones(5, 2)
        weight.requires_grad_(False)
        weight.grad = torch.ones(5, 2)
        model.eval().add_module("more", nn.Tanh())
        model.register_forward_hook(lambda *given: None)
        model[1] = nn.ReLU()
    assert (weight.data_ptr(), weight.requires_grad, weight.grad) == (own, True, None)
    assert torch.equal(weight, values)
    assert (model.training, len(model), len(model._forward_hooks), type(model[1])) == (True, 2, 0, nn.Tanh)


def test_a_restored_state_does_not_count_as_a_write():
    """The user may still run backward through what was computed before."""
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.bias.fill_(float("nan"))
    loss, versions = model(torch.randn(2, 3)).sum(), [p._version for p in model.parameters()]
    ModelState(model).restore()
    assert [p._version for p in model.parameters()] == versions
    loss.backward()


# -- what is taken -------------------------------------------------------------------------------------------------


class Graph:
    """An object that holds tensors, as those of PyTorch Geometric do."""

    def __init__(self):
        self.x, self.y = torch.randn(5, 6), torch.randn(5, 3)


class WithItsLoss(nn.Linear):
    def forward(self, graph):
        return F.mse_loss(super().forward(graph.x), graph.y)


@pytest.mark.parametrize("name", CALLS)
def test_an_object_that_holds_tensors_is_a_batch(name):
    assert CALLS[name](WithItsLoss(6, 3), [Graph()], None) is not None


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["calibrate", "compare", "bisect"])
def test_bad_input_is_refused_with_a_fix(name):
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    model = nn.Linear(6, 3)
    used = iter([(x, y)])
    list(used)
    cases = [
        ("there are no batches", model, used),
        ("batch 0 has no tensor: ()", model, [()]),
        ("loss_fn='mse' returns no loss", model, [(x, y)], "mse"),
        ("MSELoss'> returns no loss", model, [(x, y)], nn.MSELoss),
        ("and the model trains weight", model, [(x, y)], lambda o, y: o.detach().sum()),
        ("the loss is i64", model, [(x, y)], lambda o, y: (o > 0).sum()),
        ("a Tensor is no iterable of batches", model, x),
        ("batch 1 has another structure than batch 0", model, [(x, y), (x,)]),
        ("float64[2d]", model, [(x, y), (x.double(), y)]),
        ("the loss of batch 1 is nan in fp32", model, [(x, y), (x * float("nan"), y)]),
        ("is converted", amp_graph.convert(nn.Linear(6, 3)), [(x, y)]),
        ("not initialized", nn.LazyLinear(3), [(x, y)]),
        ("hold no values", nn.Linear(6, 3, device="meta"), [(x, y)]),
        ("inference_mode", model, [(x, y)]),
    ]
    for told, refused, batches, *loss in cases:
        mode = torch.inference_mode() if told == "inference_mode" else nullcontext()
        with mode, pytest.raises(AmpGraphError, match="fix:") as caught:
            CALLS[name](refused, batches, *(loss or [F.mse_loss]))
        assert told in str(caught.value)
        assert "forward" not in vars(refused) or told == "is converted", "the model is as it was"


def test_bad_arguments_of_locate_and_bisect_are_refused_with_a_fix():
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    model = nn.Linear(6, 3)
    for call, told in (
        (lambda: amp_graph.locate(model, (x, y), lambda o, y: o.detach().sum()), "locate: the loss has no gradient"),
        (lambda: amp_graph.locate(model, (x, y), lambda o, y: o), "locate: the loss is f32"),
        (lambda: amp_graph.locate(nn.LazyLinear(3), (x, y), F.mse_loss), "locate: 2 parameters are not initialized"),
        (lambda: amp_graph.bisect(model, [(x, y)], F.mse_loss, tolerance=1.0, max_runs=0), "max_runs=0"),
        (
            lambda: amp_graph.bisect(model, [(x, y)], tolerance=1.0, metric="accuracy"),
            "is no function",
        ),
    ):
        with pytest.raises(AmpGraphError, match="fix:") as caught:
            call()
        assert told in str(caught.value)


def test_a_path_that_cannot_be_written_is_refused_and_nothing_is_written(tmp_path):
    model = nn.Linear(6, 3)
    found = amp_graph.calibrate(model, [(torch.randn(4, 6), torch.randn(4, 3))], F.mse_loss)
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "missing" / "x", tmp_path, tmp_path / "file" / "x", "a\0b", None, 7):
        for write in (found.save, amp_graph.report(amp_graph.convert(model)).html):
            with pytest.raises(AmpGraphError, match=r"cannot write .*\n  legal: .*\n  fix: "):
                write(path)
            amp_graph.revert(model) if hasattr(model, "_amp_graph") else None
        if path in (None, 7):
            with pytest.raises(AmpGraphError, match="is not the path of a file"):
                amp_graph.Calibration.load(path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
