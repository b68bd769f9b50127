"""Several processes, on gloo: ranks agree on bad steps and stay equal bit for bit."""

import contextlib
import functools
import os
import time
import warnings
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import amp_graph
from amp_graph.capture import low_gathers
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import RankError
from amp_graph.passes.loss_scaling import average
from amp_graph.step.trace_step import StepBuilder
from tests.by_hand import descend
from tests.layers import layers
from tests.measure import DtypeLog
from tests.step.processes import free_port, group_of

STEPS, BAD = 40, {3, 4, 17, 30}
SLOW = pytest.mark.slow


def _model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))


def _train(rank, size, path, wrapped, agree):
    """Train on this rank's own data, with infinite gradients on one rank; keep what came out."""
    model = _model()
    if wrapped == "before":
        model = amp_graph.convert(nn.parallel.DistributedDataParallel(model), "fp16")
    else:
        model = nn.parallel.DistributedDataParallel(amp_graph.convert(model, "fp16"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = amp_graph.GradScaler("cpu", 2.0**6, growth_interval=5, process_group=None if agree else False)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        if step in BAD and rank == size - 1:  # behind the all-reduce: this rank alone sees it
            next(model.parameters()).grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    kept = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    torch.save(([t.detach() for t in kept], scaler.state_dict()), f"{path}/{rank}")


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True)) and one[1] == two[1]


@pytest.mark.parametrize(
    ("size", "wrapped"), [pytest.param(2, "after", marks=SLOW), (2, "before"), pytest.param(4, "after", marks=SLOW)]
)
def test_one_ranks_infinite_gradient_skips_the_step_on_all(ranks, tmp_path, size, wrapped):
    first, *others = ranks(_train, size, tmp_path, wrapped, True)
    assert all(equal(first, other) for other in others)
    assert first[1]["_skipped"] == len(BAD)
    assert first[0][0].isfinite().all()


def test_control_without_agreement_ranks_drift_apart(ranks, tmp_path):
    first, second = ranks(_train, 2, tmp_path, "after", False)
    assert not equal(first, second)


# -- FSDP ---------------------------------------------------------------------------------------------


