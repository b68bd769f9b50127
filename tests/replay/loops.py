"""Training loops as people write them; each returns every number that it saw: losses, gradients, buffers, outputs.

``LOOPS["accumulation"](word)`` runs one with the policy word ``replay=word``; its results depend on nothing else.
"""

from functools import partial, wraps

import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from tests.by_hand import descend
from tests.layers import forward_of, layers

STEPS = 9  # three as they are, one recording, and replays
LOOPS = {}
DECLINED = {}  # the reason that the report must give where a loop is not recorded


@layers(
    lambda drop=0.0, norm=False, tied=False: dict(
        first=nn.Linear(6, 24),
        last=nn.Linear(24, 24),
        norm=nn.BatchNorm1d(24) if norm else nn.Identity(),
        drop=nn.Dropout(drop),
        tied=tied,
    )
)
def Net(self, x):
    """Two layers with dropout and batch norm by choice; returns logits and a feature."""
    h = self.drop(F.gelu(self.norm(self.first(x))))
    h = F.linear(F.relu(self.last(h)), self.last.weight if self.tied else self.last.weight.detach())
    return h[:, :3].contiguous(), h.mean()


def loop(function, declined=""):
    LOOPS[function.__name__] = function
    if declined:
        DECLINED[function.__name__] = declined
    return function


def declined(why):
    return lambda function: loop(function, why)


def converted(word, model=None, policy="bf16", device=None, **options):
    """Convert a model; ``word`` is "true", "false", or "true,..." with more words."""
    model = (model or Net()).to(device or DEVICE[0])
    return amp_graph.convert(model, f"{policy},replay={word}", **options)


DEVICE = ["cpu"]


def batch(size=8):
    return torch.randn(size, 6, device=DEVICE[0]), torch.randint(3, (size,), device=DEVICE[0])


def sgd(model, rate=0.1):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate, momentum=0.9)


def seen(model, *more):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (*more, *grads, *model.parameters(), *model.buffers())]


def plain(model, steps=STEPS, loss=None, updates=True, rate=0.1, **at):
    """Train. ``before`` a step, ``between`` forward and backward, and ``after`` that, functions of its number do more.

    ``after`` returns what else is seen; ``loss`` takes the step's number, inputs and targets.
    """
    optimizer, found = sgd(model, rate), []
    loss = loss or (lambda i, x, y: F.cross_entropy(model(x)[0], y))
    before, between, after = (at.get(when, lambda i: ()) for when in ("before", "between", "after"))
    for i in range(steps):
        x, y = batch()
        before(i)
        optimizer.zero_grad()
        value = loss(i, x, y)
        between(i)
        value.backward()
        found += seen(model, *after(i), value)
        if updates:
            optimizer.step()
    return found


@loop
def kernels_chosen_by_settings(word):
    """Attention by one fused kernel, and in between by separate ones, which round elsewhere."""
    model = converted(word, Attends(), policy="bf16,skip=attention")
    found = []
    for i in range(2 * STEPS):
        torch.backends.cuda.enable_flash_sdp(i % 8 < 6)
        try:
            found += plain(model, 1)
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
    return found


@forward_of(Net)
def Attends(self, x):
    heads = self.first(x).view(2, -1, 4, 6).transpose(1, 2)
    h = F.scaled_dot_product_attention(heads, heads.flip(2), heads, is_causal=True)
    h = self.last(h.transpose(1, 2).reshape(x.shape[0], -1))
    return h[:, :3].contiguous(), h.mean()


@loop
def accumulation(word, to_none=True):
    model = converted(word, Net(tied=True))
    optimizer, found = sgd(model), []
    for i in range(3 * STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x)[0], y) / 3
        loss.backward()
        found += seen(model, loss)
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    return found


@loop
def gradients_held(word):
    """Somebody keeps the gradients of earlier steps."""
    model, held = converted(word), []
    found = plain(model, after=lambda i: held.extend(p.grad for p in model.parameters() if p.grad is not None) or ())
    return held + found


@layers(lambda: dict(body=nn.Sequential(nn.Linear(3, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))))
def Judge(self, x):
    return self.body(x)


def of_loss(build=Net, declined="", **how):
    """Make a loop of a loss, which is given the model, the step's number, inputs and targets; ``how``: of ``plain``."""

    def made(loss):
        @wraps(loss)
        def trained(word):
            model = converted(word, build())
            return plain(model, loss=partial(loss, model), **how)

        return loop(trained, declined)

    return made


