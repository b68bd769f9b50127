"""A step follows model and optimizer as they are at each call: replaced, frozen, branching, scheduled, hooked."""

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RAdam
from torch.optim.optimizer import register_optimizer_step_post_hook

import amp_graph
from amp_graph.errors import AmpGraphWarning, CaptureError
from amp_graph.step.train_step import MADE_FOR
from tests.layers import forward_of, layers
from tests.step.test_train_step import by_hand, parameters, same

LEVELS = ["bf16-O0", "bf16", "bf16-O2"]


sgd = partial(SGD, lr=0.1, fused=True)
decayed = partial(AdamW, lr=0.01, weight_decay=0.1, fused=True)  # it moves what it is given zeros for


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@layers(lambda: dict(a=nn.Linear(8, 4), b=nn.Linear(8, 4)), seed=0)
def Aside(self, x):
    """A layer that is read without gradient, beside one that is trained."""
    with torch.no_grad():
        aside = self.b(x)
    return self.a(x) + aside


@layers(
    lambda alternate=True: dict(a=nn.Linear(8, 4), b=nn.Linear(8, 4), calls=0, taken=True, alternate=alternate), seed=0
)
def Branches(self, x):
    """Two layers, of which each call takes one; they alternate, or go by ``taken``."""
    self.calls += 1
    taken = self.calls % 2 if self.alternate else self.taken
    return self.a(x) if taken else self.b(x)


def batch(seed=1, rows=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 8, generator=generator)[:rows], torch.randint(0, 4, (16,), generator=generator)[:rows]


def loop(model, optimizer, steps, policy, before=None, sizes=(16,), **options):
    """The loop by hand, over batches of these sizes by turns."""
    given = (batch(i, sizes[i % len(sizes)]) for i in range(steps))
    return by_hand(model, optimizer, policy, given, before=before, **options)


def stepped(model, optimizer, steps, policy, before=None, sizes=(16,), **options):
    """The same with a ``TrainStep``."""
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, policy, **options)
    losses = []
    for i in range(steps):
        if before:
            before(i, model, optimizer)
        losses.append(step(*batch(i, sizes[i % len(sizes)])).item())
    return step, losses


def mlp_after(steps, make=None, policy="bf16"):
    """A model and a step that has trained it."""
    model = mlp()
    return model, stepped(model, (make or sgd)(model.parameters()), steps, policy)[0]


def at_step_2(change):
    """Call ``change`` with model and optimizer before the third step."""
    return lambda i, model, optimizer: change(model, optimizer) if i == 2 else None


def compare(kind, make, policy, before=None, steps=5, parts=1, clip=None, sizes=(16,)):
    """Assert that a TrainStep gives the parameters of the loop, bit for bit; return both models."""
    one, two = kind(), kind()
    theirs = loop(one, make(one.parameters()), steps, policy, before, sizes, parts=parts, clip=clip)
    step, ours = stepped(two, make(two.parameters()), steps, policy, before, sizes, micro_batches=parts, clip_norm=clip)
    assert parts > 1 or ours == theirs
    assert same(parameters(one), parameters(two))
    return one, two, step


# -- what was put in the place of something ------------------------------------------------------------


def other_layer(trained=True, scale=3.0):
    torch.manual_seed(9)
    layer = nn.Linear(16, 4)
    with torch.no_grad():
        layer.weight.mul_(scale)
    return layer.requires_grad_(trained)


def new_in_both(model, optimizer):
    new = other_layer().weight
    optimizer.param_groups[0]["params"][2] = new
    model[2].weight = new


def assigned(model, optimizer):
    state = {k: v.clone() * 5 for k, v in model.state_dict().items() if k.startswith("2")}
    model.load_state_dict(state, assign=True, strict=False)


PUT = {
    "weight": lambda model, optimizer: setattr(model[2], "weight", other_layer().weight),
    "module": lambda model, optimizer: setattr(model, "2", other_layer()),
    "frozen": lambda model, optimizer: setattr(model, "2", other_layer(trained=False)),
    "assigned": assigned,
    "in both": new_in_both,
}


@pytest.mark.sampled(5)
def test_steps_that_are_gone_leave_no_hooks_in_their_optimizer():
    model = mlp()
    optimizer = sgd(model.parameters())
    before = hooks_of(optimizer)
    for _ in range(3):
        step, _ = stepped(model, optimizer, 1, "bf16")
        assert len(hooks_of(optimizer)) == len(before) + 3
        del step
        gc.collect()
    assert hooks_of(optimizer) == before


