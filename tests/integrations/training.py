"""A small model, its batches, and the loop that one would write by hand: what every trainer must equal."""

import torch
from torch.nn import functional as F

import amp_graph

STEPS = 50


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 4))


def batches(steps=STEPS, rows=8):
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 16, generator=made), torch.randint(4, (rows,), generator=made)) for _ in range(steps)]


def adamw(params, **options):
    return torch.optim.AdamW(params, lr=1e-2, **options)


def scaler_of(policy, **options):
    return amp_graph.GradScaler(**options) if policy.startswith("fp16") else None


def growing(policy, interval=8):
    return scaler_of(policy, growth_interval=interval, init_scale=2.0**10)


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(model, policy, data, *, clip_norm=None, clip_value=None, scaler=None, accumulate=1, optimizer=adamw):
    """Train ``model`` by hand under ``policy``; return its fp32 weights, and the losses."""
    amp_graph.convert(model, policy)
    optimizer = optimizer(model.parameters())
    losses = []
    for i, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        scaled = loss / accumulate
        (scaled if scaler is None else scaler.scale(scaled)).backward()
        if (i + 1) % accumulate:
            continue
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return weights(amp_graph.revert(model)), losses


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def as_fsdp2(accelerator, plugin):
    """Let accelerate shard by ``fully_shard`` on a CPU, as on other devices.

    accelerate 1.15 makes DDP of several processes on a CPU, whatever its plugin, ACCELERATE_USE_FSDP and ``accelerate
    launch`` say: ``AcceleratorState.__init__`` (state.py) asks for them only in a branch that lists the
    ``distributed_type`` of several GPUs, XPUs and others, without MULTI_CPU.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    assert accelerator.distributed_type is DistributedType.MULTI_CPU, "this helper is no longer needed"
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    assert accelerator.is_fsdp2
    return accelerator
