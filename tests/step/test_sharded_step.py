"""A ``TrainStep`` of a model that ``fully_shard`` has sharded, against the same step unsharded, and against FSDP2."""

import contextlib
import functools
import gc
import math
from unittest import mock

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import amp_graph
from amp_graph.errors import AmpGraphError
from amp_graph.passes.graph.node_info import is_view
from amp_graph.passes.sharding import shard_parameters
from amp_graph.step import trace_step
from tests.layers import layers, words_and_head
from tests.step.test_distributed import LIMIT, _collectives

RATE, STEPS, SCALE = 1e-3, 10, 2.0**10
FUNCTIONAL = "_c10d_functional::"
KINDS = {FUNCTIONAL + "all_gather_into_tensor": "all", FUNCTIONAL + "reduce_scatter_tensor": "red"}
KINDS[FUNCTIONAL + "all_reduce"] = "sum"
WAIT = torch.ops._c10d_functional.wait_tensor.default


# -- models ------------------------------------------------------------------------------------------


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=96, n_positions=16, n_embd=64, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))

    def batch(generator):
        ids = torch.randint(0, 96, (2, 16), generator=generator)
        return ({"input_ids": ids, "labels": ids},)

    return model, list(model.transformer.h), None, batch


@layers(lambda: dict(conv=nn.Conv2d(16, 16, 3, padding=1, bias=False), norm=nn.BatchNorm2d(16)))
def _Residual(self, x):
    return x + nn.functional.relu(self.norm(self.conv(x)))


def _resnet():
    first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    model = nn.Sequential(first, _Residual(), _Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))

    def batch(generator):
        return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)

    return model, [model[1], model[2]], nn.functional.cross_entropy, batch


@layers(
    lambda trains=True: dict(
        a=nn.Linear(33, 7).requires_grad_(trains),
        b=nn.Linear(7, 33),
        gain=nn.Parameter(torch.ones(1)),
        norm=nn.LayerNorm(33),
    )
)
def _UnevenPart(self, x):
    return x + self.b(torch.tanh(self.a(self.norm(x)))) * self.gain


@layers(
    lambda: dict(
        **words_and_head(11, 33, bias=True),
        parts=nn.ModuleList([_UnevenPart(trains=False), _UnevenPart()]),
        shift=nn.Buffer(torch.linspace(-1, 1, 33)),
    )
)
def _Uneven(self, ids):
    """Tied weights, a frozen part, a buffer, and rows that two ranks do not divide."""
    x = self.words(ids) + self.shift
    for part in self.parts:
        x = part(x)
    return self.head(x).flatten(0, 1)


def _uneven():
    model = _Uneven()

    def batch(generator):
        return torch.randint(0, 11, (3, 5), generator=generator), torch.randint(0, 11, (15,), generator=generator)

    return model, list(model.parts), nn.functional.cross_entropy, batch


MODELS = {"gpt2": _gpt2, "resnet": _resnet, "uneven": _uneven}


# -- training ------------------------------------------------------------------------------------------


def _built(name, shards, seed=0, **how):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model, parts, loss_fn, batch = MODELS[name]()
    if shards:
        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        # Batch norm of bf16 with weights in bf16 fails on a CPU: FSDP's policy is not for it.
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)] if how else []
        for part in norms:
            fully_shard(part, mesh=mesh)
        for part in (*parts, model):
            fully_shard(part, mesh=mesh, **how)
    return model, loss_fn, batch


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _state_of(model, optimizer):
    """Return parameters, buffers and the optimizer's state, whole, by name."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    names = {p: name for name, p in model.named_parameters()}
    found = {name: _whole(t.detach()).clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    for p, state in optimizer.state.items():
        found |= {f"{names[p]}.{key}": _whole(value).clone() for key, value in state.items()}
    return found


def _eager_step(model, loss_fn, optimizer, scaler, clip_norm=None):
    def step(*batch):
        out = model(**batch[0]) if loss_fn is None else loss_fn(model(batch[0]), *batch[1:])
        loss = out.loss if loss_fn is None else out
        scaler.scale(loss).backward()
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            step.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm).full_tensor()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step


def _step(name, kind, policy, options):
    """Return a step of a model, with its optimizer, and what makes batches."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    options, low = dict(options), {"bf16": torch.bfloat16, "fp16": torch.float16}.get(policy)
    theirs = dict(mp_policy=MixedPrecisionPolicy(low, torch.float32)) if kind == "fsdp" and low else {}
    model, loss_fn, batch = _built(name, kind != "replicated", options.pop("seed", 0), **theirs)
    make = options.pop("optimizer", functools.partial(torch.optim.AdamW, fused=True))
    optimizer = make(model.parameters(), lr=RATE)
    if kind == "fsdp":
        scaler = amp_graph.GradScaler("cpu", SCALE, enabled=policy == "fp16")
        return _eager_step(model, loss_fn, optimizer, scaler, **options), model, optimizer, batch
    scale = {"loss_scale": amp_graph.LossScale(SCALE)} if policy == "fp16" else {}
    return amp_graph.TrainStep(model, loss_fn, optimizer, policy, **scale, **options), model, optimizer, batch