def hooks_of(optimizer):
    kinds = ("load_state_dict_pre", "load_state_dict_post", "step_pre", "step_post")
    return [hook for kind in kinds for hook in getattr(optimizer, f"_optimizer_{kind}_hooks").values()]


@pytest.mark.parametrize("policy", LEVELS)
@pytest.mark.parametrize("put", PUT.values(), ids=PUT)
def test_what_was_put_in_the_place_of_a_parameter_is_what_runs(put, policy):
    compare(mlp, sgd, policy, at_step_2(put))


def test_a_model_of_which_the_optimizer_has_nothing_any_more_is_refused():
    model, step = mlp_after(2)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(CaptureError, match=r"has none of the parameters(.|\n)*fix:"):
        step(*batch())


def test_what_the_optimizer_has_not_is_not_trained():
    model, step = mlp_after(2)
    model[2] = other_layer()
    was = model[2].weight.detach().clone()
    step(*batch(5))
    assert torch.equal(model[2].weight, was)


def test_heads_of_one_architecture_share_one_capture():
    """Swapping back finds the steps that were traced."""
    model, spare = mlp(), other_layer()
    own = model[2]
    optimizer = SGD([*model.parameters(), *spare.parameters()], lr=0.1)
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16")
    graphs = []
    for i in range(6):
        model[2] = spare if i % 2 else own
        step(*batch(i))
        graphs.append({id(b.step) for c in step.captured for b in c.bounds})
    assert len(graphs[1]) == 2
    assert graphs[1:] == [graphs[1]] * 5


def test_parameters_that_nobody_has_any_more_are_let_go():
    model, step = mlp_after(2)
    for seed in range(5):
        torch.manual_seed(seed)
        model[2] = nn.Linear(16, 4)
        optimizer = step.optimizer
        optimizer.param_groups[0]["params"][2:] = list(model[2].parameters())
        step(*batch(seed))
    held = {id(p) for c in step.captured for b in c.bounds for p in b.parameters}
    assert held == {id(p) for p in model.parameters()}
    assert len(step.weight_copies()) == 4


@pytest.mark.parametrize("policy", LEVELS)
def test_replaced_under_batches_of_two_shapes(policy):
    """The parameters that one capture lets go of were those of another, too: a weight that is merged, say."""

    def merge(model, optimizer):
        model[0].weight = nn.Parameter(model[0].weight.detach().float() + 0.1, requires_grad=False)

    def frozen():
        model = mlp()
        model[0].requires_grad_(False)
        return model

    compare(frozen, lambda p: sgd([*p][2:]), policy, at_step_2(merge), steps=6, sizes=(16, 12))


# -- gradients that are none ---------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", LEVELS)
@pytest.mark.parametrize("make", [decayed, lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)])
def test_what_is_read_without_gradient_is_left_alone(make, policy):
    model = Aside()
    optimizer = make(model.parameters())
    was = {name: value.clone() for name, value in model.state_dict().items()}
    stepped(model, optimizer, 3, policy)
    now = model.state_dict()
    assert torch.equal(now["b.weight"], was["b.weight"])
    assert not torch.equal(now["a.weight"], was["a.weight"])
    assert not optimizer.state.get(model.b.weight)
    assert optimizer.state.get(model.a.weight)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("frozen_at", [{1, 2}, {0, 1}], ids=["meanwhile", "at first"])
@pytest.mark.parametrize("policy", ["bf16-O0", "bf16"])
def test_freezing_and_unfreezing_between_steps(policy, frozen_at):
    compare(mlp, decayed, policy, lambda i, model, optimizer: model[0].requires_grad_(i not in frozen_at))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["bf16-O0", "bf16"])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("make", [decayed, lambda p: RAdam(p, lr=0.01)], ids=["inside", "behind"])
def test_micro_batches_that_take_other_branches(make, clip, policy):
    compare(Branches, make, policy, steps=4, parts=2, clip=clip)


def test_micro_batches_that_take_other_branches_at_o2():
    """The loop adds up what it rounded to bf16: with one micro-batch a branch, it adds nothing up."""
    one, two = Branches(), Branches()
    loop(one, decayed(one.parameters()), 4, "bf16-O2", parts=2)
    stepped(two, decayed(two.parameters()), 4, "bf16-O2", micro_batches=2)
    ours, theirs = two.state_dict(), one.state_dict()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [decayed, lambda p: RAdam(p, lr=0.01)], ids=["inside", "behind"])
