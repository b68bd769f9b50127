"""Calls that go straight to the compiled code: only where Dynamo itself would run that code, and nothing else."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.mutation_guard import GenerationTracker

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphWarning

X = torch.randn(3, 8)


def found(model, *args, **kwargs):
    """What the model finds for a call: the compiled code, or None for the long way."""
    conversion = conversion_of(model)
    return conversion.captured.find({"args": args, "kwargs": kwargs, "forward": conversion.wide})


def test_a_call_like_the_last_one_finds_its_code_and_another_does_not():
    model = amp_graph.convert(nn.Linear(8, 4), strict=True)
    assert found(model, X) is None
    first = model(X)
    assert torch.equal(found(model, X)(X), first)
    assert found(model, X[:2]) is None
    with torch.no_grad():
        assert found(model, X) is None
        model(X)
        assert found(model, X) is not None
    model.weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.float64))
    assert found(model, X) is None


@pytest.mark.parametrize("before", [False, True])
def test_where_autograd_is_compiled_the_long_way_is_gone(before):
    with torch._dynamo.config.patch(compiled_autograd=before):
        model = amp_graph.convert(nn.Linear(8, 4), strict=True)
        model(X)
    for switched in (True, False):
        with torch._dynamo.config.patch(compiled_autograd=switched):
            assert (found(model, X) is None) is switched


def test_a_stance_is_obeyed():
    model = amp_graph.convert(nn.Linear(8, 4))
    low = model(X)
    with torch.compiler.set_stance("force_eager"), pytest.warns(AmpGraphWarning, match="nothing was captured"):
        full = model(X)
    assert not torch.equal(low, full)
    assert torch.equal(full, nn.functional.linear(X, model.weight, model.bias))
    assert torch.equal(model(X), low)


@pytest.mark.parametrize("compile", ["eager", "aot_eager"])
def test_a_training_step_finds_its_code_and_captures_what_is_new(compile):
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.0))  # which reads whether it trains
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = amp_graph.TrainStep(model, lambda out: out.square().mean(), optimizer, compile=compile)

    def looked_up(x):
        return step._runs.find({"batch": (x,), **step._runs.free})

    assert looked_up(X) is None
    losses = [step(X).item() for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    assert looked_up(X) is not None
    assert looked_up(X[:2]) is None
    step(X[:2])
    assert len(step.captured) == 2
    model.eval()
    assert looked_up(X) is None
    step(X)
    assert len(amp_graph.report(step).graphs) == 3


def test_a_graph_goes_with_dynamos_entry():
    model = amp_graph.convert(nn.Linear(8, 4), strict=True)
    model(X)
    code = found(model, X)
    (name,) = (name for name in code.__code__.co_names if name.startswith("__compiled_fn"))
    graph = weakref.ref(code.__globals__[name])
    assert not hasattr(graph(), "_torchdynamo_disable")  # the graph itself, without Dynamo's wrapper
    del code
    torch._dynamo.reset()
    gc.collect()
    assert graph() is None


def ready(model, *args):
    """Whether a call runs what was looked at last, without a look at anything else."""
    conversion, asked = conversion_of(model), []
    call = conversion._call
    conversion._call = lambda *given: asked.append(1) or call(*given)
    try:
        model(*args)
    finally:
        del conversion._call
    return not asked


def trained():
    """A converted linear whose last call leaves nothing to look at."""
    model = amp_graph.convert(nn.Linear(8, 4), strict=True)
    for _ in range(3):
        model(X)
    assert ready(model, X)
    return model


def test_a_call_like_the_last_is_counted_and_right():
    model = trained()
    runs, generation = conversion_of(model).runs, GenerationTracker.generation  # by which CUDA graphs tell calls apart
    found = model(X)
    assert (conversion_of(model).runs, GenerationTracker.generation) == (runs + 1, generation + 1)
    weight, bias = model.weight.bfloat16(), model.bias.bfloat16()
    assert torch.equal(found, nn.functional.linear(X.bfloat16(), weight, bias).float())


CHANGES = {
    "another batch": lambda model: X[:2].clone(),
    "gradients of the input": lambda model: X.clone().requires_grad_(),
    "another weight": lambda model: setattr(model, "weight", nn.Parameter(torch.zeros(4, 8).t().contiguous().t())),
    "a frozen weight": lambda model: model.weight.requires_grad_(False).fill_(0),
    "no bias": lambda model: setattr(model, "weight", nn.Parameter(torch.zeros(2, 8))) or setattr(model, "bias", None),
    "deterministic algorithms": lambda model: torch.use_deterministic_algorithms(True),
    "Dynamo forgets": lambda model: torch._dynamo.reset(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_looked_at(name):
    model = trained()
    try:
        given = CHANGES[name](model)
        assert not ready(model, X if given is None or given is model.weight else given)
    finally:
        torch.use_deterministic_algorithms(False)


REGIONS = [
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu"),
    lambda: torch.compiler.set_stance("eager_on_recompile"),
    lambda: torch._dynamo.config.patch(compiled_autograd=True),
]


@pytest.mark.parametrize("region", REGIONS)
def test_a_region_is_looked_at(region):
    model = trained()
    with region():
        assert not ready(model, X)


@pytest.mark.parametrize("compile", ["eager", "inductor"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_hooks_of_saved_tensors_see_what_a_call_saves(compile):
    """Eager captures have no guard on them: autograd itself asks for them, in each call."""
    model = amp_graph.convert(nn.Linear(8, 4), compile=compile, strict=True)
    for _ in range(2):
        model(X).sum().backward()
    gradient, saved = model.weight.grad / 2, []
    model.zero_grad()

    def pack(tensor):
        saved.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(X)
    assert saved
    out.sum().backward()
    assert torch.equal(model.weight.grad, gradient)


def test_only_compilers_of_backward_guard_on_hooks_of_saved_tensors():
    """Hooks that are graphs are traced into a backward: a graph captured without them must not run there."""
    pack, unpack = (torch.fx.symbolic_trace(function) for function in (lambda t: t * 2, lambda t: t / 2))
    for compile, is_guarded in (("eager", False), ("inductor", True)):
        model = amp_graph.convert(nn.Linear(8, 4), compile=compile, strict=True)
        model(X)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            assert (found(model, X) is None) is is_guarded
