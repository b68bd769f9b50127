"""AMP1xx and AMP2xx: legal neighbours of the planted faults, and faults in other forms, each in a few lines."""

import contextlib
import io
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.audit.first_overflow import FirstOverflow
from amp_graph.audit.records import NOWHERE, Call
from amp_graph.audit.session import Audit
from tests.layers import layers


class Loop:
    """A model in training; ``data`` is another batch each time."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.head, self.first = nn.Linear(4, 4), nn.Linear(16, 4)  # of other inputs: its outputs, and its inputs
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.others = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (self.head, self.first)]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    @property
    def data(self):
        return torch.randn(8, 16), torch.randint(4, (8,))

    def low(self):
        """Return a batch, and what the model makes of it in bfloat16."""
        x, y = self.data
        with torch.autocast("cpu", torch.bfloat16):
            return x, y, self.model(x)

    def loss(self, dtype=torch.float16, call=lambda model, x: model(x)):
        x, y = self.data
        with torch.autocast("cpu", dtype):
            return F.cross_entropy(call(self.model, x), y)

    def scaled_step(self, *losses, optimizers=()):
        for loss in losses:
            self.scaler.scale(loss).backward()
        for one in optimizers or (self.optimizer,):
            self.scaler.step(one)
            one.zero_grad()
        self.scaler.update()

    def step(self, loss):
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def audited(step, times=4, **options):
    """Audit some steps of a loop; return the audit."""
    loop = Loop()
    with Audit(**options) as audit:
        for _ in range(times):
            step(loop)
    return audit


def scaled_by_hand(loop):
    (loop.loss() * 1024).backward()
    for p in loop.model.parameters():
        p.grad.div_(1024)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def scaled_before(backward):
    """Return a step of two losses that ``backward`` is given scaled."""

    def step(loop):
        backward(loop.scaler.scale([loop.loss(), loop.loss()]))
        loop.scaled_step()

    return step


def gradient_penalty(loop):
    x, y = loop.data
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(loop.model(x.requires_grad_()), y)
    (gradient,) = torch.autograd.grad(loop.scaler.scale(loss), x, create_graph=True)
    with torch.autocast("cpu", torch.float16):  # it only computes in fp32: a note
        loss = loss + (gradient / loop.scaler.get_scale()).float().square().sum().sqrt()
    loop.scaled_step(loss)


def one_loss_is_not_scaled(loop):
    loop.loss().backward()
    loop.scaled_step(loop.loss())


def clips_one_of_two_optimizers(loop):
    loop.scaler.scale(loop.loss(call=lambda model, x: loop.head(model(x)))).backward()
    loop.scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.scaled_step(optimizers=(loop.optimizer, loop.others[0]))


def clips_before_it_unscales(loop):
    loop.scaler.scale(loop.loss()).backward()
    torch.nn.utils.clip_grad.clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.scaler.unscale_(loop.optimizer)
    loop.scaled_step()


def parameters_in_fp16(loop):
    x, y = loop.data
    loop.step(F.cross_entropy(loop.model.half()(x.half()).float(), y))


def scaler_in_fp32(loop):
    x, y = loop.data
    loop.scaled_step(F.cross_entropy(loop.model(x), y))


def reentrant_checkpoint(loop):
    loop.scaled_step(loop.loss(call=lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=True)))


class Sine(torch.autograd.Function):
    """A function that is computed in fp32, as torch's documentation has it."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


def scaler_is_pickled(loop):
    loop.scaled_step(loop.loss())
    torch.save({"all": [{"optimizer": loop.optimizer.state_dict()}, loop.scaler]}, io.BytesIO())


def weights_are_saved_alone(loop):
    loop.scaled_step(loop.loss())
    torch.save(loop.model.state_dict(), io.BytesIO())


def frozen_teacher(loop):
    x, _, out = loop.low()
    loop.step(F.mse_loss(out.float(), loop.first.requires_grad_(False)(x)))


def head_in_fp32(loop):
    _, y, out = loop.low()
    loop.step(F.cross_entropy(loop.head(out.float()), y))


def auxiliary_head_in_fp32(loop):
    x, y = loop.data
    loop.step(loop.loss(torch.bfloat16) + F.cross_entropy(loop.first(x), y))


def region_of_the_loss_alone(loop):
    _, y, out = loop.low()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(out.float(), y)
    loop.step(loss)


def evaluation_works_and_training_is_missed(loop):
    x, y = loop.data
    with torch.autocast("cpu", torch.bfloat16):
        x = x * 2
    loop.step(F.cross_entropy(loop.model(x), y))
    with torch.no_grad():
        loop.low()


