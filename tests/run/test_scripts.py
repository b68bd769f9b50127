"""Whole scripts in processes of their own: what they print, return, raise and save is as under ``python``."""

import os
import subprocess
import sys

import pytest

TRAIN = """
import argparse, atexit, pickle, sys, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def forward(self, x, fails=False):
        if fails:
            raise ValueError("inside of the model")
        return self.body(x)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="none")
    parser.add_argument("--end", default="")
    args = parser.parse_args()
    atexit.register(print, "atexit")
    torch.manual_seed(0)
    print(parser.prog, sys.argv, sys.path[0], __file__, __name__, __spec__ and __spec__.name, __package__)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.end == "early":
        model(torch.randn(2, 64), fails=True)
    losses = []
    for _ in range(4):
        x = torch.randn(128, 64)
        loss = torch.nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("losses", losses, "random", torch.rand(1).item())
    torch.save(model, "model.pt")
    torch.save(model.state_dict(), "state.pt")
    if args.end == "exit":
        sys.exit(3)
    if args.end == "message":
        sys.exit("a message")
    if args.end == "raise":
        try:
            model(x, fails=True)
        except ValueError as error:
            raise KeyError("of the script") from error

if __name__ == "__main__":
    main()
"""
LOAD = """
import sys
import train
sys.modules["__main__"].Net = train.Net
import torch
model = torch.load("model.pt", weights_only=False)
state = torch.load("state.pt")
assert type(model) is train.Net
assert sorted(model.__dict__) == sorted(train.Net().__dict__)
assert {k: v.dtype for k, v in state.items()} == {k: torch.float32 for k in train.Net().state_dict()}
assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())
assert not any(name.startswith("amp_graph") for name in sys.modules), "amp_graph was imported"
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py", "package/__main__.py"):
        (tmp_path / name).write_text(TRAIN)
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "load.py").write_text(LOAD)
    return tmp_path


def python(folder, *words, **variables):
    """Run Python in ``folder``; return its exit status and what it printed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    found = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    return found.returncode, found.stdout, found.stderr


def run(folder, *words, **variables):
    return python(folder, "-m", "amp_graph", "run", *words, **variables)


def losses_of(out):
    (line,) = [line for line in out.splitlines() if line.startswith("losses")]
    return eval(line.partition("]")[0].removeprefix("losses ") + "]")


def test_a_script_runs_as_under_python_and_its_model_is_converted(folder):
    """Its error, too: the traceback ends as Python's, without frames of ours before the script's."""
    code, out, err = python(folder, "train.py", "--policy", "own", "--end", "raise")
    assert code == 1
    status, told, errors = run(folder, "--policy", "bf16", "train.py", "--policy", "own", "--end", "raise")
    assert status == 1
    (before, after), random = (losses_of(out), losses_of(told)), "random"
    assert after[0] == before[0], "the first step runs as written"
    assert after[1:] != before[1:]
    assert after == pytest.approx(before, abs=0.01)
    assert told.partition(random)[2] == out.partition(random)[2], "random numbers, and what is printed later"
    assert told.partition("losses")[0] == out.partition("losses")[0]
    assert "amp-graph run: converted 1 model, policy bf16-O1, compile eager" in errors
    assert "Net (4,810 parameters), called at train.py:29: 1 graph, up to 6 casts a call" in errors
    ours = errors[errors.index("Traceback") :]
    assert ours.splitlines()[-1] == err.splitlines()[-1]
    assert ours.splitlines()[:2] == err.splitlines()[:2]
    assert "amp_graph/run" not in errors
    assert python(folder, "load.py") == (0, "", "")


@pytest.mark.slow
def test_a_script_runs_in_fp16_with_a_loss_scale_that_it_does_not_see(folder):
    _, out, _ = python(folder, "train.py")
    status, told, errors = run(folder, "--policy", "fp16", "train.py")
    assert status == 0
    (before, after) = losses_of(out), losses_of(told)
    assert after[0] == before[0], "the first step runs as written"
    assert after[1:] != before[1:]
    assert after == pytest.approx(before, abs=0.002)
    assert "amp-graph run: converted 1 model, policy fp16-O1, compile eager" in errors
    assert 2 < after[1] < 4, "so that the first scale is half of 65536"
    assert "fp16: losses scaled by 32768 at the end, 0 optimizer steps skipped" in errors
    assert "nothing in this process scales losses" not in errors


ENDS = {"exit": 3, "message": 1, "early": 1}


@pytest.mark.slow
@pytest.mark.parametrize("target", [("train.py",), ("-m", "package.train"), ("-m", "package")])
@pytest.mark.parametrize("end", ENDS)
def test_ends_and_targets(folder, target, end):
    words = (*target, "--end", end)
    code, out, err = python(folder, *words)
    status, told, errors = run(folder, "--policy", "bf16", *words)
    assert (code, status) == (ENDS[end], ENDS[end])
    assert told.partition("losses")[0] == out.partition("losses")[0]
    if target == ("train.py",):
        assert errors.partition("\n")[0].startswith("amp-graph run: ")
        assert errors.endswith(err), "tracebacks and messages are Python's"
    assert not err or errors.splitlines()[-1] == err.splitlines()[-1]