def _train(rank, size, path, name, kind, policy, options=()):
    """Train ten steps; keep losses, the whole state, the collectives of a step, and the norm of the last gradients."""
    step, model, optimizer, batch = _step(name, kind, policy, options)
    generator, losses = torch.Generator().manual_seed(rank), []
    broken = {
        "cast late": mock.patch.object(shard_parameters, "_casts_of", return_value={}),
        "fp32 tables": mock.patch.object(trace_step, "free_tables", return_value={}),
    }
    with broken.get(kind, contextlib.nullcontext()):
        losses += [float(step(*batch(generator))) for _ in range(STEPS - 1)]
    with _collectives() if kind == "fsdp" else _collectives_of_graphs() as found:
        losses.append(float(step(*batch(generator))))
    kinds = [n.meta["val"].dtype for n in _nodes(step, "all_gather_into_tensor")] if kind != "fsdp" else []
    assert set(kinds) <= {torch.uint8}, "what is counted are bytes"
    norm = getattr(step, "grad_norm", None)
    torch.save((losses, _state_of(model, optimizer), list(found), norm), f"{path}/{rank}")


def _nodes(step, name):
    """Return the calls of a collective in the steps that were traced."""
    graphs = [captured.step.gm.graph for captured in step.captured if captured.step is not None]
    return [n for graph in graphs for n in graph.nodes if f"{name}.default" in str(n.target)]


@contextlib.contextmanager
def _collectives_of_graphs():
    """Note the kind and the elements, bytes of gathers, of each functional collective that runs."""
    found = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield found
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        if event.name in KINDS:
            found.append((KINDS[event.name], None, math.prod(event.input_shapes[0])))


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """Return what was kept of a training on two ranks, each run once."""
    return functools.cache(lambda *how: ranks(_train, 2, tmp_path_factory.mktemp("run"), *how))


def _equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _distance(state, exact, names):
    return torch.stack([(state[n] - exact[n]).norm() for n in names]).norm()


# -- the same numbers ----------------------------------------------------------------------------------


OTHERWISE = {
    "clip": {"clip_value": 1e-3},
    "momentum": {"optimizer": functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01)},
    "Adagrad": {"optimizer": functools.partial(torch.optim.Adagrad, fused=True)},
    "amsgrad": {"optimizer": functools.partial(torch.optim.Adam, amsgrad=True, fused=True)},
}
SAME = [("gpt2", "O0", ()), ("resnet", "O0", ()), ("uneven", "O0", ()), ("resnet", "bf16", ())]


@pytest.mark.parametrize(
    ("name", "policy", "options"), [*SAME, *(("uneven", "O0", tuple(one.items())) for one in OTHERWISE.values())]
)
def test_it_is_the_unsharded_step_bit_for_bit(trained, name, policy, options):
    """Also for rows that ranks do not divide, whatever updates them."""
    ours, theirs = (trained(name, kind, policy, *([options] if options else [])) for kind in ("ours", "replicated"))
    for one, other in zip(ours, theirs, strict=True):
        assert one[0] == other[0]
        assert _equal(one[1], other[1])


