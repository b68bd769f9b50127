"""Planted faults of two ranks, on gloo: each is found at its line on both, and no bit of a script changes."""

import datetime
import gc
import os
import socket
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from tests.audit.running import expected, found, run_script

RANKS = Path(__file__).with_name("ranks")


def _on_rank(rank, port, path, machine):
    """Run the script at ``path`` as it is, audited, and as its twin; return what was found, and what was not alike."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    os.environ["AMP_GRAPH_MACHINE"] = machine
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    try:
        runs = [run_script(path, word, audited=audited) for word in ("faulty", "right") for audited in (True, False)]
    finally:
        gc.collect()  # as in tests/step/test_distributed.py: DDP's reducer must go before the group
        torch.distributed.destroy_process_group()
    faulty, plain_faulty, right, plain_right = runs
    alike = all(
        (one.printed, one.error, one.random) == (other.printed, other.error, other.random) and one.printed
        for one, other in ((faulty, plain_faulty), (right, plain_right))
    )
    unseen = [*faulty.report.unseen, *right.report.unseen]
    return found(faulty, path), {f.code for f in right.report.findings}, alike, unseen, faulty.error


@pytest.fixture(scope="module")
def two_ranks():
    """Run a script on two ranks; importing torch, they spend most of the time."""
    with ProcessPoolExecutor(2, mp.get_context("spawn")) as pool:

        def run(path):
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            machine = os.environ["AMP_GRAPH_MACHINE"]
            started = [pool.submit(_on_rank, rank, port, path, machine) for rank in range(2)]
            return [one.result() for one in started]

        yield run


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", sorted(RANKS.glob("*.py")), ids=lambda path: path.stem)
def test_a_planted_fault_of_ranks_is_found_at_its_line_and_changes_no_bit(two_ranks, path):
    wanted = expected(path)
    assert wanted
    for of_faulty, of_right, is_alike, unseen, error in two_ranks(path):
        assert (is_alike, [one for one in unseen if "of 2: what others do alone" not in one], error) == (True, [], "")
        assert wanted <= of_faulty
        assert not {code for code, _ in wanted} & of_right