@pytest.mark.slow
def test_a_report_and_the_variable(folder):
    status, _, errors = run(folder, "--report", "r.html", "train.py", AMP_GRAPH_POLICY="bf16,accuracy=fast")
    assert status == 0
    assert "policy bf16-O1,accuracy=fast" in errors
    assert "report of Net: " in errors
    assert "<html" in (folder / "r.html").read_text().lower()


@pytest.mark.slow
@pytest.mark.parametrize("words", [("-W", "error"), ("-X", "dev")])
def test_warnings_as_errors_do_not_stop_the_script(folder, words):
    status, out, errors = python(folder, *words, "-m", "amp_graph", "run", "--policy", "bf16", "train.py")
    assert status == 0, errors
    assert len(losses_of(out)) == 4


@pytest.mark.slow
def test_without_training_or_torch_there_is_one_line(tmp_path):
    (tmp_path / "plain.py").write_text("print('hello')\n")
    assert run(tmp_path, "plain.py") == (
        0,
        "hello\n",
        "amp-graph run: nothing was converted: the script called no module with parameters\n",
    )
    (tmp_path / "forward.py").write_text("import torch\nprint(torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape)\n")
    status, _, errors = run(tmp_path, "forward.py")
    assert status == 0
    assert "nothing was converted\n  not converted: Linear" in errors
    assert "no backward reached its parameters" in errors


@pytest.mark.slow
@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "def f(:", "import os; os.kill(os.getpid(), 15)"])
def test_other_ends(tmp_path, end):
    (tmp_path / "end.py").write_text(f"{end}\n")
    code, _, err = python(tmp_path, "end.py")
    status, _, errors = run(tmp_path, "end.py")
    assert status == code
    assert errors.endswith(err)


WORKERS = """
import torch, torch.multiprocessing as mp

def train(rank):
    model = torch.nn.Linear(4, 4)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    print(rank, type(model.forward).__name__, flush=True)

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(torch.zeros(4, 4), num_workers=1)
    assert len(list(loader)) == 4
    mp.START(train, nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_workers_run_as_written(tmp_path, start):
    text = WORKERS.replace("START(train, ", f"start_processes(train, start_method={start!r}, ")
    (tmp_path / "workers.py").write_text(text)
    status, out, errors = run(tmp_path, "--policy", "bf16", "workers.py")
    assert status == 0, errors
    assert sorted(out.splitlines()) == ["0 method", "1 method"]
    assert errors.strip() == "amp-graph run: nothing was converted: the script called no module with parameters"


RANKS = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    loss = model(torch.randn(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
total = sum(p.double().sum().item() for p in model.parameters())
print(f"rank {dist.get_rank()} {type(model.module.forward).__name__} {total!r}\\n", end="", flush=True)
del model, optimizer  # or gloo's threads now and then outlive the group, and abort the process, without amp_graph too
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_with_two_ranks(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29643")
    status, out, errors = python(tmp_path, *launch, "-m", "amp_graph", "run", "--policy", "bf16", "ranks.py")
    assert status == 0, errors
    found = sorted(line for line in out.splitlines() if line.startswith("rank"))
    assert [line.split()[:3] for line in found] == [["rank", "0", "Conversion"], ["rank", "1", "Conversion"]]
    assert len({line.split()[3] for line in found}) == 1
    assert errors.count("amp-graph run: converted 1 model") == 1
    assert "Sequential in DistributedDataParallel (4,420 parameters)" in errors


SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
for part in (model[0], model):
    fully_shard(part)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
gathered, gather = [], dist.all_gather_single


def noted(*args, **options):
    given = [t for t in (*args, *options.values()) if isinstance(t, torch.Tensor)]
    gathered.append(given[-1].nbytes)
    return gather(*args, **options)


dist.all_gather_single = noted
torch.manual_seed(dist.get_rank())
for _ in range(5):
    gathered.clear()
    loss = model(torch.randn(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
total = sum(p.full_tensor().double().sum().item() for p in model.parameters())
print(f"rank {dist.get_rank()} {total!r} {gathered}\\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_of_a_script_that_shards_its_model(tmp_path):
    (tmp_path / "sharded.py").write_text(SHARDED)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29644")
    status, out, errors = python(tmp_path, *launch, "-m", "amp_graph", "run", "--policy", "bf16", "sharded.py")
    assert status == 0, errors
    first, second = sorted(line.split(" ", 3)[2:] for line in out.splitlines() if line.startswith("rank"))
    assert first == second
    assert first[1] == f"[{65 * 4 * 2}, {64 * 65 + 4}, {64 * 65 + 4}]"  # half of it in bf16, and a number
    assert errors.count("amp-graph run: converted 1 model") == 1


@pytest.mark.slow
def test_start_up_imports_neither_dynamo_nor_passes(tmp_path):
    (tmp_path / "modules.py").write_text("import sys\nprint('torch._dynamo' in sys.modules, len(sys.modules))\n")
    status, out, _ = run(tmp_path, "modules.py")
    assert status == 0
    assert out.startswith("False")