def _train_sharded(rank, size, path):
    """Each part converted, then sharded; an infinite gradient on one rank's shard."""
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (size,))
    model = nn.Sequential(_model(), nn.Linear(3, 3))
    for part in model:
        fully_shard(amp_graph.convert(part, "fp16"), mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = amp_graph.GradScaler("cpu", 2.0**6)
    for step in range(10):
        optimizer.zero_grad()
        x, y = _batch(rank, step)
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        if step == 4 and rank == size - 1:
            next(model.parameters()).grad.to_local()[0, 0] = float("inf")
        before = [p.to_local().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
        assert same == (step == 4)
    graphs = [len(amp_graph.report(part).graphs) for part in model]
    torch.save((graphs, scaler.state_dict()), f"{path}/{rank}")


def test_parts_are_converted_then_sharded(ranks, tmp_path):
    first, second = ranks(_train_sharded, 2, tmp_path)
    assert first == second
    assert first[0] == [1, 1]
    assert first[1]["_skipped"] == 1


@contextlib.contextmanager
def _collectives():
    """Note the kind, dtype and bytes of each gather and reduction, as FSDP calls them."""
    found = []

    def noted(name, own):
        def call(output, *args, **kwargs):
            given = next(t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
            found.append((name[:3], given.dtype, given.nbytes))
            return own(output, *args, **kwargs)

        return call

    names = [n for n in ("all_gather_single", "reduce_scatter_single") if hasattr(torch.distributed, n)]
    with contextlib.ExitStack() as stack:
        for name in names or ("all_gather_into_tensor", "reduce_scatter_tensor"):
            own = getattr(torch.distributed, name)
            stack.enter_context(mock.patch.object(torch.distributed, name, noted(name, own)))
        yield found


@layers(
    lambda: dict(norm=nn.LayerNorm(33), a=nn.Linear(33, 128), b=nn.Linear(128, 33), scale=nn.Parameter(torch.ones(33)))
)
def _Uneven(self, x):
    return x + self.b(nn.functional.gelu(self.a(self.norm(x)))) * self.scale


def _sharded(kind, mesh):
    """A model with two units and a head; how ``kind`` converts it, and has its units called."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(_Uneven(), _Uneven(), nn.Linear(33, 3))
    own = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "theirs" in kind else MixedPrecisionPolicy()
    converted = model if "whole" in kind else model[:2] if "fp32" not in kind else ()
    if "checkpoints" in kind:
        model = nn.Sequential(*map(checkpoint_wrapper, model[:2]), model[2])
        converted = model
    for part in model[:2] if converted is not model else ():
        if "differing" in kind:
            amp_graph.convert(part, "bf16,keep_fp32=a" if mesh.get_rank() else "bf16")
        elif "fp32" not in kind:
            amp_graph.convert(part, "bf16")
        if "unseen" in kind:
            conversion_of(part)._was_called = True
    if "before" in kind:
        amp_graph.convert(model, "bf16")
    for part in (*model[:2], model):
        fully_shard(part, mesh=mesh, mp_policy=own, reshard_after_forward=False if "staying" in kind else None)
    if converted is model and not {"fp32", "before"} & {*kind.split()}:
        amp_graph.convert(model, "bf16")
    if "prefetched" in kind:
        model.set_modules_to_forward_prefetch([model[0]])
        model[0].set_modules_to_forward_prefetch([model[1]])
        model[1].set_modules_to_backward_prefetch([model[0]])
    return model


@contextlib.contextmanager
def _broken(kind):
    """Leave out what ``kind`` names as lost: a control."""
    from amp_graph.capture import low_gathers

    lost = {
        "gradients are lost": ("gather_in", _without_gradient(low_gathers.gather_in)),
        "graphs are lost": ("is_at_rest", lambda group, in_graphs: True),
        "questions are lost": ("ask", lambda record, number: None),
    }
    with contextlib.ExitStack() as stack:
        for name, broken in (item for key, item in lost.items() if key in kind):
            stack.enter_context(mock.patch.object(low_gathers, name, broken))
        yield


def _without_gradient(gather_in):
    def call(record, dtype):
        if (before := getattr(record, "_unsharded_param", None)) is not None:
            before.grad = None
        gather_in(record, dtype)

    return call


def _gathers(rank, size, path, kind, micro_batches=1):
    """Train five steps of a model with two units; keep losses, weights, collectives of each step, and the report."""
    model = _sharded(kind, torch.distributed.init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    losses, steps = [], []
    with _broken(kind):
        for step in range(5):
            if step == 4 and "reverted" in kind:
                for part in model[:2]:
                    amp_graph.revert(part)
            if "by hand" in kind:
                model[0].unshard()
                model[0].reshard()
            with _collectives() as found:
                for i in range(micro_batches):
                    model.set_requires_gradient_sync(i == micro_batches - 1)
                    calls = 2 if "twice" in kind else 1
                    outputs = [model(torch.randn(16, 33)) for _ in range(calls)]
                    loss = sum(nn.functional.cross_entropy(y, torch.randint(0, 3, (16,))) for y in outputs)
                    (loss / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            steps.append(list(found))
    weights = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    whole = conversion_of(model) is not None
    told = [amp_graph.report(part).to_dict() for part in ([model] if whole else model[:2]) if conversion_of(part)]
    told = [(one["collectives"], [graph["training"] for graph in one["graphs"]]) for one in told]
    torch.save((losses, weights, steps, told), f"{path}/{rank}")


def gathered(step):
    return sum(size for kind, _, size in step if kind == "all")


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """Return what was kept of a training on two ranks, each run once."""
    return functools.cache(lambda *how: ranks(_gathers, 2, tmp_path_factory.mktemp("run"), *how))


def test_what_graphs_read_low_is_gathered_low_in_as_many_gathers(trained):
    _, weights, steps, told = trained("ours")[0]
    _, expected, plain, _ = trained("fp32")[0]
    assert gathered(steps[0]) == gathered(plain[0])  # the first call tells what graphs read
    for ours, theirs in zip(steps[1:], plain[1:], strict=True):
        assert gathered(ours) <= 0.52 * gathered(theirs)
        assert len(ours) == len(theirs)
        assert {dtype for kind, dtype, _ in ours if kind == "red"} == {torch.float32}
    assert (weights - expected).norm() <= 1.5 * (trained("theirs")[0][1] - expected).norm()
    (gather, reduce), graphs = told[0]
    assert len(graphs) == 1
    assert (gather["unit"], gather["direction"], gather["dtype"], gather["times"]) == ("0", "gather", "bf16 and f32", 2)
    assert (reduce["direction"], reduce["dtype"], reduce["times"]) == ("reduce", "f32", 1)
    assert "norm.weight, norm.bias, scale: a graph reads it in fp32" in gather["reason"]
    sent = [size for kind, _, size in steps[-1] if kind == "all"]
    assert sent.count(gather["bytes"] // 2 + 4) == 2 * gather["times"]  # of both units: a shard, and a number
    assert max(size for kind, _, size in steps[-1] if kind == "red") == reduce["bytes"]


def test_control_without_what_graphs_read_gathers_are_fp32(trained):
    assert list(map(gathered, trained("unseen")[0][2])) == list(map(gathered, trained("fp32")[0][2]))


@pytest.mark.parametrize(
    "how", ["whole", "checkpoints", "prefetched", "whole prefetched", "whole by hand", "whole before"]
)
def test_units_in_wrappers_and_prefetched_ones_are_gathered_low(trained, how):
    """And those whose ``unshard()`` is called, which sets the dtypes of gathers anew; converted behind or before."""
    losses, weights, steps, told = trained(how)[0]
    plain = f"{how.removesuffix('before').replace('whole', '')} fp32".strip()
    assert len(steps[-1]) == len(trained(plain)[0][2][-1])
    assert gathered(steps[-1]) <= 0.52 * gathered(trained(plain)[0][2][-1])
    expected = trained("fp32")[0][1]
    assert (weights - expected).norm() <= 1.5 * (trained("theirs")[0][1] - expected).norm()
    if "prefetched" != how:  # the head, which is between units, has a graph as well
        assert len(told[0][1]) == 3
        assert [one["unit"] for one in told[0][0]] == ["", "", "0", "0", "1", "1"]
        assert "stays gathered" in told[0][0][0]["reason"]
        assert losses == pytest.approx(trained("fp32")[0][0], rel=2e-2)
        assert losses != trained("fp32")[0][0]
    if "before" in how:
        assert losses == trained("whole")[0][0]


def test_the_report_counts_the_bytes_that_are_sent(trained):
    """Of a gather a rank sends its half, and a number beside it; of a reduction all of what is reduced is given."""
    _, _, steps, told = trained("whole")[0]
    counted = {"gather": 0, "reduce": 0}
    for one in told[0][0]:
        counted[one["direction"]] += one["bytes"] * one["times"]
    numbers = 4 * sum(one["times"] for one in told[0][0] if one["direction"] == "gather" and one["unit"])
    assert gathered(steps[-1]) == counted["gather"] / 2 + numbers
    assert sum(size for kind, _, size in steps[-1] if kind == "red") == counted["reduce"]


def test_ranks_with_other_graphs_gather_low_what_all_read_low(trained):
    first, second = trained("differing")
    assert first[2] == second[2]
    whole, low = gathered(trained("fp32")[0][2][-1]), gathered(first[2][-1])
    assert 0.52 * whole < low < 0.8 * whole  # one of two products
    assert "a.weight, a.bias: the ranks do not agree on it" in first[3][0][0][0]["reason"]


def test_a_reverted_part_is_gathered_in_fp32_again(trained):
    steps = trained("reverted")[0][2]
    assert gathered(steps[3]) < gathered(steps[4]) == gathered(trained("fp32")[0][2][4])


@pytest.mark.parametrize(
    ("how", "micro_batches", "lost"), [("", 4, "gradients are lost"), ("twice", 1, "graphs are lost")]
)
def test_gradients_that_wait_or_are_to_come_are_not_lost(trained, how, micro_batches, lost):
    (_, exact, plain, _), (_, ours, steps, _) = (
        trained(f"{how} {kind}", micro_batches)[0] for kind in ("fp32", "ours")
    )
    assert gathered(steps[1]) < 0.52 * gathered(plain[1])
    unlike = (ours - exact).norm()
    assert unlike <= 1.5 * (trained(f"{how} theirs", micro_batches)[0][1] - exact).norm()
    assert (trained(f"{how} {lost}", micro_batches)[0][1] - exact).norm() > 4 * unlike  # the control


def test_the_policy_that_fully_shard_was_given_wins(trained):
    losses, _, steps, told = trained("theirs")[0]
    assert "its MixedPrecisionPolicy asks for param_dtype" in told[0][0][0]["reason"]
    assert gathered(steps[0]) == gathered(steps[-1])
    assert losses == pytest.approx(trained("fp32")[0][0], rel=2e-2)


@layers(lambda: dict(a=nn.Linear(33, 64), b=nn.Linear(64, 33), reads=False))
def _Late(self, x):
    y = x + self.b(torch.relu(self.a(x)))
    return y, self.a.weight.double().exp().sum() if self.reads else y.sum()


def _read_late(rank, size, path, kind, grad):
    """Read a weight in fp32 from the sixth call on, on one rank; keep how far off what is read is, and the warnings."""
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    model = nn.Sequential(_Late())
    amp_graph.convert(model[0], "bf16")
    for part in (model[0], model):
        fully_shard(part, mesh=mesh)
    found = []
    with _broken(kind), torch.set_grad_enabled(grad):
        for i in range(9):
            model[0].reads = i >= 5 and rank == 0
            expected = model[0].a.weight.full_tensor().double().exp().sum()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                y, read = model(torch.randn(4, 33))
            if grad:
                (y.square().mean() + read * 1e-3).backward()
            found.append((float(abs(read - expected) / expected), [str(one.message) for one in told]))
    torch.save(found, f"{path}/{rank}")


@pytest.mark.parametrize(("grad", "rounded"), [(True, {5}), (False, {5, 6})])
def test_what_a_late_graph_reads_in_fp32_is_told_and_gathered_so_from_the_next_agreement_on(
    ranks, tmp_path, grad, rounded
):
    first, second = ranks(_read_late, 2, tmp_path, "ours", grad)
    assert {i for i, (off, _) in enumerate(first) if i >= 5 and off > 1e-9} == rounded
    ((i, told),) = [(i, one) for i, (_, said) in enumerate(first) for one in said if "is read in fp32" in one]
    assert i == 5
    assert "0.a.weight is read in fp32 from this call on" in told
    assert "off by up to 0.39%" in told
    assert not [one for _, said in second for one in said if "is read in fp32" in one]
    broken, _ = ranks(_read_late, 2, tmp_path, "questions are lost", grad)
    assert min(off for off, _ in broken[5:]) > 1e-9  # the control


def _see_from_outside(rank, size, path, how):
    """Keep the dtypes in which code outside of a forward sees weights between it and its backward."""
    from amp_graph.capture import low_gathers

    model = _sharded(how, torch.distributed.init_device_mesh("cpu", (size,)))
    seen = []
    with mock.patch.object(low_gathers, "STAYS", "") if "control" in how else contextlib.nullcontext():
        for _ in range(3):
            loss = model(torch.randn(4, 33)).sum()
            seen.append({p.dtype for p in model.parameters()})
            loss.backward()
    torch.save(seen, f"{path}/{rank}")


@pytest.mark.parametrize("how", ["ours staying", "whole staying", "whole"])
def test_code_outside_of_a_forward_sees_weights_in_fp32(ranks, tmp_path, how):
    assert ranks(_see_from_outside, 2, tmp_path, how)[0] == [{torch.float32}] * 3


def test_control_units_that_stay_gathered_would_be_seen_low(ranks, tmp_path):
    assert torch.bfloat16 in ranks(_see_from_outside, 2, tmp_path, "ours staying control")[0][-1]


@layers(lambda: dict(norm=nn.LayerNorm(6), net=nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6))))
def _Residual(self, x):
    return x + self.net(self.norm(x))


# -- other meshes --------------------------------------------------------------------------------------


def _stack(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(_Residual(), _Residual(), nn.Linear(6, 3))


def _train_tensor_parallel(rank, size, path):
    """Gradients of a model whose residual parts are split over ranks: in fp32, converted, and under autocast."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = torch.distributed.init_device_mesh("cpu", (size,))
    found = {}
    for kind in ("fp32", "before", "after", "autocast"):
        model = _stack()
        if kind == "before":
            amp_graph.convert(model, "bf16")
        for part in model[:2]:
            parallelize_module(part, mesh, {"net.0": ColwiseParallel(), "net.2": RowwiseParallel()})
        if kind == "after":
            amp_graph.convert(model, "bf16")
        x, y = _batch(0, 0, 64)
        with DtypeLog() as log, torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        grads = [getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)().flatten() for p in model.parameters()]
        dtypes = {name: dtypes[0] for name, dtypes in log.entries}
        graphs = len(amp_graph.report(model).graphs) if kind in ("before", "after") else 0
        found[kind] = torch.cat(grads), dtypes["aten.addmm"], dtypes["_c10d_functional.all_reduce"], graphs
    torch.save(found, f"{path}/{rank}")


def test_parts_that_are_split_over_ranks_compute_low_and_are_summed_in_fp32(ranks, tmp_path):
    first, second = ranks(_train_tensor_parallel, 2, tmp_path)
    exact, *dtypes = first["fp32"]
    assert dtypes[:2] == [torch.float32] * 2
    for order in ("before", "after"):
        grads, product, total, graphs = first[order]
        assert (product, total, graphs) == (torch.bfloat16, torch.float32, 1)
        assert torch.equal(grads, second[order][0])
        assert 0 < (grads - exact).norm() <= 1.2 * (first["autocast"][0] - exact).norm()


def _train_split_and_sharded(rank, size, path):
    """Train parts that are split over ranks and sharded over others, gathered low or not; two backwards an update."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = torch.distributed.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
    found = []
    for is_low in (True, False):
        model = _stack()
        for part in model[:2]:
            parallelize_module(part, mesh["tensor"], {"net.0": ColwiseParallel(), "net.2": RowwiseParallel()})
        for part in (*model[:2], model):
            fully_shard(part, mesh=mesh["data"])
        amp_graph.convert(model, "fp16")
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
        scaler = amp_graph.GradScaler("cpu", 2.0**10)
        late = mock.patch.object(low_gathers, "is_plain", return_value=False)
        with contextlib.nullcontext() if is_low else late:
            for i in range(6):
                model.set_requires_gradient_sync(i % 2 == 1)
                x, y = _batch(mesh["data"].get_local_rank(), i)
                if i == 3 and rank >= size // 2:
                    x[0, 0] = float("inf")
                with _collectives() as collectives:
                    loss = nn.functional.cross_entropy(model(x), y)
                    scaler.scale(loss).backward()
                losses.append(loss.item())
                if i % 2:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        weights = [p.to_local().detach() for p in model.parameters()]
        gathers, reductions = ([one for one in collectives if one[0] == kind] for kind in ("all", "red"))
        found.append((losses, weights, scaler.get_scale(), gathers, reductions))
    torch.save(found, f"{path}/{rank}")


@pytest.mark.slow
def test_parts_that_are_split_and_sharded_are_gathered_low_and_train_as_if_cast_behind(ranks, tmp_path):
    """In fp16, where ranks of both dimensions skip the update of an infinite gradient together."""
    for ours, (expected, others, _, late, _) in ranks(_train_split_and_sharded, 4, tmp_path):
        losses, weights, scale, low, reduced = ours
        assert losses == pytest.approx(expected, rel=0.0, abs=0.0, nan_ok=True)
        assert all(map(torch.equal, weights, others))
        assert all(t.isfinite().all() for t in weights)
        assert scale == 2.0**9
        assert len(low) == len(late) == 5  # the whole, two parts, and these again
        assert all(one[2] <= 0.6 * other[2] for one, other in zip(low[1:], late[1:], strict=True))
        assert [dtype for _, dtype, _ in reduced] == [torch.float32] * 3


def _train_pipeline(rank, size, path):
    """Losses of two micro-batches over two stages, of which each is converted, and of the model in one process."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = _stack()
    stage = nn.Sequential(model[0]) if rank == 0 else nn.Sequential(*model[1:])
    amp_graph.convert(stage, "bf16")
    schedule = ScheduleGPipe(PipelineStage(stage, rank, size, torch.device("cpu")), 2, nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        x, y = _batch(0, step, 8)
        found = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=found)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in found])
    torch.save((losses, len(amp_graph.report(stage).graphs)), f"{path}/{rank}")