def kernel_with_casts_of_its_own(loop):
    x, y = loop.data
    with torch.autocast("cpu", torch.bfloat16):
        out = loop.model(x)
        with torch.autocast("cpu", enabled=False):
            square = out.float().to(torch.bfloat16) @ out.to(torch.bfloat16).t()
        loss = F.cross_entropy(out, y) + square.float().mean()
    loop.step(loss)


def off_for_a_device_that_is_absent(loop):
    with torch.autocast("cuda", torch.bfloat16, enabled=False):
        loss = loop.loss(torch.bfloat16)
    loop.step(loss)


def optimizer_of_amp_graph(loop):
    if "mixed" not in loop.__dict__:
        loop.mixed = amp_graph.MixedPrecisionOptimizer(loop.optimizer, loss_scale="dynamic")
    loop.mixed.zero_grad()
    loop.mixed.backward(loop.loss())
    loop.mixed.clip_master_grads(1.0)
    loop.mixed.step()


def fused_optimizer_skips(loop):
    if "fused" not in loop.__dict__:
        loop.fused = torch.optim.AdamW(loop.model.parameters(), fused=True)
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    loop.scaled_step(loop.loss(), optimizers=(loop.fused,))


def one_of_two_optimizers_never_steps(loop):
    x, y = loop.data
    with torch.autocast("cpu", torch.float16):
        bad = F.cross_entropy(loop.first(x), y) * 1e38
    loop.scaled_step(loop.loss(), bad, optimizers=(loop.optimizer, loop.others[1]))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (scaled_by_hand, {}),
        (scaled_before(lambda losses: sum(losses).backward()), {}),
        (scaled_before(lambda losses: [loss.backward() for loss in losses]), {}),
        (scaled_before(torch.autograd.backward), {}),
        (gradient_penalty, {"AMP101": "note"}),
        (one_loss_is_not_scaled, {"AMP201": "warning"}),
        (clips_one_of_two_optimizers, {}),
        (clips_before_it_unscales, {"AMP203": "warning"}),
        (parameters_in_fp16, {"AMP201": "warning"}),
        (scaler_in_fp32, {"AMP202": "warning"}),
        (reentrant_checkpoint, {}),
        (lambda loop: loop.step(loop.loss(torch.bfloat16, lambda model, x: Sine.apply(model(x)))), {}),
        (scaler_is_pickled, {}),
        (weights_are_saved_alone, {}),
        (frozen_teacher, {"AMP105": "note"}),
        (head_in_fp32, {"AMP105": "note"}),
        (auxiliary_head_in_fp32, {"AMP105": "warning"}),
        (region_of_the_loss_alone, {"AMP101": "note"}),
        (evaluation_works_and_training_is_missed, {"AMP101": "warning"}),
        (kernel_with_casts_of_its_own, {}),
        (off_for_a_device_that_is_absent, {}),
        (optimizer_of_amp_graph, {}),
        (one_of_two_optimizers_never_steps, {"AMP206": "warning", "AMP211": "note"}),
        (fused_optimizer_skips, {"AMP211": "note"}),
    ],
)
def test_what_is_found_in_four_steps(step, expected):
    report = audited(step).report()
    assert not report.unseen
    assert {f.code: f.level for f in report.findings if f.code[3] in "12"} == expected


def underflows(loop, scaler):
    scaler.scale(loop.loss() * 1e-6).backward()
    scaler.step(loop.optimizer)
    scaler.update()


BY_TORCH = pytest.mark.skipif(torch.cuda.is_available(), reason="torch disables a scaler where CUDA is missing")