@of_loss(lambda: Net(drop=0.1), steps=2 * STEPS)
def two_forwards_one_backward(model, i, x, y):
    return (model(x)[0] - model(batch()[0])[0]).square().mean()


@of_loss(steps=2 * STEPS, updates=False)
def three_forwards_one_backward(model, i, x, y):
    outs = [model(x)[0], model(batch()[0])[0], model(batch()[0])[0]]
    return (outs[0] * outs[1] - outs[2]).square().mean()


@of_loss(steps=3 * STEPS, updates=False)
def other_outputs_have_gradients(model, i, x, y):
    out, extra = model(x)
    return [out.sum(), extra, out.square().mean() + extra][i % 3]


@of_loss(steps=3 * STEPS, updates=False)
def expanded_and_transposed_gradients(model, i, x, y):
    out = model(x)[0]
    return out.sum() if i % 2 else (out.t().contiguous() * torch.randn(3, 8, device=DEVICE[0])).sum()


@of_loss(Judge, "differentiated again", rate=0.01)
def gradient_penalty(model, i, x, y):
    x = torch.randn(8, 3, device=DEVICE[0], requires_grad=True)
    out = model(x).sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    return out + (grad.norm(dim=1) - 1).square().mean()


@of_loss(lambda: Net(drop=0.1), steps=6 * STEPS)
def changing_batches(model, i, x, y):
    size = (8, 5, 8, 3, 7, 2)[i % 6]
    return F.cross_entropy(model(x[:size])[0], y[:size])


@of_loss(steps=2 * STEPS, updates=False)
def saved_tensor_hooks(model, i, x, y):
    with torch.autograd.graph.save_on_cpu() if i % 2 else torch.enable_grad():
        return F.cross_entropy(model(x)[0], y)


@loop
def retain_graph(word):
    model = converted(word, Net(drop=0.2))
    found = []
    for i in range(2 * STEPS):
        model.zero_grad()
        out, extra = model(batch()[0])
        first, second = out.square().mean(), extra
        first.backward(retain_graph=True)
        found += seen(model, first)
        if i % 3 == 1:
            first.backward(retain_graph=True)
        second.backward()
        found += seen(model, second)
    return found


@loop
def inputs_with_gradients(word):
    first, model = nn.Linear(6, 6).to(DEVICE[0]), converted(word)

    def loss(i, x, y):
        features = first(x)
        return F.cross_entropy(model(features)[0], y) + features.square().mean()

    return plain(model, loss=loss, updates=False, before=lambda i: first.zero_grad(), after=lambda i: seen(first))


@loop
def a_scaler_that_skips_steps(word):
    model = converted(word, policy="fp16")
    optimizer, found = sgd(model), []
    scaler = amp_graph.GradScaler(device=DEVICE[0], init_scale=2.0**30, growth_interval=3)
    for _ in range(2 * STEPS):
        x, y = batch()
        loss = descend(optimizer, F.cross_entropy(model(x)[0], y), scaler)
        found += seen(model, loss)
    return found


@loop
def eval_in_between(word):
    model = converted(word, Net(drop=0.2, norm=True))
    optimizer, found = sgd(model), []
    for i in range(2 * STEPS):
        x, y = batch()
        loss = descend(optimizer, F.cross_entropy(model(x)[0], y))
        model.eval()
        with torch.no_grad() if i % 4 else torch.inference_mode():
            found += [model(x)[0].clone(), model(batch()[0])[0].clone()]
        kept = model(x)[0]  # with gradients, which nobody asks for
        found += [kept.detach().clone(), *seen(model, loss)]
        model.train()
    return found


@loop
def moved_parameters(word):
    model = converted(word, Net(norm=True))

    def move(i):
        if i in (6, 12):
            model.last.weight.data = model.last.weight.data.clone() * 2
            model.norm.running_mean = model.norm.running_mean + 1

    return plain(model, 3 * STEPS, before=move)


@declined("move from call to call")
def parameters_that_always_move(word):
    model = converted(word)

    def move(i):
        model.last.weight.data = model.last.weight.data.clone() * 0.9

    return plain(model, 2 * STEPS, updates=False, before=move)


@loop
def moved_between_forward_and_backward(word):
    model = converted(word)

    def move(i):
        if i in (8, 11):
            model.first.weight.data = model.first.weight.data.clone()

    return plain(model, 2 * STEPS, updates=False, between=move)