def test_an_old_gradient_of_what_is_not_used_is_not_taken(make):
    model = Branches(alternate=False)
    optimizer = make(model.parameters())
    model.taken = False
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    model.taken = True
    was, old = model.b.weight.detach().clone(), model.b.weight.grad
    stepped(model, optimizer, 2, "bf16")
    assert torch.equal(model.b.weight, was)
    assert model.b.weight.grad is old


def test_a_loss_without_gradient_is_refused():
    model = mlp()
    optimizer = sgd(model.parameters())
    step = amp_graph.TrainStep(model, lambda out, y: F.cross_entropy(out.detach(), y), optimizer, "bf16")
    was = parameters(model)
    with pytest.raises(CaptureError, match=r"no gradient(.|\n)*fix:"):
        step(*batch())
    assert same(parameters(model), was)
    assert not any(optimizer.state.values())


# -- the optimizer's options and state -----------------------------------------------------------------


def set_option(**options):
    return lambda optimizer: optimizer.param_groups[0].update(options)


def replace_moments_of_one(optimizer):
    p = optimizer.param_groups[0]["params"][2]
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][key] = torch.zeros_like(p)


with_momentum = partial(SGD, lr=0.1, momentum=0.9, fused=True)


def with_tensor_betas(parameters):
    return AdamW(parameters, lr=0.01, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (with_momentum, set_option(dampening=0.5)),
        (with_momentum, set_option(weight_decay=0.3)),
        (decayed, set_option(weight_decay=0.3)),
        (decayed, replace_moments_of_one),
    ],
    ids=["dampening", "weight decay", "weight decay of AdamW", "moments"],
)
def test_what_changes_in_the_optimizer_counts_from_the_next_step(make, change):
    compare(mlp, make, "bf16", at_step_2(lambda model, optimizer: change(optimizer)))


def new_group(optimizer, lr):
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": params, "lr": lr})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "replace",
    [
        new_group,
        lambda optimizer, lr: optimizer.__setstate__({"param_groups": [{**optimizer.param_groups[0], "lr": lr}]}),
        lambda optimizer, lr: optimizer.param_groups.__setitem__(0, {**optimizer.param_groups[0], "lr": lr}),
    ],
)
@pytest.mark.parametrize("make", [decayed, lambda p: RAdam(p, lr=0.01)])
def test_groups_that_differ_in_nothing_but_the_learning_rate(make, replace):
    def before(i, model, optimizer):
        if i in (2, 4):
            replace(optimizer, 0.0 if i == 2 else 0.02)

    compare(mlp, make, "bf16", before)


def test_betas_that_are_tensors_may_be_filled():
    one, two = mlp(), mlp()
    loop(one, o := with_tensor_betas(one.parameters()), 2, "bf16")
    stepped(two, p := with_tensor_betas(two.parameters()), 2, "bf16")

    filled = at_step_2(lambda model, optimizer: optimizer.param_groups[0]["betas"][0].fill_(0.1))
    for model, optimizer, run in ((one, o, loop), (two, p, stepped)):
        run(model, optimizer, 5, "bf16", filled)
    torch.testing.assert_close(parameters(two), parameters(one), rtol=1e-5, atol=1e-6)
    still = mlp()
    stepped(still, with_tensor_betas(still.parameters()), 7, "bf16")
    assert max((a - b).abs().max() for a, b in zip(parameters(two), parameters(still), strict=True)) > 1e-3


def test_a_scheduler_that_sets_betas_is_followed_and_does_not_trace_each_step_anew():
    def make(parameters):
        optimizer = AdamW(parameters, lr=0.01, fused=True)
        optimizer.scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
        return optimizer

    def before(i, model, optimizer):
        if i:
            optimizer.scheduler.step()

    with pytest.warns(AmpGraphWarning, match="betas") as heard:
        step = compare(mlp, make, "bf16", before, steps=20)[2]
    assert len([w for w in heard if issubclass(w.category, AmpGraphWarning)]) == 1
    kept = {id(b.step) for c in step.captured for b in c.bounds}
    step.optimizer.scheduler.step()
    step(*batch())
    assert {id(b.step) for c in step.captured for b in c.bounds} == kept


# -- what is called at a step --------------------------------------------------------------------------


HOOKS = {
    "before": lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
    "after": lambda optimizer, hook: optimizer.register_step_post_hook(hook),
    "of all": lambda optimizer, hook: register_optimizer_step_post_hook(hook),
}