def calls_that_warn():
    """Call what torch warns of at the line of its caller."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.step()  # before the optimizer has stepped
    scheduler.step(1)
    torch.autocast("cpu", torch.float64)
    if not torch.cuda.is_available():
        torch.autocast("cuda")
        torch.amp.GradScaler()


def warned(audited):
    """Return the messages of these warnings, with their lines."""
    with warnings.catch_warnings(record=True) as told, Audit() if audited else contextlib.nullcontext():
        warnings.simplefilter("always")
        calls_that_warn()
    return [(one.filename, one.lineno, str(one.message)) for one in told]


def test_a_warning_of_torch_is_at_the_users_line_as_without_an_audit():
    plain = warned(audited=False)
    assert len(plain) >= 3
    assert {file for file, _, _ in plain} == {__file__}
    assert warned(audited=True) == plain


@pytest.mark.filterwarnings("ignore:.*GradScaler")
@pytest.mark.parametrize("is_made_before", [True, False])
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(torch.amp.GradScaler, marks=BY_TORCH),
        pytest.param(torch.cuda.amp.GradScaler, marks=BY_TORCH),
        lambda: torch.amp.GradScaler("cpu", enabled=False),
    ],
)
def test_a_disabled_scaler_is_named_with_the_one_to_make(made, is_made_before):
    loop, scaler = Loop(), made()
    with Audit() as audit:
        scaler = scaler if is_made_before else made()
        for _ in range(3):
            underflows(loop, scaler)
    found = {f.code: f for f in audit.report().findings if f.code in ("AMP201", "AMP504")}
    assert {*found} == {"AMP201", "AMP504"}
    line = underflows.__code__.co_firstlineno + 1
    for one in found.values():
        place = re.search(r"the scaler that is called at \S+test_autocast_and_scaling.py:(\d+) is disabled", one.text)
        assert int(place[1]) == line
        assert ("as there is no CUDA" in one.text) != torch.cuda.is_available()
        assert one.fix == "torch.amp.GradScaler('cpu')"


def test_a_loss_without_a_scale_beside_a_working_scaler_is_told_as_before():
    (one,) = (f for f in audited(one_loss_is_not_scaled).report().findings if f.code == "AMP201")
    assert "disabled" not in one.text
    assert "scaler.scale(loss)" in one.fix


def test_a_step_after_a_skipped_one_is_looked_at():
    factors = iter((1.0, 1.0, 1e38, 1e38, 1.0, 1.0))
    audit = audited(lambda loop: loop.scaled_step(loop.loss() * next(factors)), 6, looks=())
    (found,) = (f for f in audit.report().findings if f.code == "AMP211")
    assert audit.training.looked_at == [4, 5]
    assert found.evidence["operator"] == "aten.mul.Tensor"
    assert "step 4 skipped" in found.text


def test_a_compiled_model_stays_in_one_graph():
    model = layers(lambda: dict(fc=nn.Linear(16, 4)))(lambda self, x: self.fc(x).relu())()
    model.compile(backend="eager", fullgraph=True)
    audit = audited(lambda loop: loop.step(model(loop.data[0]).sum()))
    assert audit.training.looked_at == [2, 3]


# -- the first value that is not finite -------------------------------------------------------------------


def origin_of(*operations):
    """Return the operator that made the first such value, of calls (name, operator, arguments)."""
    seen = FirstOverflow()
    for name, operator, arguments in operations:
        result = operator(*arguments)
        call = Call(name, "", NOWHERE, "forward", (), "float16")
        seen.take(call, operator, arguments, result)
    found = seen.origin()
    return found and (found[0].operator, found[1])


def test_the_first_overflow_is_found():
    aten, x = torch.ops.aten, torch.full((4,), 300.0, dtype=torch.float16)
    square, bias = x.clone(), torch.tensor([0.0, -torch.inf, 0.0, 0.0]).half()
    assert origin_of(("half", aten.mul.Tensor, (x, 0.5))) is None
    assert origin_of(("square", aten.mul.Tensor, (x, x)), ("sum", aten.sum.default, (x,))) == ("square", "inf")
    assert origin_of(("in place", aten.mul_.Tensor, (square, square))) == ("in place", "inf")
    assert origin_of(("mask", aten.masked_fill.Scalar, (x, x > 0, -torch.inf))) is None
    assert origin_of(("view", aten.view.default, (bias, (2, 2))), ("add", aten.add.Tensor, (x, bias))) is None
    spoilt = torch.tensor([torch.nan]).half()
    assert origin_of(("add", aten.add.Tensor, (spoilt, 1.0)))[1].startswith("nan, which an input")
    masked = x.masked_fill(x > 0, -torch.inf)
    assert origin_of(("softmax", aten._softmax.default, (masked, 0, False))) is None
    assert origin_of(("add", aten.add.Tensor, (bias, 1.0)), ("square", aten.mul.Tensor, (x, x))) == ("square", "inf")


def test_a_scaler_of_two_losses_is_told_once():
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu")
    with Audit() as audit:
        for _ in range(4):
            for model in models:
                loss = model(torch.randn(4, 8)).square().mean()
                (scaler.scale(loss) if model is models[0] else scaler.scale(loss * 2)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.scale(torch.ones(1, requires_grad=True)).backward()
            scaler.update()
    (one,) = (f for f in audit.report().findings if f.code == "AMP202")
    assert one.also == [f"the loss at {one.place.file}:{one.place.line + 3}"]


def test_what_computed_low_in_a_disabled_region_is_named_with_its_line():
    layer = nn.Linear(8, 8)
    with Audit(looks=(1,)) as audit, torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(4, 8))
        with torch.autocast("cpu", enabled=False):
            y.exp().sum()
    (one,) = (f for f in audit.report().findings if f.code == "AMP104")
    here = test_what_computed_low_in_a_disabled_region_is_named_with_its_line.__code__.co_firstlineno
    assert re.search(
        rf"as their inputs are: exp at \S+scaling.py:{here + 5}, sum at \S+scaling.py:{here + 5}$", one.text
    )