def test_where_micro_batches_are_averaged_before_they_are_added_up_it_is_so_to_the_last_place(trained):
    options = (("micro_batches", 3),)
    ours, theirs = (trained("uneven", kind, "O0", options)[0] for kind in ("ours", "replicated"))
    assert ours[0] == pytest.approx(theirs[0], rel=2e-6)
    for key, one in ours[1].items():
        assert (one - theirs[1][key]).norm() <= 1e-3 * theirs[1][key].norm(), key


@pytest.mark.parametrize("name", MODELS)
def test_in_fp32_its_losses_are_those_of_fsdp(trained, name):
    for ours, theirs in zip(trained(name, "ours", "O0"), trained(name, "fsdp", "O0"), strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=2e-6)


FAST = ("gpt2", "bf16"), ("uneven", "bf16")
OTHERS = ("gpt2", "fp16"), ("resnet", "bf16"), ("resnet", "fp16"), ("uneven", "fp16")


@pytest.mark.parametrize(("name", "policy"), FAST)
def test_in_low_precision_it_is_no_further_from_fp32_than_fsdp_with_its_policy(trained, name, policy):
    ours, theirs = _distances(trained, name, policy)
    assert ours <= theirs


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), OTHERS)
def test_so_it_is_for_five_models_together(trained, name, policy):
    """In fp16 both round alike: elements without a gradient, such as biases of keys, decide for one model."""
    every = torch.stack([_distances(trained, name, policy, (("seed", seed),)) for seed in range(5)])
    ours, theirs = every.norm(dim=0)
    assert ours <= theirs


def _distances(trained, name, policy, *options):
    """Return how far our parameters, and FSDP's, are from those of fp32."""
    exact = trained(name, "fsdp", "O0", *options)[0][1]
    names = [n for n in exact if "exp_avg" not in n and ".step" not in n and "running" not in n and "num_b" not in n]
    runs = (trained(name, kind, policy, *options)[0][1] for kind in ("ours", "fsdp"))
    return torch.stack([_distance(run, exact, names) for run in runs])


# -- what travels --------------------------------------------------------------------------------------


def test_a_transformer_is_gathered_low_in_no_more_collectives_than_fsdps(trained):
    kinds = ("ours", "bf16"), ("ours", "O0"), ("fsdp", "bf16")
    ours, full, theirs = (trained("gpt2", *how)[0][2] for how in kinds)
    low, whole, fsdp = ([n for kind, _, n in run if kind == "all"] for run in (ours, full, theirs))
    assert len(low) == len(whole) == len(fsdp) == 5  # the whole, two blocks, and these again
    assert sum(low) <= 0.51 * sum(whole)
    assert len([1 for kind, *_ in ours if kind == "red"]) == len([1 for kind, *_ in theirs if kind == "red"]) == 3
    assert not [1 for kind, *_ in ours if kind == "sum"]


@pytest.mark.parametrize(("kind", "least"), [("cast late", 0.9), ("fp32 tables", 0.515)])
def test_control_what_is_gathered_in_fp32_is_found(trained, kind, least):
    late, whole = (trained("gpt2", *how)[0][2] for how in ((kind, "bf16"), ("ours", "O0")))
    low, full = (sum(n for kind, _, n in run if kind == "all") for run in (late, whole))
    assert low > least * full


KEPT = {
    "bf16": "words.weight: bf16, as all that reads it does so, embeddings too, whose outputs are f32",
    "fp16": "words.weight: f16, as all that reads it does so, embeddings too, whose outputs are f32",
    "bf16,keep_fp32=words": "words.weight: read as it is",
    "bf16,keep_fp32=head": "all: read as it is",
    "O0": "all: read as it is",
}


def _tables(rank, size, path):
    """Keep why a tied table is gathered in its dtype."""
    told = {}
    for policy in KEPT:
        step, _, _, batch = _step("uneven", "ours", policy, ())
        step(*batch(torch.Generator().manual_seed(rank)))
        told[policy] = next(row.reason for row in amp_graph.report(step).collectives if row.direction == "gather")
    torch.save(told, f"{path}/{rank}")