@pytest.mark.parametrize("early", [False, True], ids=["between steps", "before the first"])
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("make", [decayed, lambda p: RAdam(p, lr=0.01)], ids=["inside", "behind"])
def test_hooks_of_the_optimizers_step_are_called_as_long_as_they_are_registered(make, kind, early):
    model, calls = mlp(), []
    optimizer = make(model.parameters())
    step = None if early else stepped(model, optimizer, 2, "bf16")[0]
    handle = HOOKS[kind](optimizer, lambda *_: calls.append(kind))
    try:
        step = step or stepped(model, optimizer, 1, "bf16")[0]
        step(*batch())
    finally:
        handle.remove()
    step(*batch())
    assert calls == [kind] * (2 if early else 1)


@pytest.mark.parametrize("make", [sgd, decayed, partial(Adagrad, lr=0.01, fused=True)])
def test_a_step_of_a_fused_optimizer_by_others_is_seen(make):
    """Fused kernels count no version of a parameter; the update of the next step stays in the graph."""
    model, twin = mlp(), mlp()
    optimizer, other = make(model.parameters()), make(twin.parameters())
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16")
    plain = amp_graph.TrainStep(twin, F.cross_entropy, other, "bf16")
    for i in range(3):
        step(*batch(i))
        plain(*batch(i))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        optimizer.step()
        other.step()
        plain.refresh()
    assert torch.equal(step(*batch()), plain(*batch()))
    assert same(parameters(model), parameters(twin))
    assert "_fused_" in step.graph_text()


def test_a_step_that_was_replaced_is_what_runs():
    def make(parameters):
        optimizer = Adam(parameters, lr=0.01, fused=True)
        usual = optimizer.step

        def step(closure=None):
            usual(closure)
            with torch.no_grad():
                for p in optimizer.param_groups[0]["params"]:
                    p.mul_(0.99)

        optimizer.step = step
        return optimizer

    compare(mlp, make, "bf16")


# -- what belongs to the step itself -------------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, lambda p: RAdam(p, lr=0.1)])
def test_a_learning_rate_that_is_a_tensor_of_one_element(make):
    def before(i, model, optimizer):
        if not i:
            optimizer.param_groups[0]["lr"] = torch.tensor([0.1])
        optimizer.param_groups[0]["lr"].fill_(0.1 / (i + 1))

    compare(mlp, make, "bf16", before)


def resized(model, optimizer):
    """As Hugging Face's `resize_token_embeddings` does."""
    new = nn.Linear(16, 6)
    torch.nn.init.constant_(new.weight, 0.1)
    torch.nn.init.zeros_(new.bias)
    for name, p in model[2].named_parameters():
        p.data, p.grad = getattr(new, name).data, None


@pytest.mark.parametrize(
    ("policy", "more"), [*((p, {}) for p in LEVELS), *((p, {"parts": 2, "clip": 0.2}) for p in LEVELS[:2])]
)
def test_data_of_another_shape_and_in_micro_batches(policy, more):
    compare(mlp, sgd, policy, at_step_2(resized), **more)


LATER = {"growth_factor": 4.0, "growth_interval": 2, "backoff_factor": 0.25, "hysteresis": 2, "floor": 2.0}


def by_change(scale):
    for name, value in LATER.items():
        scale.change(name, value)


