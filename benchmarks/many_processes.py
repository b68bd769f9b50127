"""Bytes that a rank sends in a step of a sharded Llama: in fp32, under FSDP2's own policy, and by ``convert``.

    python benchmarks/many_processes.py > benchmarks/results/many_processes.md

Nothing is sent and no weight is there: ``fully_shard`` shards fake tensors over a fake process group, and the bytes are
those of the report's table of collectives. What is gathered low is read off a small Llama, which is converted, sharded
and trained for three steps. Every layer is a unit, the rest is the outermost one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection

import root_on_path  # noqa: F401
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import amp_graph
from amp_graph.passes.torch_compat.fully_sharded import dtype_of, every_group, gather_in, records_of
from amp_graph.report.collectives import collectives_of

SIZES = {
    "small": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4},
    "8 B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70 B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
RANKS = (8, 64, 512)
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "FSDP2, bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "convert": MixedPrecisionPolicy(),
}


def llama(size: str) -> torch.nn.Module:
    """Return a Llama 3 of this size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = 128 if size == "small" else 128_256
    heads = 2 if size == "small" else 8
    return LlamaForCausalLM(LlamaConfig(**SIZES[size], num_key_value_heads=heads, vocab_size=words))


def shard(model: torch.nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard each layer, and the rest; all of it is freed after its forward."""
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def in_any_layer(name: str) -> str:
    """Return the name of a parameter without the number of its layer."""
    return re.sub(r"\.\d+\.", ".N.", name)


def read_low() -> set[str]:
    """Return the parameters, of any layer, that ``convert`` gathers in bf16, in one process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    dist.init_process_group("gloo", rank=0, world_size=1)
    model = amp_graph.convert(llama("small"), "bf16")
    shard(model, dist.init_device_mesh("cpu", (1,)), POLICIES["convert"])
    for _ in range(3):
        ids = torch.randint(0, 128, (2, 16))
        model(input_ids=ids, labels=ids).loss.backward()
    records = [pair for group in every_group(model) for pair in records_of(group).items()]
    found = {in_any_layer(name) for name, record in records if dtype_of(record) == torch.bfloat16}
    dist.destroy_process_group()
    return found


def sent(size: str, ranks: int, way: str, low: Collection[str]) -> float:
    """Return the bytes that a rank sends in a step, in a ring: of each collective the share of the other ranks."""
    mesh = dist.init_device_mesh("cpu", (ranks,))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = llama(size)
        shard(model, mesh, POLICIES[way])
        with torch.no_grad():  # FSDP names its parameters in the first call
            model(input_ids=torch.zeros((1, 8), dtype=torch.long), use_cache=False)
        for group in every_group(model) if way == "convert" else ():
            for name, record in records_of(group).items():
                if in_any_layer(name) in low:
                    gather_in(record, torch.bfloat16)
        return sum(one.bytes * one.times for one in collectives_of(model)) * (ranks - 1) / ranks


def main() -> None:
    """Print the table."""
    low = read_low()
    print("# Bytes that a rank sends\n")
    print("GB a step: two gathers of each weight, forward and backward, and one reduction of gradients.")
    print("Every unit, the outermost one too, is freed behind its forward (`reshard_after_forward=True`).\n")
    print(f"| Llama | ranks | {' | '.join(POLICIES)} | convert / fp32 |")
    print(f"|---|---:|{'---:|' * (len(POLICIES) + 1)}")
    for size in [name for name in SIZES if name != "small"]:
        for ranks in RANKS:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            found = {way: sent(size, ranks, way, low) / 1e9 for way in POLICIES}
            dist.destroy_process_group()
            times = " | ".join(f"{gigabytes:,.1f}" for gigabytes in found.values())
            print(f"| {size} | {ranks} | {times} | {found['convert'] / found['fp32']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
