"""Training on a GPU: whole steps are those of the loop, recorded or not, and the host waits for nothing."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import ScaleError
from amp_graph.policy_words import DTYPES as LOW
from amp_graph.scaling.loss_scale import STUCK, LossScale
from tests.by_hand import descend
from tests.corpus import CASES, make
from tests.layers import layers
from tests.measure import to_device
from tests.relative_error import error
from tests.scaling.test_grad_scaler import moved, torchs

DEVICE = "cuda"
WHOLE = ("bert_sdpa", "gpt2", "vit", "resnet_bottleneck", "lstm_lm", "tied_weights")


@layers(lambda: dict(first=nn.Linear(64, 256), norm=nn.LayerNorm(256), last=nn.Linear(256, 8)), seed=0)
def Net(self, x):
    return self.last(F.gelu(self.norm(self.first(x))))


@layers(lambda model, case: dict(model=model, loss=case.loss))
def WithLoss(self, args, kwargs):
    return self.loss(self.model(*args, **kwargs))


def net():
    return Net().to(DEVICE)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(32, 64, generator=generator), torch.randint(8, (32,), generator=generator)
    return x.to(DEVICE), y.to(DEVICE)


def placed(name):
    model, args, kwargs = make(name)
    model.to(DEVICE)
    return model, *to_device((args, kwargs), DEVICE)


def losses(name, policy, count=8, **options):
    """Train on one batch by whole steps."""
    model, args, kwargs = placed(name)
    step = amp_graph.TrainStep(
        WithLoss(model, CASES[name]), None, torch.optim.AdamW(model.parameters(), 1e-3), policy, **options
    )
    return [step(args, kwargs).item() for _ in range(count)]


def losses_by_hand(name, policy, context=None, count=8):
    model, args, kwargs = placed(name)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    if context is None:
        amp_graph.convert(model, policy)
    scaler = (amp_graph if context is None else torch.amp).GradScaler(DEVICE, enabled=policy == "fp16")
    found = []
    for _ in range(count):
        optimizer.zero_grad()
        with context() if context is not None else torch.enable_grad():
            loss = CASES[name].loss(model(*args, **kwargs))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", WHOLE)
def test_losses_are_those_of_autocast(name, policy):
    expected = losses_by_hand(name, policy, lambda: torch.autocast(DEVICE, LOW[policy]))
    assert expected[-1] < expected[0]
    for found in (losses_by_hand(name, policy), losses(name, policy), losses(name, policy, cuda_graph=True)):
        assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-O2", "fp16-O2"])
def test_inductor_has_the_losses_of_eager(policy):
    expected = losses("gpt2", policy)
    for options in ({}, {"cuda_graph": True}):
        assert losses("gpt2", policy, compile="inductor", **options) == pytest.approx(expected, rel=0.02)


# -- nothing waits -----------------------------------------------------------------------------------------


@pytest.fixture
def _no_waiting():
    """Let whatever makes the host wait for the GPU raise, from where a test says so."""
    yield
    torch.cuda.set_sync_debug_mode("default")


COUNT = 2 * STUCK + 5  # past the looks at the floor


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize("options", [{}, {"cuda_graph": True}, {"micro_batches": 2}, {"clip_norm": 1.0}])
@pytest.mark.parametrize("policy", LOW)
def test_the_host_waits_for_no_step(policy, options):
    model = net()
    step = amp_graph.TrainStep(model, F.cross_entropy, torch.optim.AdamW(model.parameters()), policy, **options)
    x, y = batch()
    for _ in range(6):
        step(x, y)
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(COUNT):
        step(x, y)


@pytest.mark.usefixtures("_no_waiting")
def test_the_host_waits_for_no_step_by_hand():
    model = amp_graph.convert(net(), "fp16")
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), amp_graph.GradScaler(DEVICE)
    x, y = batch()
    for i in range(COUNT + 3):
        if i == 3:
            torch.cuda.set_sync_debug_mode("error")
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.usefixtures("_no_waiting")
def test_control_waiting_is_found():
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones((), device=DEVICE).item()


# -- the loss scale ----------------------------------------------------------------------------------------


def test_the_scale_moves_as_torchs():
    pattern = [i % 7 != 3 for i in range(120)]
    scale = LossScale(growth_interval=5).to(torch.device(DEVICE))
    found = []
    for finite in pattern:
        scale.update(torch.tensor(0.0 if finite else 1.0, device=DEVICE))
        found.append(scale.values()[0])
    assert found == torchs(pattern, growth_interval=5)
    assert found == moved(LossScale(growth_interval=5), pattern)


@pytest.mark.parametrize("graph", [False, True])
def test_a_bad_step_changes_nothing(graph):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "fp16", cuda_graph=graph)
    x, y = batch()
    for _ in range(6):
        step(x, y)
    state = [t for p in model.parameters() for t in optimizer.state[p].values()]
    before = [t.detach().clone() for t in (*model.parameters(), *state)]
    skipped = step.skipped_steps.item()
    step(torch.full_like(x, float("inf")), y)
    assert step.skipped_steps.item() == skipped + 1
    assert all(map(torch.equal, before, (*model.parameters(), *state)))
    step(x, y)
    assert not torch.equal(before[0], model.first.weight)


@pytest.mark.parametrize("whole", [False, True])
def test_a_gradient_that_stays_infinite_is_an_error_that_names_it(whole):
    model, (x, y) = net(), batch()
    x.fill_(float("nan"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if whole:
        options = {"loss_scale": LossScale(2.0**-14), "at_floor": "error"}
        step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "fp16", **options)
    else:
        amp_graph.convert(model, "fp16")
        scaler = amp_graph.GradScaler(DEVICE, init_scale=2.0**-14, at_floor="error")

        def step(x, y):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()

    def until_it_says_so():
        for _ in range(4 * STUCK):
            step(x, y)
            torch.cuda.synchronize()

    with pytest.raises(ScaleError, match=r"smallest scale.*(first\.weight|parameter 0)"):
        until_it_says_so()


# -- weights, devices ----------------------------------------------------------------------------------------


def test_a_converted_model_moves_between_devices():
    model = amp_graph.convert(net().cpu(), "bf16")
    x, _ = batch()
    reference = copy.deepcopy(model)
    amp_graph.revert(reference)
    expected = reference.double()(x.cpu().double())
    assert error(model(x.cpu()), expected) < 0.01
    model.to(DEVICE)
    assert error(model(x), expected.to(DEVICE)) < 0.01
    model.cpu()
    assert error(model(x.cpu()), expected) < 0.01


def test_copies_of_weights_follow_updates():
    model, (x, y) = amp_graph.convert(net(), "bf16"), batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, fused=True)
    for _ in range(3):
        descend(optimizer, F.cross_entropy(model(x), y))
    with torch.no_grad():
        found = model(x)
        amp_graph.revert(model)
        expected = model.double()(x.double())
    assert error(found, expected) < 0.01


def test_a_forward_in_a_graph_of_the_users():
    """Inference with kept copies of weights, recorded by the user, replayed on another input."""
    model = amp_graph.convert(net().eval(), "bf16")
    x, _ = batch()
    with torch.no_grad():
        for _ in range(4):
            model(x)
        static, graph = x.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(static)
        other, _ = batch(1)
        static.copy_(other)
        graph.replay()
        assert torch.equal(out, model(other))
