"""Step time of a sharded ``TrainStep`` against eager FSDP2 with its own ``MixedPrecisionPolicy``, on gloo ranks.

Both train the same GPT-2 on the same batch, a step of each in turn. A round gives one ratio, which the slowest rank
decides; the median and quartiles over rounds are printed. Below 1.00 is faster than FSDP2.

    python benchmarks/sharded.py [--rounds 20] [--ranks 2] [--layers 4] [--width 256] [--length 128]
"""

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable

import root_on_path  # noqa: F401 an installed amp_graph is not needed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import amp_graph


def step_of(kind: str, given: argparse.Namespace) -> Callable[[], None]:
    """Return a function that makes one training step."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=4096, n_positions=given.length, n_embd=given.width, n_layer=given.layers, n_head=4)
    off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **off, use_cache=False))
    own = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "FSDP2" else MixedPrecisionPolicy()
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=dist.init_device_mesh("cpu", (given.ranks,)), mp_policy=own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 4096, (4, given.length))
    batch = {"input_ids": ids, "labels": ids}
    if kind == "TrainStep":
        step = amp_graph.TrainStep(model, None, optimizer, "bf16")
        return lambda: step(batch)

    def eager() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return eager


def run(rank: int, given: argparse.Namespace, port: int) -> None:
    """Measure on one rank; the first prints."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(given.ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = {kind: step_of(kind, given) for kind in ("FSDP2", "TrainStep")}
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for i in range(given.rounds + 3):
        for kind, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if i >= 3:
                times[kind].append(taken.item())
    if rank == 0:
        ratios = [ours / theirs for ours, theirs in zip(times["TrainStep"], times["FSDP2"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        told = ", ".join(f"{kind} {1e3 * statistics.median(each):.1f} ms" for kind, each in times.items())
        print(f"{given.ranks} ranks: {told}, ratio {middle:.2f} ({low:.2f} to {high:.2f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(rounds=20, ranks=2, layers=4, width=256, length=128).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    asked = parser.parse_args()
    mp.spawn(run, (asked, free), nprocs=asked.ranks)
