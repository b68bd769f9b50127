"""The update of weights held in two precisions by torch's fused AdamW, by how many elements are updated at a time.

Before: gradients in bf16, as backward makes them. After: fp32 weights and moments updated, bf16 copies written.
25 million parameters in 24 tensors; block sizes in turn in one process, by CPU time. A round gives one ratio to an
update without blocks; medians and quartiles over rounds.

    python benchmarks/update_time.py [--rounds 30] [--threads 1]
"""

import statistics
import time
from collections.abc import Callable

import torch
from interleaved import interleaved, parser_of, quartiles

from amp_graph.optim import torch_fused_update
from amp_graph.optim.torch_fused_update import group_updates

SHAPES = [(1024, 1024)] * 23 + [(1024, 512)]
WHOLE = 1 << 40
BLOCKS = (WHOLE, 1 << 16, 1 << 18, 1 << 19, 1 << 20)


def updating(block: int) -> Callable[[], None]:
    """Return an update of ``block`` elements at a time."""
    torch.manual_seed(0)
    full = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    low, grads = [p.detach().bfloat16() for p in full], [torch.randn(shape).bfloat16() for shape in SHAPES]
    (update,) = group_updates(torch.optim.AdamW(full), full)
    rate = torch.tensor(1e-4, dtype=torch.float64)

    @torch.no_grad()
    def run() -> None:
        torch_fused_update.BLOCK = block
        given = [grad.float() for grad in grads] if block == WHOLE else grads
        update.apply(full, given, update.states, rate, None)
        torch._foreach_copy_(low, full)

    return run


def main() -> None:
    """Run the block sizes in turn and print a Markdown table."""
    options = parser_of(__doc__, rounds=30).parse_args()
    torch.set_num_threads(options.threads)
    seconds = interleaved({block: updating(block) for block in BLOCKS}, options.rounds, time.process_time)
    print("| elements at a time | ms | time / first |\n|---|---:|---|")
    for block, times in seconds.items():
        low, middle, high = quartiles(times, seconds[WHOLE])
        name = "all" if block == WHOLE else f"{block:,}"
        print(f"| {name} | {statistics.median(times) * 1e3:.1f} | {middle:.2f} [{low:.2f} - {high:.2f}] |")


if __name__ == "__main__":
    main()
