"""Bytes that a rank sends in a step of a sharded Llama: in fp32, under FSDP2's own policy, and by amp_graph.

    python benchmarks/many_processes.py > benchmarks/results/many_processes.md

Nothing is sent and no weight is there: ``fully_shard`` shards fake tensors over a fake process group, and the bytes are
those of the report's table of collectives. What is gathered in which dtype is read off a small Llama, which is sharded
and trained for three steps. Every layer is a unit, the rest is the outermost one.
"""

from __future__ import annotations

import os
import re

import root_on_path  # noqa: F401
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import amp_graph
from amp_graph.passes.graph.meta_keys import SENT
from amp_graph.passes.torch_compat.fully_sharded import dtype_of, every_group, gathered_bytes, records_of
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
    "TrainStep": MixedPrecisionPolicy(),
}
Read = dict[bool, dict[str, torch.dtype]]  # what is gathered for forward, and for backward, by name without a layer


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


def gathers_of_small() -> dict[str, Read]:
    """Return what ``convert`` and ``TrainStep`` gather, in one process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    dist.init_process_group("gloo", rank=0, world_size=1)
    mesh, ids = dist.init_device_mesh("cpu", (1,)), torch.randint(0, 128, (2, 16))
    model = amp_graph.convert(llama("small"), "bf16")
    shard(model, mesh, POLICIES["convert"])
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
    records = [pair for group in every_group(model) for pair in records_of(group).items()]
    converted = {in_any_layer(name): dtype_of(record) for name, record in records}
    model = llama("small")
    shard(model, mesh, POLICIES["TrainStep"])
    step = amp_graph.TrainStep(model, None, torch.optim.SGD(model.parameters()), "bf16")
    step({"input_ids": ids, "labels": ids})
    of_step: Read = {False: {}, True: {}}
    for sent in (node.meta[SENT] for node in step.captured[-1].step.gm.graph.nodes if SENT in node.meta):
        of_step[sent.what.startswith("for backward")] |= {in_any_layer(name): dtype for name, dtype, *_ in sent.parts}
    dist.destroy_process_group()
    return {"convert": {False: converted, True: converted}, "TrainStep": of_step}


def sent(size: str, ranks: int, way: str, read: Read | None) -> float:
    """Return the bytes that a rank sends in a step, in a ring: of each collective the share of the other ranks.

    read: None for what FSDP gathers by itself.
    """
    mesh = dist.init_device_mesh("cpu", (ranks,))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = llama(size)
        shard(model, mesh, POLICIES[way])
        with torch.no_grad():  # FSDP names its parameters in the first call
            model(input_ids=torch.zeros((1, 8), dtype=torch.long), use_cache=False)
        every = list(collectives_of(model))
        total = sum(one.bytes * one.times for one in every if read is None or one.direction == "reduce")
        records = [pair for group in every_group(model) for pair in records_of(group).items()]
        for dtypes in (read or {}).values():
            low = [(record, dtypes.get(in_any_layer(name))) for name, record in records]
            total += sum(gathered_bytes(record, dtype) for record, dtype in low if dtype is not None)
        return total * (ranks - 1) / ranks


def main() -> None:
    """Print the table."""
    read = gathers_of_small()
    print("# Bytes that a rank sends\n")
    print("GB a step: two gathers of each weight, forward and backward, and one reduction of gradients, in fp32.")
    print("Every unit, the outermost one too, is freed behind its forward (`reshard_after_forward=True`).")
    print("A `TrainStep` gathers once what backward does not read, such as the table of an embedding.\n")
    print(f"| Llama | ranks | {' | '.join(POLICIES)} | convert / fp32 | TrainStep / fp32 |")
    print(f"|---|---:|{'---:|' * (len(POLICIES) + 2)}")
    for size in [name for name in SIZES if name != "small"]:
        for ranks in RANKS:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            found = {way: sent(size, ranks, way, read.get(way)) / 1e9 for way in POLICIES}
            dist.destroy_process_group()
            times = " | ".join(f"{gigabytes:,.1f}" for gigabytes in found.values())
            ours = " | ".join(f"{found[way] / found['fp32']:.2f}" for way in read)
            print(f"| {size} | {ranks} | {times} | {ours} |", flush=True)


if __name__ == "__main__":
    main()