def _losses_of_one_process(policy):
    model = amp_graph.convert(_stack(), policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(4):
        x, y = _batch(0, step, 8)
        losses = [nn.functional.cross_entropy(model(a), b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        descend(optimizer, sum(losses) / 2)
        found.append([loss.item() for loss in losses])
    return torch.tensor(found)


def test_stages_of_a_pipeline_are_converted_each(ranks, tmp_path):
    (_, graphs), (losses, more) = ranks(_train_pipeline, 2, tmp_path)
    assert graphs == more == 1
    expected, exact = _losses_of_one_process("bf16"), _losses_of_one_process("O0")
    unlike = (torch.tensor(losses) - expected).abs().max()
    assert unlike < 0.1 * (expected - exact).abs().max()  # they run in bf16, as the whole does


# -- the whole step -----------------------------------------------------------------------------------

CHECKED = 100


def _batch(rank, step, count=4):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def _train_step(rank, size, path, policy, options):
    model = _model(seed=rank)  # the first rank's parameters count
    if options.pop("wrapped", False):
        model = nn.parallel.DistributedDataParallel(model)
    bad = options.pop("bad", BAD)
    bucket = options.pop("bucket", average.BUCKET)
    optimizer = options.pop("kind", torch.optim.AdamW)(model.parameters(), lr=0.01)
    step = amp_graph.TrainStep(model, nn.functional.cross_entropy, optimizer, policy, **options)
    with mock.patch.object(average, "BUCKET", bucket):
        for i in range(CHECKED):
            x, y = _batch(rank, i)
            if i in bad and rank == size - 1:
                x[0, 0] = float("inf")
            step(x, y)
    kept = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
    torch.save(([t.detach() for t in kept], step.state_dict(), step.graph_text()), f"{path}/{rank}")


@pytest.mark.parametrize(
    ("size", "policy", "options"),
    [
        (2, "fp16", {}),
        (2, "fp16-O2", {"reduce_dtype": torch.bfloat16, "wrapped": True}),
        pytest.param(4, "fp16", {"clip_norm": 0.5, "bucket": 0}, marks=pytest.mark.slow),
        (2, "fp16", {"clip_norm": 0.5, "bucket": 0}),
    ],
)
def test_a_train_step_averages_gradients_and_ranks_stay_equal(ranks, tmp_path, size, policy, options):
    first, *others = ranks(_train_step, size, tmp_path, policy, options)
    assert all(equal(first, other) for other in others)
    assert first[1]["loss_scale"]["_skipped"] == len(BAD)
    assert all(t.isfinite().all() for t in first[0])
    lines = first[2].splitlines()
    reduced = [i for i, line in enumerate(lines) if "_c10d_functional.all_reduce" in line]
    waited = [i for i, line in enumerate(lines) if "_c10d_functional.wait_tensor" in line]
    backward = [i for i, line in enumerate(lines) if "aten.mm" in line][-1]
    assert len(reduced) == len(waited) == (4 if options.get("bucket") == 0 else 1)
    assert min(waited) > backward
    if len(reduced) > 1:
        assert min(reduced) < backward, "the first bucket starts while backward runs"


def _train_images_in_each_layout(rank, size, path):
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model.to(memory_format=layout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = amp_graph.TrainStep(model, nn.functional.cross_entropy, optimizer, "bf16")
        for i in range(5):
            generator = torch.Generator().manual_seed(10 * i + rank)
            step(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4) % 3)
        found.append([p.detach() for p in model.parameters()])
    torch.save(found, f"{path}/{rank}")


@pytest.mark.slow
@pytest.mark.multiplied  # equal bits in both layouts are of oneDNN's kernels
def test_averages_lie_as_their_parameters_do(ranks, tmp_path):
    """In channels_last, where a fused kernel would otherwise take each number of a gradient for another."""
    for plain, last in ranks(_train_images_in_each_layout, 2, tmp_path):
        for a, b in zip(plain, last, strict=True):
            assert (a - b).norm() <= 1e-5 * a.norm()


@pytest.mark.parametrize("wrapped", [False, True])
def test_control_without_averaging_ranks_drift_apart(ranks, tmp_path, wrapped):
    first, second = ranks(_train_step, 2, tmp_path, "fp16", {"process_group": False, "wrapped": wrapped})
    assert not equal(first, second)


@pytest.mark.parametrize(
    "options",
    [{"bucket": 0}, {"micro_batches": 2}, {"micro_batches": 2, "kind": torch.optim.RAdam}],
    ids=["whole", "2 micro-batches", "behind the graph"],
)
def test_two_ranks_train_as_one_process_on_both_batches(ranks, tmp_path, options):
    """Without bad steps, in fp32: the average of two gradients is the gradient of both batches."""
    kind = options.get("kind", torch.optim.AdamW)
    first, second = ranks(_train_step, 2, tmp_path, "O0", {"bad": (), **options})
    assert equal(first, second)
    if options.get("bucket") == 0:
        lines = next(text for text in first[2].split("\n\n") if "all_reduce" in text).splitlines()
        places = {name: [i for i, line in enumerate(lines) if name in line] for name in ("all_reduce", "aten.mm")}
        assert places["all_reduce"][0] < places["aten.mm"][-1], "the first bucket starts while backward runs"
    model = _model(seed=0)
    optimizer = kind(model.parameters(), lr=0.01)
    for i in range(CHECKED):
        parts = [_batch(rank, i) for rank in range(2)]
        out = model(torch.cat([x for x, _ in parts]))
        descend(optimizer, nn.functional.cross_entropy(out, torch.cat([y for _, y in parts])))
    for mine, theirs in zip(first[0], model.state_dict().values(), strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


# -- ranks that differ ---------------------------------------------------------------------------------


@layers(lambda: dict(layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), never=nn.Linear(6, 6)), seed=0)
def _DropsLayers(self, x, dropped=()):
    for i, layer in enumerate(self.layers):
        x = x if i in dropped else torch.relu(layer(x)) + x
    return x


DROPPED = [((), ()), ((2,), (1,)), ((), (2,)), ((3,), (3,)), ((2,), (1,)), ((), ())]  # by both ranks, in each step
SAME_SIZES = [((2,), (1,))] * 3
DROPS = {  # the optimizer, and options of a step
    "behind the graph": (lambda p: torch.optim.RMSprop(p, 0.01, weight_decay=0.3), {"loss_scale": 256.0}),
    "micro-batches, clipped": (lambda p: torch.optim.SGD(p, 0.1, 0.9), {"micro_batches": 2, "clip_norm": 0.5}),
    "AdamW, scaled": (lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.3), {"loss_scale": 256.0}),
    "compiled": (lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.3), {"compile": "aot_eager"}),
}


def _drop_layers(name, whole, dropped):
    """Train by a step of the ranks, or by DDP; return the parameters."""
    model = _DropsLayers()
    made, options = DROPS[name]
    optimizer, loss = made(model.parameters()), nn.functional.cross_entropy
    step = amp_graph.TrainStep(model, loss, optimizer, "O0", **options) if whole else None
    wrapped = None if whole else nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    for i, layers_dropped in enumerate(dropped):
        x, y = _batch(torch.distributed.get_rank(), i)
        if step is not None:
            step((x, layers_dropped), y)
            continue
        optimizer.zero_grad()
        loss(wrapped(x, layers_dropped), y).backward()
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _drop_layers_both_ways(rank, size, path, name, control):
    steps = [one[rank] for one in (SAME_SIZES if control else DROPPED)]
    with mock.patch.object(StepBuilder, "averaged", return_value=[]) if control else contextlib.nullcontext():
        torch.save([_drop_layers(name, whole, steps) for whole in (True, False)], f"{path}/{rank}")


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name == "compiled" else ()) for name in DROPS])
def test_ranks_that_drop_other_layers_average_as_ddp_does(ranks, tmp_path, name):
    """Layers that one rank drops get zeros from it; what every rank drops is not even decayed."""
    (ours, theirs), (others, _) = ranks(_drop_layers_both_ways, 2, tmp_path, name, False)
    assert all(map(torch.equal, ours, others))
    assert max((a - b).abs().max() for a, b in zip(ours, theirs, strict=True)) < 1e-6
    assert torch.equal(ours[-1], _DropsLayers().never.bias), "no rank has a gradient of it"


