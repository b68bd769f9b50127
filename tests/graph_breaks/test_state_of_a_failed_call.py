"""A call that fails under autocast and runs again in fp32 leaves the state of one plain call, whatever it wrote."""

import copy

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph.errors import AmpGraphWarning
from amp_graph.model_state import ModelState

SIZE = 8


class Fails(nn.Module):
    """Writes its state by ``write``, then runs code that is not captured and mixes dtypes under autocast."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.fc = nn.Linear(SIZE, SIZE)
        self.k = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("empty", torch.zeros(0))
        self.plain, self.queue, self.named = torch.zeros(3), [torch.zeros(2)], {"ema": torch.zeros(2)}
        self.count = 0

    @torch._dynamo.disable
    def put(self, y):
        return torch.zeros(SIZE, SIZE).index_add(0, torch.arange(SIZE), self.fc(y))

    def forward(self, x):
        y = self.fc(x)
        self.write(self, y)
        return self.put(y).sum() + self.k.sum() + self.empty.sum() + self.steps


def bound_anew(m, y):
    m.steps = m.steps + 1


def appended(m, y):
    m.queue.append(torch.ones(1))


def counted(m, y):
    m.count += 1


def grown(m, y):
    if not m.empty.numel():
        m.empty.resize_(4).fill_(1)
    m.empty.add_(1)


def swapped(m, y):
    m.k = nn.Parameter(m.k.detach() * 0.5)


def outside_of_gradients(m, y):
    with torch.no_grad():
        m.k.mul_(0.5)


WRITES = {
    "a parameter by .data": lambda m, y: m.k.data.mul_(0.5),
    "a parameter without gradients": outside_of_gradients,
    "a new parameter": swapped,
    "data bound anew": lambda m, y: setattr(m.k, "data", m.k.data * 0.5),
    "a plain tensor": lambda m, y: m.plain.add_(1),
    "a tensor in a list": lambda m, y: m.queue[0].add_(1),
    "a tensor in a dict": lambda m, y: m.named["ema"].add_(1),
    "a longer list": appended,
    "a number": counted,
    "a buffer bound anew": bound_anew,
    "a buffer in place": lambda m, y: m.steps.add_(1),
    "a buffer by a value with history": lambda m, y: m.steps.copy_(y.mean().detach()),
    "a buffer that gets its size": grown,
    "set_": lambda m, y: m.empty.set_(torch.ones(5)),
    "a buffer's data": lambda m, y: setattr(m.empty, "data", torch.ones(6)),
    "random numbers": lambda m, y: m.steps.add_(torch.rand(())),
}


def state(m):
    return [*m.parameters(), *m.buffers(), m.plain, *m.queue, *m.named.values(), torch.tensor(m.count)]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_state_is_written_once(write, trains):
    torch.manual_seed(0)
    model, x = Fails(torch._dynamo.disable(WRITES[write])), torch.randn(SIZE, SIZE)
    plain = copy.deepcopy(model)
    amp_graph.convert(model, "bf16")
    with torch.set_grad_enabled(trains):
        torch.manual_seed(1)
        with pytest.warns(AmpGraphWarning, match="fails under torch.autocast"):
            out = model(x)
        torch.manual_seed(1)
        expected = plain(x)
    assert out.item() == pytest.approx(expected.item(), rel=2e-2)  # what is captured is low
    for ours, theirs in zip(state(model), state(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    if trains:
        out.backward()
        expected.backward()
        torch.testing.assert_close(model.fc.weight.grad, plain.fc.weight.grad, rtol=2e-2, atol=2e-2)


def test_a_write_into_a_tensor_with_history_is_lost():
    x = torch.ones(3, requires_grad=True) * 2
    before = ModelState(nn.Linear(3, 3), (x,))
    assert not before.is_lost()
    x.mul_(2)
    assert before.is_lost()


class Recomputed(torch.autograd.Function):
    """Hand-written activation checkpointing."""

    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad, *(None for _ in ctx.needs_input_grad[2:])


class Coupled(torch.autograd.Function):
    """An additive coupling: saves its result alone and computes its input from it, as memcnn and revtorch do."""

    @staticmethod
    def forward(ctx, f, g, x, *parameters):
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            a, b = x.chunk(2, -1)
            a = a + f(b)
            b = b + g(a)
            out = torch.cat([a, b], -1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        with torch.no_grad():
            a, b = out.chunk(2, -1)
            b = b - ctx.g(a)
            a = a - ctx.f(b)
            x = torch.cat([a, b], -1)
        x.requires_grad_()
        with torch.enable_grad():
            a, b = x.chunk(2, -1)
            a = a + ctx.f(b)
            b = b + ctx.g(a)
            torch.autograd.backward(torch.cat([a, b], -1), grad)
        return None, None, x.grad, *(None for _ in ctx.needs_input_grad[3:])


def mlp(width):
    return nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inside, self.norm = nn.Linear(16, 16), mlp(16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(Recomputed.apply(self.inside, self.first(x), *self.inside.parameters())).tanh().sum()


class Nested(Checkpointed):
    def __init__(self):
        super().__init__()
        self.inner = mlp(16)

    def forward(self, x):
        def run(x):
            return self.inside(Recomputed.apply(self.inner, x, *self.inner.parameters()))

        inside = [*self.inside.parameters(), *self.inner.parameters()]
        return self.norm(Recomputed.apply(run, self.first(x), *inside)).tanh().sum()


class Invertible(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.f, self.g = nn.Linear(16, 16), mlp(8), mlp(8)

    def forward(self, x):
        y = Coupled.apply(self.f, self.g, self.first(x), *self.f.parameters(), *self.g.parameters())
        return y.square().mean()


class Disabled(Checkpointed):
    @torch._dynamo.disable
    def forward(self, x):
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:amp_graph. Disabled. nothing was captured")
@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast", "bf16,escaped=fp32", "fp16"])
@pytest.mark.parametrize("kind", [Checkpointed, Nested, Invertible, Disabled])
def test_a_backward_that_computes_again_has_the_precision_of_its_forward(kind, policy):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 16)
    plain = copy.deepcopy(model)
    amp_graph.convert(model, policy)
    plain(x).backward()
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
        assert not torch.is_autocast_enabled("cpu")
    for ours, exact in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - exact.grad).norm() <= 3e-2 * exact.grad.norm()


def test_an_error_in_such_a_backward_leaves_autocast_off():
    def run(x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("in backward")
        return x * 2

    class Raises(nn.Module):
        def forward(self, x):
            return Recomputed.apply(run, x).sum()

    x = torch.ones(3, requires_grad=True)
    loss = amp_graph.convert(Raises(), "bf16")(x)
    with pytest.raises(RuntimeError, match="in backward"):
        loss.backward()
    assert not torch.is_autocast_enabled("cpu")
