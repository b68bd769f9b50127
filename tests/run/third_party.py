"""Runs published training scripts, unmodified: in fp32, under bf16 autocast, and under ``amp-graph run``.

``python -m tests.run.third_party`` gets the scripts and their packages by pip, in a folder outside of the repository,
makes small inputs, runs each three times from each seed and prints a table of losses. ``--examples DIR``: a checkout of
https://github.com/pytorch/examples, which no package holds; without it those scripts are left out, and named.
``--record FILE.json`` keeps all runs there, begins where an earlier call ended, and writes the table beside it.
Exit status 1 if a script fails, converts nothing, or ends farther from fp32 than ``MOST`` times autocast.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from tests.run.third_party_record import Record, distance
from tests.run.third_party_scripts import EXAMPLES, SCRIPTS, Script

SDISTS = ("pytorch-ignite", "torch-optimizer")
PACKAGES = (
    *("torchvision", "pytorch-ignite", "torch-optimizer", "pytorch-ranger", "tqdm", "gymnasium"),
    *("farama-notifications", "cloudpickle", "tensorboard", "tensorboard-data-server", "grpcio", "protobuf"),
    *("werkzeug", "absl-py", "markdown"),
)
MOST = 2.0  # times autocast's distance to fp32, or within NEAR of fp32's own losses
NEAR = 0.01
# Two runs in fp32 differ as much as any other two: the order of rounding decides what a policy samples.
CHAOTIC = ("reinforce", "actor_critic")
# The forward and the loss under autocast, as torch advises; no cache of casts, which lasts as long as the region.
AUTOCAST = """
import runpy, sys, torch
plain = torch.Tensor.backward
def backward(*args, **kwargs):
    with torch.autocast("cpu", enabled=False):
        return plain(*args, **kwargs)
torch.Tensor.backward = backward
sys.argv = sys.argv[1:]
sys.path[0] = __import__("os").path.dirname(sys.argv[0])
with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
# torchvision's wheel is built for CUDA: beside a torch without CUDA its operators are missing, and its import needs
# two of them.
NMS = """
import torch
lib = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    lib.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
# For scripts without a seed of their own, which is the first argument; it runs before the script, in each way.
SEEDED = """
import random, runpy, sys, numpy, torch
seed = int(sys.argv[1])
random.seed(seed)
numpy.random.seed(seed)
torch.manual_seed(seed)
sys.argv = sys.argv[2:]
sys.path[0] = __import__("os").path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# -- running ------------------------------------------------------------------------------------------


def run(script: Script, way: str, seed: int, path: Path, work: Path, site: Path) -> dict:
    """Run ``script`` in a fresh folder: ``way`` is "fp32", "autocast" or "amp-graph POLICY"."""
    here = Path(tempfile.mkdtemp(dir=work)) / "here"
    here.mkdir()
    if script.make is not None:
        script.make(here)
    for name, code in (("autocast", AUTOCAST), ("seeded", SEEDED)):
        (here.parent / f"{name}.py").write_text(code)
    words = [str(path), *script.args, *((script.seed, str(seed)) if script.seed else ())]
    if script.seed == "":
        words = [str(here.parent / "seeded.py"), str(seed), *words]
    if way == "autocast":
        words = [str(here.parent / "autocast.py"), *words]
    elif way != "fp32":
        words = ["-m", "amp_graph", "run", "--policy", way.split()[1], *words]
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "AMP_GRAPH_MACHINE": "default"}
    begin = time.perf_counter()
    found = subprocess.run([sys.executable, *words], cwd=here, env=env, capture_output=True, text=True, timeout=900)
    seconds = time.perf_counter() - begin
    shutil.rmtree(here.parent)
    losses = [float(word) for word in re.findall(script.losses, found.stdout)]
    told = converted_by(found.stderr, path) if way.startswith("amp-graph") else ""
    told = told or (found.stderr.strip().rpartition("\n")[2] if found.returncode else "")
    return {"status": found.returncode, "losses": losses, "told": told, "seconds": round(seconds, 1)}


def fetch(work: Path) -> dict[str, Path]:
    """Get the archives and packages by pip; return the folder of each archive."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    if not (work / "site").exists():
        subprocess.run([*pip, "install", "--no-deps", "--target", str(work / "site"), *PACKAGES], check=True)
    (work / "site" / "sitecustomize.py").write_text(NMS)
    roots = {}
    for name in SDISTS:
        folder = work / name
        if not folder.exists():
            subprocess.run([*pip, "download", "--no-deps", "--no-binary", name, "-d", str(folder), name], check=True)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (roots[name],) = [found for found in folder.iterdir() if found.is_dir()]
    return roots


def converted_by(errors: str, path: Path) -> str:
    """Return the exit report on one line."""
    report = errors.partition("amp-graph run: ")[2].splitlines()
    lines = [line.strip() for i, line in enumerate(report) if not i or line.startswith("  ")]
    text = "; ".join(lines).replace(f"{path.parent}{os.sep}", "")
    return re.sub(r"/\S*/site/", "", text)[:400]


def compare(script: Script, found: dict[str, dict], ours: str) -> bool:
    """Print a script's row; return whether it is as near to fp32 as autocast is."""
    plain, cast, mine = found["fp32"], found["autocast"], found[ours]
    last = [f"{one['losses'][-1]:9.4f}" if one["losses"] else f"{'-':>9}" for one in (plain, cast, mine)]
    far = distance(plain["losses"], cast["losses"]), distance(plain["losses"], mine["losses"])
    near = far[1] <= max(MOST * far[0], NEAR) if far[0] == far[0] else far[1] <= NEAR
    good = mine["status"] == plain["status"] and (near or any(name in script.name for name in CHAOTIC))
    told = "" if good else "  <-- "
    print(f"{script.name:36} {len(plain['losses']):6} {' '.join(last)}  {far[0]:.5f} {far[1]:.5f}{told}", flush=True)
    print(f"{'':36} {mine['told'] or 'no report'}", flush=True)
    for way, one in found.items():
        if one["status"]:
            print(f"    {way}: exit status {one['status']}: {one['told']}", flush=True)
    return good


def main() -> int:
    """Run all scripts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=Path, help="a checkout of github.com/pytorch/examples")
    parser.add_argument("--work", type=Path, default=Path("/tmp/amp_graph_third_party"), help="where all is kept")
    parser.add_argument("--policy", default="bf16", help="of amp-graph run; autocast runs in bf16 in any case")
    parser.add_argument("--only", default="", help="a pattern that is searched in the names of scripts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--record", type=Path, help="a JSON file that keeps the runs")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    roots = fetch(args.work)
    if args.examples is not None:
        roots[EXAMPLES] = args.examples.resolve()
    record, ours = Record(args.record), f"amp-graph {args.policy}"
    failed = 0
    print(f"{'script':36} {'losses':>6} {'fp32':>9} {'autocast':>9} {'amp_graph':>9}  distances to fp32")
    for script in SCRIPTS:
        if not re.search(args.only, script.name):
            continue
        if script.source not in roots:
            print(f"{script.name:36} left out: --examples DIR")
            continue
        where = roots[script.source] / script.path, args.work, args.work / "site"
        for seed in args.seeds if script.seed is not None else args.seeds[:1]:
            found = {
                way: record.ran(script.name, seed, way, functools.partial(run, script, way, seed, *where))
                for way in ("fp32", "autocast", ours)
            }
            failed += not compare(script, found, ours)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