def test_control_an_average_of_what_each_rank_has_is_of_other_layers(ranks, tmp_path):
    (ours, theirs), _ = ranks(_drop_layers_both_ways, 2, tmp_path, "AdamW, scaled", True)
    assert max((a - b).abs().max() for a, b in zip(ours, theirs, strict=True)) > 1e-3


def _fail_on_one_rank(rank, size, port, path, kind):
    from torch.distributed.fsdp import fully_shard

    model = _model()
    with group_of(rank, size, port, timeout=5):
        if kind == "sharded":
            mesh = torch.distributed.init_device_mesh("cpu", (size,))
            for part in (model[0], model[2], model):
                fully_shard(part, mesh=mesh)
        parameters = list(model.parameters())
        local = parameters if kind == "whole" else [p.to_local() for p in parameters]
        step = amp_graph.TrainStep(model, _loss_of_good_samples, torch.optim.AdamW(parameters, 0.1), "bf16")
        for i in range(10):
            x, y = _batch(rank, i)
            before = [p.detach().clone() for p in local]
            try:
                step(x, y, i == 5 and rank == 1)
            except Exception as error:
                kept = all(map(torch.equal, before, local))
                torch.save((i, type(error).__name__, str(error), kept), f"{path}/{rank}")
                for _ in range(200 * rank):  # the failed one lives on, as it may in a notebook
                    time.sleep(0.0 if os.path.exists(f"{path}/0") else 0.1)
                os._exit(0)


