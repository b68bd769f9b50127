"""Mutation testing of the core, resumable: what was tested is kept in a session of cosmic-ray.

    python -m tests.mutants --count 200 --seed 0 [--only passes/casts ...]

A session is a file of its own for each seed, count and choice of files, under --folder; ``cr-report`` and ``cr-html``
read it. A mutant survives where the tests for it pass: the test file that mirrors the source, those that name its
module, those of the mirrored folder, as far as --seconds go; so one that only hangs counts as a survivor, too. Written
at the end: the share that was killed with Wilson's interval of 95 %, and each survivor that reasons.toml does not have.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cosmic_ray.mutating import _make_diff
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkResult

from tests.mutants import hook
from tests.mutants.population import ROOT, core, item_of, module_of, mutated, sample, tests_of
from tests.versions.known import tomllib

REASONS = Path(__file__).parent / "reasons.toml"
KINDS = ("equivalent", "message", "performance", "unreachable", "elsewhere", "open")
PASSED = (0, 5)  # pytest's exit statuses: all passed, no test


def main(argv: list[str]) -> int:
    """Test what the session has not tested; return 1 if a survivor has no reason."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__, formatter_class=as_written)
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutants", help="where sessions are kept")
    parser.add_argument("--only", nargs="*", default=[], help="folders or files of the core")
    parser.add_argument("--count", type=int, default=200, help="mutants of the sample (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="of tests for a mutant")
    options = parser.parse_args(argv)
    options.folder.mkdir(exist_ok=True)
    only = "-".join(o.strip("/").replace("/", ".") for o in options.only) or "core"
    with use_db(options.folder / f"seed{options.seed}-{options.count}-{only}.sqlite") as session:
        if not session.num_work_items:
            session.add_work_items(map(item_of, sample(core(options.only), options.count, options.seed)))
        if stale := [item for item in session.work_items if item_of(item.mutations[0]).job_id != item.job_id]:
            sys.exit(f"{session.name()}: the source of {len(stale)} of its mutants is another by now\n"
                     "  fix: remove it, or take another --seed")  # fmt: skip
        for item in sorted(session.pending_work_items, key=lambda item: item.job_id):  # a part is random, too
            result = tested(item.mutations[0], options.seconds)
            session.set_result(item.job_id, result)
            print(f"{result.test_outcome.value} {item.mutations[0].module_path}: {result.output}", flush=True)
        tests = list(session.completed_work_items)
    killed, known = sum(result.is_killed for _, result in tests), reasons()
    low, high = interval(killed, len(tests))
    print(f"{killed} of {len(tests)} killed ({100 * low:.1f} to {100 * high:.1f} %)")
    alive = [(str(item.mutations[0].module_path), result.diff) for item, result in tests if not result.is_killed]
    missing = [diff for file, diff in alive if (file, *change(diff)) not in known]
    print(*missing, sep="\n")
    return int(bool(missing))


def tested(spec: MutationSpec, seconds: float) -> WorkResult:
    """Test one mutant, in a process that imports the mutated source, as all do that its tests start."""
    file, source = str(spec.module_path), mutated(spec)
    diff = "\n".join(_make_diff((ROOT / file).read_text(), source, file))
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--no-header", "-m",
               "not slow and not integration and not browser", *tests_of(file)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "mutant.json"
        given.write_text(json.dumps({"module": module_of(file), "file": str(ROOT / file), "source": source}))
        path = os.pathsep.join([str(Path(hook.__file__).parent / "site"), *sys.path])
        environment = {**os.environ, "PYTHONPATH": path, hook.VARIABLE: str(given), "OMP_NUM_THREADS": "1"}
        try:
            ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return WorkResult(WorkerOutcome.NORMAL, f"{seconds:.0f} s of tests", TestOutcome.SURVIVED, diff)
    outcome = TestOutcome.SURVIVED if ran.returncode in PASSED else TestOutcome.KILLED
    return WorkResult(WorkerOutcome.NORMAL, "\n".join(ran.stdout.splitlines()[-2:]), outcome, diff)


def change(diff: str) -> tuple[str, str]:
    """Return the lines before and after, without those that are the same."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    was, now = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    return was, now


def interval(killed: int, count: int) -> tuple[float, float]:
    """Return Wilson's interval of 95 % for a share."""
    if not count:
        return 0.0, 1.0
    z, share = 1.959964, killed / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def reasons() -> dict[tuple[str, str, str], str]:
    """Return the reason by file, the lines before, and those after."""
    rows = tomllib.loads(REASONS.read_text())["survivor"]
    if wrong := [row for row in rows if row["kind"] not in KINDS or not row["reason"].strip()]:
        raise ValueError(f"{REASONS.name}: a survivor needs a reason and a kind of {KINDS}: {wrong[0]}")
    return {(row["file"], row["was"], row["now"]): row["reason"] for row in rows}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