@loop
def loaded_in_between(word):
    model = converted(word)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    found = plain(model)
    model.load_state_dict(state)
    found += plain(model)
    model.load_state_dict({name: t * 2 for name, t in state.items()}, assign=True)
    return found + plain(model)


@loop
def outputs_held_for_many_steps(word):
    model, held = converted(word), []

    def loss(i, x, y):
        held.extend(model(x))
        held.append(F.cross_entropy(held[-2], y) + held[-1])
        return held[-1]

    plain(model, loss=loss)
    return [t.detach() for t in held]


@loop
def an_exception_in_between(word):
    model = converted(word, Net(drop=0.1))
    optimizer, found = sgd(model), []
    for i in range(3 * STEPS):
        x, y = batch()
        try:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x)[0], y)
            if i % 4 == 1:
                raise ValueError("the user's")
            if i % 4 == 2:
                loss.register_hook(_fails)
            loss.backward()
            optimizer.step()
        except ValueError:
            del loss
        found += seen(model)
    return found


def _fails(grad):
    raise ValueError("the user's, in backward")


@loop
def hooks_on_parameters(word):
    model = converted(word, Net(tied=True))
    told = []
    model.last.weight.register_hook(lambda grad: grad * 2)
    model.first.weight.register_post_accumulate_grad_hook(lambda p: told.append(p.grad.clone()))
    return plain(model) + told


@forward_of(Net)
def TwoHeads(self, x):
    """Each layer belongs to one output."""
    return self.first(x), self.last(F.pad(x.detach(), (0, 18))).square().mean()


def one_head_at_a_time(word, model, body=None):
    """Train a head in each step; ``body`` computes the input, and is not reached by the second."""
    optimizer, found = sgd(model), []
    body = body or nn.Sequential()
    for i in range(2 * STEPS):
        outs = model(body(batch()[0]))
        model.zero_grad()
        body.zero_grad()
        (outs[0].sum() if i % 2 else outs[1]).backward()
        found += seen(model, *outs) + [torch.tensor(float(p.grad is None)) for p in body.parameters()]
        optimizer.step()
    return found


@declined("some outputs do not lead to all trained inputs")
def heads_that_take_turns(word):
    return one_head_at_a_time(word, converted(word, TwoHeads()))


@layers(lambda: dict(linear=nn.Linear(6, 6)))
def Doubles(self, x):
    return MakesZeros.apply(self.linear(x))


class MakesZeros(torch.autograd.Function):
    """Python functions hand on zeros where nothing has arrived."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@declined("some outputs do not lead to all trained inputs")
def a_head_behind_another_model(word):
    model, body = converted(word, TwoHeads()), Doubles().to(DEVICE[0])
    return one_head_at_a_time(word, model, body) + seen(body)


class Checkpointed(Net):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class AsksValue(Net):
    def forward(self, x):
        out, extra = super().forward(x)
        return out * float(extra.detach().item() > -100), extra


class Selects(Net):
    def forward(self, x):
        out, extra = super().forward(x)
        return out, out[out > 0].sum() + extra


class Shares(Net):
    def forward(self, x):
        out, _ = super().forward(x)
        return out, out[0].sum(), out[:, :1], x[:2]


@declined("belongs to the caller")
def an_input_that_is_written(word):
    model, given = converted(word, Writes()), []

    def loss(i, x, y):
        given.append(x)
        return F.cross_entropy(model(x)[0], y)

    return plain(model, loss=loss, updates=False, after=lambda i: given[-1:])


class Writes(Net):
    def forward(self, x):
        x.add_(1)
        return super().forward(x * 1)


# Plain training of a model, in a policy; and the reason where it is not recorded.
OF_MODELS = {
    "simple": (Net, "bf16", ""),
    "dropout_and_batch_norm": (lambda: Net(drop=0.3, norm=True), "bf16", ""),
    "in_fp16_at_o2": (Net, "fp16-O2", ""),
    "checkpoints": (Checkpointed, "bf16", ""),
    "checkpoints_with_random_draws": (lambda: Checkpointed(0.2), "bf16", "random"),
    "a_host_sync": (AsksValue, "bf16", "local_scalar_dense"),
    "a_shape_by_data": (Selects, "bf16", "shape of index's result depends on data"),
    "outputs_that_share_memory": (Shares, "bf16", "shares memory"),
}
LOOPS.update(
    {
        name: lambda word, build=build, policy=policy: plain(converted(word, build(), policy))
        for name, (build, policy, _) in OF_MODELS.items()
    }
)
DECLINED.update({name: why for name, (_, _, why) in OF_MODELS.items() if why})