def _loss_of_good_samples(logits, y, is_bad):
    if is_bad:
        raise ValueError("sample 17 has no label")
    return nn.functional.cross_entropy(logits, y)


@pytest.mark.parametrize(
    ("kind", "error"), [("whole", "ValueError"), pytest.param("sharded", "CaptureError", marks=SLOW)]
)
def test_a_rank_that_raises_is_named_by_the_others(tmp_path, kind, error):
    begun = time.monotonic()
    context = mp.spawn(_fail_on_one_rank, (2, free_port(), str(tmp_path), kind), nprocs=2, join=False)
    for process in context.processes:
        process.join(90)
    waiting, failing = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert failing[:2] == (5, error)
    assert waiting[:2] == (5, "RankError")
    assert f"rank 1 failed in its step: {error}: " in waiting[2]
    assert "sample 17 has no label" in waiting[2]
    assert (waiting[3], failing[3]) == (True, True), "no parameter changed"
    assert time.monotonic() - begun < 60


def _step_of(model, kind):
    """Return a step of a model, which ``kind`` shards."""
    from torch.distributed.fsdp import fully_shard

    for part in (*model.children(), model) if kind == "sharded" else ():
        if next(part.parameters(), None) is not None:
            fully_shard(part)
    return amp_graph.TrainStep(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), "bf16")