@pytest.mark.parametrize("size", [1, 2])
def test_a_table_is_gathered_low_unless_the_policy_keeps_a_reader_in_fp32(ranks, tmp_path, size):
    for told in ranks(_tables, size, tmp_path):
        assert {policy: KEPT[policy] in reason for policy, reason in told.items()} == dict.fromkeys(KEPT, True), told


@pytest.mark.parametrize("policy", ["O0", "fp16"])
def test_norm_and_verdict_are_one_sum_over_ranks(trained, policy):
    options = (("clip_norm", 0.5),)
    first, second = trained("uneven", "ours", policy, options)
    exact = trained("uneven", "fsdp", "O0", options)[0]
    assert [kind for kind, *_ in first[2]].count("sum") == 1
    assert torch.equal(first[3], second[3])
    torch.testing.assert_close(first[3], exact[3], rtol=1e-5 if policy == "O0" else 2e-2, atol=0.0)
    assert first[0] == pytest.approx(exact[0], rel=2e-6 if policy == "O0" else 2e-3)


def _reported(rank, size, path, name, options):
    """Keep what a step sends, and what its report says that it does."""
    step, _, _, batch = _step(name, "ours", "bf16", options)
    generator = torch.Generator().manual_seed(rank)
    assert not amp_graph.report(step).collectives
    step(*batch(generator))
    with _collectives_of_graphs() as found:
        step(*batch(generator))
    report = amp_graph.report(step)
    torch.save((list(found), report.to_dict()["collectives"], report.text(width=None)), f"{path}/{rank}")


@pytest.mark.parametrize(
    ("name", "options"), [("gpt2", ()), ("uneven", (("micro_batches", 3), ("clip_norm", 0.5)))], ids=["gpt2", "uneven"]
)
def test_the_report_of_a_step_counts_the_bytes_that_are_sent(ranks, tmp_path, name, options):
    """Of a gather a rank sends its half, in bytes; of a reduction it has all numbers, in fp32; of a sum two in fp64."""
    sent, told, text = ranks(_reported, 2, tmp_path, name, options)[0]
    for direction, kind, size in (("gather", "all", 2), ("reduce", "red", 4), ("sum", "sum", 8)):
        given = [count * size for one, _, count in sent if one == kind]
        rows = [row for row in told if row["direction"] == direction]
        assert sum(row["bytes"] * row["times"] for row in rows) == sum(given)
        assert sum(row["times"] for row in rows) == len(given)
        assert bool(given) == (direction != "sum" or bool(options))
    last = [row for row in told if row["direction"] == "gather"][-1]
    if name == "gpt2":
        assert [row["unit"] for row in told if row["direction"] == "reduce"] == [
            "transformer.h.1",
            "transformer.h.0",
            "",
        ]
        assert (last["unit"], last["dtype"], last["times"]) == ("transformer.h.0", "bf16 and f32", 1)
        assert last["reason"].startswith("for backward: ")
        assert "attn.c_attn.weight" in last["reason"].split(": bf16, as all that reads it does so")[0]
        assert "ln_1.weight" in last["reason"].split(": read as it is")[0]
    else:
        assert {row["times"] for row in told if row["direction"] == "reduce"} == {3}
        assert ("norm and verdict", 1) in {(row["reason"], row["times"]) for row in told}
    assert f"gather {last['bytes'] / 1024:.1f} KiB in bf16 and f32" in text


