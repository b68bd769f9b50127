"""Runs published training scripts, unmodified: in fp32, under bf16 autocast, and under ``amp-graph run``.

``python -m tests.run.third_party`` gets the scripts and their packages by pip, in a folder outside of the repository,
makes small inputs, runs each three times and prints a table of losses. ``--examples DIR``: a checkout of
https://github.com/pytorch/examples, which no package holds; without it those scripts are left out, and named.
Exit status 1 if a script fails, converts nothing, or ends farther from fp32 than ``MOST`` times autocast.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
# For scripts without a seed of their own; it runs before the script, in each of the three ways.
SEEDS = "import random, numpy, torch\nrandom.seed(0)\nnumpy.random.seed(0)\ntorch.manual_seed(0)\n"
SEEDED = (
    SEEDS
    + """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = __import__("os").path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
)


# -- running ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """One run: its exit status, the losses it printed, its errors, its seconds."""

    status: int
    losses: list[float]
    errors: str
    seconds: float


def run(script: Script, how: str, path: Path, work: Path, site: Path, policy: str = "bf16") -> Ran:
    """Run ``script`` in a fresh folder: ``how`` is "fp32", "autocast" or "amp-graph"."""
    here = work / re.sub(r"\W+", "-", f"{script.name} {how}") / "here"
    here.mkdir(parents=True)
    if script.make is not None:
        script.make(here)
    for name, code in (("autocast", AUTOCAST), ("seeded", SEEDED)):
        (here.parent / f"{name}.py").write_text(code)
    words = [*([] if script.seeded else [str(here.parent / "seeded.py")]), str(path), *script.args]
    if how == "autocast":
        words = [str(here.parent / "autocast.py"), *words]
    elif how == "amp-graph":
        words = ["-m", "amp_graph", "run", "--policy", policy, *words]
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "AMP_GRAPH_MACHINE": "default"}
    begin = time.perf_counter()
    found = subprocess.run([sys.executable, *words], cwd=here, env=env, capture_output=True, text=True, timeout=900)
    losses = [float(word) for word in re.findall(script.losses, found.stdout)]
    return Ran(found.returncode, losses, found.stderr, time.perf_counter() - begin)


def distance(one: list[float], other: list[float]) -> float:
    """Return the mean distance of two runs' losses, relative to the size of the losses."""
    if len(one) != len(other) or not one:
        return float("nan")
    return float(np.abs(np.subtract(one, other)).mean() / max(np.abs(one).mean(), 1e-9))


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


def converted_by(errors: str) -> str:
    """Return the exit report on one line."""
    report = errors.partition("amp-graph run: ")[2].splitlines()
    lines = [line for i, line in enumerate(report) if not i or line.startswith("  ")]
    return ";".join(lines)[:300] if lines else "no report"


def main() -> int:
    """Run all scripts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=Path, help="a checkout of github.com/pytorch/examples")
    parser.add_argument("--work", type=Path, default=Path("/tmp/amp_graph_third_party"), help="where all is kept")
    parser.add_argument("--policy", default="bf16", help="of amp-graph run; autocast runs in bf16 in any case")
    parser.add_argument("--only", default="", help="scripts whose name has this in it")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    roots = fetch(args.work)
    if args.examples is not None:
        roots[EXAMPLES] = args.examples.resolve()
    runs = args.work / f"runs-{os.getpid()}"
    failed = 0
    print(f"{'script':36} {'losses':>6} {'fp32':>9} {'autocast':>9} {'amp_graph':>9}  distances to fp32")
    for script in SCRIPTS:
        if args.only not in script.name:
            continue
        if script.source not in roots:
            print(f"{script.name:36} left out: --examples DIR")
            continue
        path = roots[script.source] / script.path
        where = (path, runs, args.work / "site", args.policy)
        found = {how: run(script, how, *where) for how in ("fp32", "autocast", "amp-graph")}
        plain, cast, ours = found.values()
        last = [f"{one.losses[-1]:9.4f}" if one.losses else f"{'-':>9}" for one in found.values()]
        far = distance(plain.losses, cast.losses), distance(plain.losses, ours.losses)
        near = far[1] <= max(MOST * far[0], NEAR) if far[0] == far[0] else far[1] <= NEAR
        good = ours.status == plain.status and (near or any(name in script.name for name in CHAOTIC))
        told = "" if good else "  <-- "
        failed += not good
        print(f"{script.name:36} {len(plain.losses):6} {' '.join(last)}  {far[0]:.5f} {far[1]:.5f}{told}", flush=True)
        print(f"{'':36} {converted_by(ours.errors)}", flush=True)
        for how, one in found.items():
            if one.status:
                print(f"    {how}: exit status {one.status}: {one.errors.strip().splitlines()[-1:]}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