def _die_on_the_way(rank, size, port, path):
    with group_of(rank, size, port, timeout=20):
        step = _step_of(_model(), "whole")
        for i in range(10):
            if i == 5 and rank == size - 1:
                os._exit(1)
            try:
                step(*_batch(rank, i))
            except RankError as error:
                torch.save(str(error), f"{path}/{rank}")
                os._exit(2)


@pytest.mark.sampled(2)
def test_a_killed_rank_ends_the_others_with_an_error(tmp_path):
    begun = time.monotonic()
    context = mp.spawn(_die_on_the_way, (2, free_port(), str(tmp_path)), nprocs=2, join=False)
    for process in context.processes:
        process.join(90)
    assert not any(process.is_alive() for process in context.processes), "a rank hangs"
    assert [process.exitcode for process in context.processes] == [2, 1]
    assert "rank 1, last in step 5, did not come to step 6, in which rank 0 waited" in torch.load(tmp_path / "0")
    assert time.monotonic() - begun < 90


LIMIT = 10  # seconds of a process group; a rank that starts under load takes some to connect


def _come_late(rank, size, path, kind, at):
    """Train; the last rank does other things, longer than the others wait, and then comes all the same."""
    step = _step_of(_model(), kind)
    begun = time.monotonic()
    for i in range(4):
        if i == at and rank == size - 1:
            time.sleep(LIMIT + 4)
        before = [t.clone() for t in _locals(step.model)]
        begun = time.monotonic()
        try:
            step(*_batch(rank, i))
        except RankError as error:
            kept = all(map(torch.equal, before, _locals(step.model)))
            torch.save((i, str(error), kept, time.monotonic() - begun), f"{path}/{rank}")
            break
    while not os.path.exists(f"{path}/{size - 1}"):  # else the first rank's store would have ended
        time.sleep(0.1)