def _order_of_gathers(rank, size, path):
    step, _, _, batch = _step("gpt2", "ours", "bf16", ())
    step(*batch(torch.Generator()))
    nodes = list(step.captured[0].step.gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    gathers, seed = _nodes(step, "all_gather_into_tensor"), place[next(n for n in nodes if "ones_like" in n.name)]
    reads = [_last_reader(nodes, node) for node in gathers]
    torch.save(([place[n] for n in gathers], reads, seed), f"{path}/{rank}")


def _last_reader(nodes, gather):
    """Return the place of the last node that reads what was gathered, or a view or copy of it."""
    derived, last = {gather}, 0
    for i, node in enumerate(nodes):
        if derived.intersection(node.all_input_nodes):
            last = i
            if node.target is WAIT or node.target is torch.ops.aten.clone.default or is_view(node.target):
                derived.add(node)
    return last


def test_gathers_start_a_unit_ahead_and_backward_reads_nothing_that_forward_gathered(ranks, tmp_path):
    for starts, reads, seed in ranks(_order_of_gathers, 1, tmp_path):
        assert len(starts) == 5
        assert all(start < last for start, last in zip(starts[1:], reads, strict=False))
        assert reads[0] > seed, "the outermost unit keeps what it gathered"
        assert all(last < seed for last in reads[1:3]), "blocks do not"


# -- infinities ----------------------------------------------------------------------------------------


@layers(lambda: dict(layers=nn.ModuleList([nn.Linear(8, 8) for _ in range(10)])))
def _Planted(self, x, forward, backward):
    """Ten layers: infinities are added behind each, or made of its gradient where ``backward`` is 0 and not 1."""
    for i, layer in enumerate(self.layers):
        x = torch.tanh(layer(x)) + forward[i]
        x = x + ((x * 0 + backward[i]).float().sqrt() - backward[i].sqrt())
    return x


def _shards_of(model, optimizer):
    every = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    return [t.detach().to_local() if hasattr(t, "to_local") else t for t in every]


def _plant(rank, size, path):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = _Planted()
    for part in (*model.layers, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    scale = amp_graph.LossScale(2.0**10, growth_interval=1000)
    step = amp_graph.TrainStep(model, nn.functional.mse_loss, optimizer, "fp16", loss_scale=scale)
    same, scales = [], []
    for i in range(43):
        forward, backward, x = torch.zeros(10), torch.ones(10), torch.randn(4, 8)
        if i == 41 and rank == size - 1:
            x[0, 0] = torch.nan
        elif i % 2 and rank == size - 1:
            (forward if i < 20 else backward)[i // 2 % 10] = float("inf") if i < 20 else 0.0
        before = [t.clone() for t in _shards_of(model, optimizer)]
        step((x, forward, backward), torch.randn(4, 8))
        now = _shards_of(model, optimizer)
        same.append(len(before) == len(now) and all(map(torch.equal, before, now)))
        scales.append(float(scale.scale))
    torch.save((same, scales, int(step.skipped_steps)), f"{path}/{rank}")


def test_an_infinity_or_a_nan_on_one_rank_skips_the_step_on_all(ranks, tmp_path):
    first, second = ranks(_plant, 2, tmp_path)
    assert first == second
    assert first[0] == [bool(i % 2) for i in range(43)]
    assert first[2] == 21


SIZES = [(4, 4), (4, 6), (5, 3), (4, 0), (2, 8), (4, 4)]  # of the batches of both ranks, in each step


def _other_sizes(rank, size, path):
    """Train by a sharded step, and by FSDP; a rank may have no sample at all."""
    kept = []
    for kind in ("TrainStep", "fsdp"):
        step, model, optimizer, batch = _step("resnet", kind, "O0", ())
        model.eval()  # running statistics: those of a batch of nothing are NaN
        generator = torch.Generator().manual_seed(rank)
        for sizes in SIZES:
            images, labels = batch(generator)
            step(*(torch.cat([images] * 4)[: sizes[rank]], torch.cat([labels] * 4)[: sizes[rank]]))
        kept.append({name: t for name, t in _state_of(model, optimizer).items() if "step" not in name})
    torch.save(kept, f"{path}/{rank}")


def test_ranks_may_have_batches_of_other_sizes_or_none(ranks, tmp_path):
    (ours, theirs), (others, _) = ranks(_other_sizes, 2, tmp_path)
    assert all(torch.equal(ours[name], others[name]) for name in ours)
    assert all(t.isfinite().all() for t in ours.values())
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-3, atol=1e-5)


# -- memory --------------------------------------------------------------------------------------------


def _held(rank, size, path):
    """Count the bytes of what is there between two steps: of all storages that Python knows."""
    found = []
    for kind in ("ours", "replicated"):
        gc.collect()
        known = {t.untyped_storage().data_ptr() for t in _tensors()}
        step, model, optimizer, batch = _step("gpt2", kind, "bf16", (("micro_batches", 2),))
        step(*batch(torch.Generator().manual_seed(rank)))
        gc.collect()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors()}
        found.append(sum(size for address, size in storages.items() if address not in known))
        del step, model, optimizer
    torch.save(found, f"{path}/{rank}")


def _tensors():
    return [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and t.layout is torch.strided]


def test_a_rank_holds_half_of_parameters_masters_gradients_and_state(ranks, tmp_path):
    assert all(ours <= 0.52 * theirs for ours, theirs in ranks(_held, 2, tmp_path))


# -- beside the usual ----------------------------------------------------------------------------------


def _beside(rank, size, path, kind):
    """Train with an optimizer that has no fused update, parameters that no unit has, and evaluations between."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(_UnevenPart(), _UnevenPart(), nn.Linear(33, 11))
    if kind != "replicated":
        fully_shard(model[0], reshard_after_forward=False)
        fully_shard(model[1], ignored_params={model[1].gain})
    optimizer = torch.optim.RAdam(model.parameters(), lr=RATE)
    step = amp_graph.TrainStep(model, nn.functional.cross_entropy, optimizer, "O0", clip_norm=0.1)
    torch.manual_seed(rank)
    names, losses = set(model.state_dict()), []
    for i in range(5):  # RAdam divides by no root yet, which would enlarge roundings
        x, y = torch.randn(4, 33), torch.randint(0, 11, (4,))
        losses.append(float(step(x, y)))
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model(x), y)))  # gathers, and keeps what it gathered
        if i == 2:
            _state_of(model, optimizer)  # which reshards: else what was gathered would be frozen
            model[0].a.requires_grad_(False)
    state = _state_of(model, optimizer)
    assert set(model.state_dict()) == names
    if kind != "replicated":
        assert len(_nodes(step, "all_gather_into_tensor")) == 2 * 2  # of two graphs, in each two units that keep it
        model(x).sum().backward()  # as FSDP runs it
    torch.save((losses, state), f"{path}/{rank}")


def test_what_no_unit_shards_is_averaged_and_any_optimizer_steps(ranks, tmp_path):
    for ours, theirs in zip(*(ranks(_beside, 2, tmp_path, kind) for kind in ("ours", "replicated")), strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=5e-6)
        for key, one in ours[1].items():
            assert (one - theirs[1][key]).norm() <= 1e-4 * theirs[1][key].norm(), key


def _hybrid(rank, size, path, shards):
    """Train in fp32 and in fp16, in one process of one rank: DTensor's cache returns meshes of the rank it was."""
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {}
    for policy in ("O0", "fp16"):
        torch.manual_seed(0)
        model = nn.Sequential(_UnevenPart(), _UnevenPart(), nn.Linear(33, 11))
        for part in (*model[:2], model) if shards else ():
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
        step = amp_graph.TrainStep(model, nn.functional.cross_entropy, optimizer, policy, clip_norm=0.1)
        generator = torch.Generator().manual_seed(rank)
        batches = [(torch.randn(4, 33, generator=generator), torch.arange(4)) for _ in range(STEPS)]
        losses = [float(step(*batch)) for batch in batches]
        found[policy] = losses, _state_of(model, optimizer), step.grad_norm
    torch.save(found, f"{path}/{rank}")


@pytest.mark.slow
def test_shards_with_replicas_on_four_ranks(ranks, tmp_path):
    runs = [ranks(_hybrid, 4, tmp_path, shards) for shards in (True, False)]
    for policy, of_losses, of_state in (("O0", 2e-6, 2e-6), ("fp16", 1e-3, 0.05)):
        for ours, theirs in ((one[policy], other[policy]) for one, other in zip(*runs, strict=True)):
            assert _equal(ours[1], runs[0][0][policy][1])
            assert ours[0] == pytest.approx(theirs[0], rel=of_losses)
            torch.testing.assert_close(ours[2], theirs[2], rtol=of_state, atol=0.0)
            for key, one in ours[1].items():
                assert (one - theirs[1][key]).norm() <= of_state * theirs[1][key].norm(), (policy, key)


# -- what is refused -----------------------------------------------------------------------------------


def _refused(rank, size, path):
    """Try each step that is refused; keep what the errors say. Nothing has changed."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = torch.distributed.init_device_mesh("cpu", (size,))
    two = torch.distributed.init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "tensor"))
    low = MixedPrecisionPolicy(torch.bfloat16)

    def older(model):
        model[1] = FullyShardedDataParallel(model[1], device_id=torch.device("cpu"))

    def split_and_sharded(model):
        parallelize_module(model[0], two["tensor"], ColwiseParallel())
        fully_shard(model, mesh=two["data"])

    kinds = {
        "older": (older, {}),
        "tensor parallel": (lambda m: parallelize_module(m[0], mesh, ColwiseParallel()), {}),
        "tensor parallel, sharded": (split_and_sharded, {}),
        "meshes": (lambda m: (fully_shard(m[1], mesh=two), fully_shard(m, mesh=mesh)), {}),
        "divided": (lambda m: (fully_shard(m[1], mesh=mesh), m[1].set_gradient_divide_factor(1.0)), {}),
        "columns": (lambda m: fully_shard(m, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1)), {}),
        "policy": (lambda m: fully_shard(m[1], mesh=mesh, mp_policy=low), {}),
        "offload": (lambda m: fully_shard(m[1], mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)), {}),
        "converted": (lambda m: fully_shard(amp_graph.convert(m[1], "bf16"), mesh=mesh), {}),
        "O2": (lambda m: fully_shard(m, mesh=mesh), dict(policy="bf16-O2")),
        "compiled": (lambda m: fully_shard(m, mesh=mesh), dict(compile="inductor")),
        "alone": (lambda m: fully_shard(m, mesh=mesh), dict(process_group=False)),
    }
    found = {}
    for kind, (prepare, options) in kinds.items():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before, hooks = _state_of(model, optimizer), [len(m._forward_pre_hooks) for m in model.modules()]
        with pytest.raises(AmpGraphError) as error:
            amp_graph.TrainStep(model, nn.functional.mse_loss, optimizer, **{"policy": "bf16", **options})
        assert _equal(before, _state_of(model, optimizer))
        assert hooks == [len(m._forward_pre_hooks) for m in model.modules()]
        found[kind] = str(error.value)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    step = amp_graph.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model[1].parameters(), 0.1), "bf16")
    batch, before = (torch.randn(4, 4), torch.randn(4, 4)), model[0].weight.to_local().clone()
    step(*batch)
    for call, (otherwise, usual) in TOLD.items():
        getattr(model, call)(otherwise)
        with pytest.raises(AmpGraphError) as error:
            step(*batch)
        found[call] = str(error.value)
        getattr(model, call)(usual)
    step(*batch)
    assert torch.equal(before, model[0].weight.to_local())
    step.optimizer.add_param_group({"params": [*model[0].parameters()]})
    step(*batch)
    assert not torch.equal(before, model[0].weight.to_local()), "what the optimizer got later is trained"
    torch.save(found, f"{path}/{rank}")


TOLD = {  # between two steps; and what is as before
    "set_requires_gradient_sync": (False, True),
    "set_requires_all_reduce": (False, True),
    "set_gradient_divide_factor": (1.0, None),
    "set_all_reduce_hook": (print, None),
}
REFUSED = {
    **{call: (f"the model: {call}", "micro_batches=") for call in TOLD},
    "older": ("1 is wrapped by FullyShardedDataParallel", "fully_shard(module)"),
    "tensor parallel, sharded": ("0.weight has the placements", "amp_graph.convert"),
    "meshes": ("the model and 1 are sharded over different meshes", "one mesh for all units"),
    "divided": ("1: set_gradient_divide_factor was called", "amp_graph.convert"),
    "tensor parallel": ("0.weight is a DTensor that no unit", "amp_graph.convert"),
    "columns": ("has the placements", "amp_graph.convert"),
    "policy": ("1: its MixedPrecisionPolicy", "without mp_policy"),
    "offload": ("1: its parameters are offloaded", "without offload_policy"),
    "converted": ("1", "amp_graph.revert"),
    "O2": ("bf16-O2", "O1"),
    "compiled": ("compile='inductor'", "leave compile out"),
    "alone": ("process_group=False", "process_group=None"),
}


def test_what_a_sharded_step_cannot_do_is_refused_by_name_with_the_way_out(ranks, tmp_path):
    for found in ranks(_refused, 2, tmp_path):
        assert found.keys() == REFUSED.keys()
        for kind, (what, way_out) in REFUSED.items():
            assert what in found[kind]
            assert way_out in found[kind]


@layers(
    lambda kind, rank: dict(kind=kind, rank=rank, a=nn.Parameter(torch.ones(4, 4)), b=nn.Parameter(torch.ones(4, 4)))
)
def _Unlike(self, x):
    """Reads a parameter or not, by rank or by batch; writes one; or is no single graph."""
    y = x @ self.a
    other = self.rank == 1 if self.kind == "first" else len(x) == 3 and self.kind == "later"
    if not other:
        y = y @ self.b
    if self.kind == "written":
        with torch.no_grad():
            self.a.mul_(0.5)
    if self.kind == "no graph":
        torch._dynamo.graph_break()
    return y.sum()


def _unlike(rank, size, path):
    """Train where one rank plans otherwise, from the first step on and later on, and where a step is impossible."""
    from torch.distributed.fsdp import fully_shard

    told = []
    for kind in ("first", "written", "no graph", "later"):
        model = fully_shard(_Unlike(kind, rank))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = amp_graph.TrainStep(model, None, optimizer, "O0")
        if kind == "later":
            for size in (2, 3, 2):  # all ranks read other parameters
                step(torch.ones(size, 4))
        before = [t.clone() for t in _shards_of(model, optimizer)]
        with pytest.raises(AmpGraphError) as error:
            step(torch.ones(2 if kind == "later" and rank == 0 else 3, 4))
        told.append(str(error.value))
        assert all(map(torch.equal, before, _shards_of(model, optimizer)))
    torch.save(told, f"{path}/{rank}")


def test_ranks_that_would_call_other_collectives_are_told_before_they_do(ranks, tmp_path):
    first, second = ranks(_unlike, 2, tmp_path, timeout=LIMIT)
    assert "the steps of rank 1 have other collectives" in first[0]
    assert "the steps of rank 0 have other collectives" in second[0]
    for told in (first, second):
        assert "forward writes to a, which is sharded" in told[1]
        assert "are not one graph" in told[2]
        assert "the steps of rank 0 have other collectives" in told[3]
    assert "rank 1 failed in its step: CaptureError" in first[3]


def _wrong_batches(rank, size, path):
    """Give batches of wrong shapes to a sharded step, on all ranks and on one; keep what is told, and train on."""
    step, model, optimizer, batch = _step("resnet", "ours", "bf16", ())
    images, labels = batch(torch.Generator().manual_seed(rank))
    told = []
    for wrong in ((images[:, :2], labels), (images, torch.zeros(5, dtype=torch.int64))):
        before = [t.clone() for t in _shards_of(model, optimizer)]
        with pytest.raises(AmpGraphError) as error:
            step(*wrong)
        told.append((type(error.value).__name__, str(error.value)))
        assert all(map(torch.equal, before, _shards_of(model, optimizer)))
        assert float(step(images, labels)) > 0
    with pytest.raises(AmpGraphError) as error:
        step(images[:, :2] if rank else images, labels)
    told.append((type(error.value).__name__, str(error.value)))
    torch.save(told, f"{path}/{rank}")


def test_a_batch_of_a_wrong_shape_is_told_as_the_model_tells_it(ranks, tmp_path):
    first, second = ranks(_wrong_batches, 2, tmp_path, timeout=LIMIT)
    for told in (first, second):
        for (kind, text), own in zip(
            told[:2], ("RuntimeError: ", "ValueError: Expected input batch_size (4)"), strict=True
        ):
            assert kind == "CaptureError"
            assert own in text
            assert "not one graph" not in text
        assert "channels" in told[0][1]
        assert "the batch has f32[4,2,8,8], i64[4]" in told[0][1]
    assert second[2] == second[0]
    assert first[2][0] == "RankError"
    assert (
        "rank 1 failed in its step: CaptureError: TrainStep: Sequential or its loss fails for this batch" in first[2][1]
    )