WAYS = {
    "by loading": lambda scale: scale.load_state_dict({**scale.state_dict(), **LATER}),
    "by change": by_change,
    "by attribute": lambda scale: vars(scale).update(LATER),
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("compile", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_options_of_the_loss_scale_count_from_the_next_step(compile, way):
    """As those of a scale that the loop moves, and which has already seen more good steps than it now needs."""
    model, alone = mlp(), amp_graph.LossScale(2.0**10).to(torch.device("cpu"))
    step = amp_graph.TrainStep(
        model, F.cross_entropy, sgd(model.parameters()), "fp16", loss_scale=2.0**10, compile=compile
    )
    step.loss_scale.dynamic = True
    seen = []
    for i in range(14):
        if i == 5:
            way(step.loss_scale)
            by_change(alone)
        x, y = batch(i)
        if i in (9, 10):
            x[0, 0] = float("inf")
        step(x, y)
        alone.update(torch.tensor(float(i in (9, 10))))
        seen.append(step.loss_scale.values())
        assert seen[-1] == alone.values()
    assert seen[4][0] == 2.0**10
    assert seen[5][0] == 2.0**12  # at once: there were five good steps
    assert seen[10][0] < seen[9][0]  # the second bad one


def test_what_graphs_are_made_for_is_not_set_later():
    _, step = mlp_after(1)
    for name in MADE_FOR:
        kept = getattr(step, name)
        with pytest.raises(CaptureError, match=rf"TrainStep: {name} is set to 2,(.|\n)*legal:(.|\n)*fix:"):
            setattr(step, name, 2)
        assert getattr(step, name) is kept
        step(*batch())


def test_under_no_grad_there_is_no_step():
    model, step = mlp_after(1)
    was = parameters(model)
    with torch.no_grad(), pytest.raises(CaptureError, match=r"torch\.no_grad\(\)(.|\n)*fix:"):
        step(*batch())
    with torch.inference_mode(), torch.enable_grad(), pytest.raises(CaptureError, match="inference_mode"):
        step(*batch())
    assert same(was, parameters(model))


@pytest.mark.parametrize("policy", LEVELS)
def test_converted_and_reverted_between_two_steps(policy):
    """The step goes on as it was, and the model itself answers in between; at O2 in fp32 meanwhile, as at O1."""
    one, two = mlp(), mlp()
    loop(one, sgd(one.parameters()), 6, policy)
    step = amp_graph.TrainStep(two, F.cross_entropy, sgd(two.parameters()), policy)
    for i in range(6):
        if i in (2, 4):
            (amp_graph.revert if (i == 2) == ("O2" in policy) else lambda model: amp_graph.convert(model, policy))(two)
        step(*batch(i))
        two(batch(i)[0])
    assert same(parameters(one), parameters(two))


def test_a_model_that_was_converted_otherwise_is_refused():
    model, step = mlp_after(1)
    amp_graph.convert(model, "fp16")
    with pytest.raises(CaptureError, match=r"converted with policy='fp16-O1'(.|\n)*fix:"):
        step(*batch())
    amp_graph.revert(model)
    step(*batch())


def test_gradients_that_would_go_on_behind_the_batch_are_refused():
    """What the batch, or an attribute of the model, was computed from would silently not be trained."""
    model, encoder = mlp(), nn.Linear(8, 8)
    params = [*model.parameters(), *encoder.parameters()]
    x, y = batch()
    for parts in (1, 2):
        step = amp_graph.TrainStep(model, F.cross_entropy, SGD(params, lr=0.1), "bf16", micro_batches=parts)
        with pytest.raises(CaptureError, match=r"computed before the step(.|\n)*legal:(.|\n)*fix:"):
            step(encoder(x), y)
        step(encoder(x).detach(), y)

    @forward_of(nn.Module)
    def Generated(self, x):
        return x @ self.weight

    model, maker = Generated(), nn.Linear(3, 32)
    model.weight = maker(torch.ones(3)).view(8, 4)
    step = amp_graph.TrainStep(model, F.cross_entropy, SGD(maker.parameters(), lr=0.1), "bf16")
    with pytest.raises(CaptureError, match="computed before the step"):
        step(x, y)


def test_a_parameter_in_the_batch():
    """It is trained, and where it would be split, refused; other leaves are split as what they are."""
    latent, y = nn.Parameter(batch()[0]), batch()[1]
    model = mlp()
    optimizer = SGD([*model.parameters(), latent], lr=0.1)
    was = latent.detach().clone()
    amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16")(latent, y)
    assert not torch.equal(was, latent)
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", micro_batches=2)
    with pytest.raises(CaptureError, match=r"a Parameter of shape \(16, 8\) in the batch(.|\n)*fix:"):
        step(latent, y)
    step(latent.detach().requires_grad_(), y)


def test_no_state_is_made_where_the_loop_makes_none():
    _, step = mlp_after(2, lambda parameters: SGD(parameters, lr=0.1))
    assert step.optimizer.state_dict()["state"] == {}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy", [*LEVELS, "fp16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_autocast_around_it_is_switched_off(dtype, policy):
    """As by `convert`: the plan decides precision, from the first call on or from a later one."""
    results = []
    for entered in (None, 0, 2):
        model = mlp()
        step = amp_graph.TrainStep(model, F.cross_entropy, sgd(model.parameters()), policy)
        for i in range(4):
            with torch.autocast("cpu", dtype, enabled=entered is not None and i >= entered):
                step(*batch(i))
        results.append(parameters(model))
    assert same(results[0], results[1])
    assert same(results[0], results[2])