def _locals(model):
    return [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "size", "at"), [("sharded", 2, 3), *(pytest.param("whole", 3, i, marks=SLOW) for i in (0, 3))]
)
def test_a_rank_that_does_not_come_is_named_within_the_time_limit(ranks, tmp_path, kind, size, at):
    for rank, (i, told, kept, seconds) in enumerate(ranks(_come_late, size, tmp_path, kind, at, timeout=LIMIT)):
        assert (i, kept) == (at, True)
        waited = "rank 0" if size == 2 else "ranks 0, 1"
        assert f"rank {size - 1}, last in step {at}, did not come to step {at + 1}, in which {waited} waited" in told
        assert "fix:" in told
        assert seconds < LIMIT + 5, rank


def _change_alone(rank, size, path, kind, how):
    """Train, and change the modes or what is trained on all ranks, then on one rank alone."""
    model = _model()
    model.append(nn.Dropout(0.5))
    step = _step_of(model, kind)
    change = {
        "eval": lambda on: model.train(not on),
        "frozen": lambda on: model[2].weight.requires_grad_(not on),
    }[how]
    for i in range(3):
        change(i == 1)
        step(*_batch(rank, i))
    if rank == size - 1:
        change(True)
    before, begun = [t.clone() for t in _locals(model)], time.monotonic()
    with pytest.raises(RankError) as error:
        step(*_batch(rank, 3))
    kept = all(map(torch.equal, before, _locals(model)))
    torch.save((str(error.value), kept, time.monotonic() - begun), f"{path}/{rank}")


@pytest.mark.parametrize(
    ("kind", "how", "flag"),
    [
        ("sharded", "eval", "model.training=False, model.0.training=False"),
        ("sharded", "frozen", "model.2.weight.requires_grad=False"),
        ("whole", "frozen", "model.2.weight.requires_grad=False"),
    ],
)
def test_a_rank_that_changes_its_model_alone_is_told_before_its_collectives_differ(ranks, tmp_path, kind, how, flag):
    others, changed = ranks(_change_alone, 2, tmp_path, kind, how, timeout=LIMIT)
    for told, kept, seconds in (others, changed):
        assert f"rank 1 has {flag}" in told
        assert "unlike rank 0" in told
        assert kept
        assert seconds < LIMIT + 5
    assert changed[0].startswith("TrainStep: rank 1 has")
    assert "rank 1 failed in its step: RankError" in others[0]
