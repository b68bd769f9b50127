"""Mutation testing of the core, resumable: what was tested is kept in a session of cosmic-ray.

    python -m tests.mutants map                    # record which test runs which line (once; changed files again)
    python -m tests.mutants coverage               # what of the core tests run, into benchmarks/results/coverage.md
    python -m tests.mutants run --count 200 --seed 0 [--only passes/casts ...] [--again]
    python -m tests.mutants table                  # score, survivors and reasons into benchmarks/results/mutants.md

A session is a file of its own for each seed, count and choice of files, under --folder; ``cr-report`` and ``cr-html``
of cosmic-ray read it. ``--again`` tests survivors without a reason again, after tests were
added.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

from attrs import evolve
from cosmic_ray.mutating import _make_diff
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

from tests.mutants import coverage_table, table
from tests.mutants.child import ENOUGH, preload, run_tests
from tests.mutants.choose import chosen
from tests.mutants.coverage_map import Map, all_test_files, test_files
from tests.mutants.population import ROOT, Mutant, controls, core, module_of, sample

NO_SUCH_TEST = 4  # pytest's exit status
NO_TESTS = 5


def main(argv: list[str]) -> int:
    """Run one command."""
    options = _parsed(argv)
    if options.command == "map":
        return _record(options)
    if options.command == "run":
        return _run(options)
    if options.command == "coverage":
        return coverage_table.write(options.folder)
    return table.write(options.folder, options.seconds)


def _parsed(argv: list[str]) -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__, formatter_class=as_written)
    parser.add_argument("command", choices=["map", "coverage", "run", "table"], nargs="?", default="run")
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutants", help="where the map and sessions are kept")
    parser.add_argument("--only", nargs="*", default=[], help="folders or files of the core (run), of tests (map)")
    parser.add_argument("--count", type=int, default=200, help="mutants of the sample (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--controls", type=int, default=0, help="runs of the chosen tests with no change, all must pass"
    )
    parser.add_argument("--seconds", type=float, default=45.0, help="of tests for a mutant, as they take without one")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many; run again to go on")
    parser.add_argument(
        "--most", type=float, default=25.0, help="seconds of a test file (map): its later tests kill nothing"
    )
    parser.add_argument("--go-on", action="store_true", help="map the tests, too, that came after --most in their file")
    parser.add_argument("--all", action="store_true", help="map also test files that mutants do not wait for")
    parser.add_argument("--again", action="store_true", help="test the survivors of the session again")
    return parser.parse_args(argv)


def _record(options: argparse.Namespace) -> int:
    preload()
    covered, ended = Map(options.folder), time.monotonic() + 60 * options.minutes
    files = all_test_files() if options.all else test_files()
    wanted = [f for f in files if not options.only or f.startswith(tuple(options.only))]
    missing = [f for f in wanted if not (covered.is_whole(f) if options.go_on else covered.is_recorded(f))]
    if options.only:
        missing.sort(key=lambda f: next(n for n, o in enumerate(options.only) if f.startswith(o)))
    groups = dict[str, list[str]]()
    for file in missing:
        groups.setdefault(str(Path(file).parent), []).append(file)
    done = 0
    for group in groups.values():
        if time.monotonic() > ended:
            break
        for told in covered.record(group, options.most):
            done += 1
            print(f"{done}/{len(missing)} {told}", flush=True)
    return 0


def session(options: argparse.Namespace) -> Path:
    """Return the path of the session with these options."""
    only = "core" if not options.only else "-".join(o.strip("/").replace("/", ".") for o in options.only)
    name = only if len(only) < 80 else hashlib.sha256(only.encode()).hexdigest()[:12]
    return options.folder / f"seed{options.seed}-{options.count}-{name}.sqlite"


def _run(options: argparse.Namespace) -> int:
    options.folder.mkdir(exist_ok=True)
    preload()
    with use_db(session(options)) as database:
        wanted = _opened(database, options)
        results = dict(database.results)
        pending = [m for m in wanted if m.job not in results]
        if options.again:
            known = table.reasons()
            pending = [m for m in wanted if m.job in results and _is_open(table.Tested(m, results[m.job]), known)]
        _test(database, pending, options)
        print(f"{session(options)}: {score(database)}")
    return 0


def _is_open(tested: table.Tested, known: dict) -> bool:
    """Say whether a mutant survived, for no reason that is written down."""
    is_alive = not (tested.result.is_killed or tested.mutant.is_control)
    return is_alive and (tested.mutant.file, *tested.change) not in known


def _opened(database: WorkDB, options: argparse.Namespace) -> list[Mutant]:
    """Return the session's sample, drawn where it has none; one that was drawn of other sources is an error."""
    held = database.work_items
    if stale := [item for item in held if Mutant.of(item).job != item.job_id]:
        sys.exit(f"{database.name()}: the source of {len(stale)} of its mutants is another by now\n"
                 "  fix: remove it, or take another --seed")  # fmt: skip
    if not held:
        files = core(options.only)
        drawn = [*sample(files, options.count, options.seed), *controls(files, options.controls, options.seed)]
        database.add_work_items({mutant.job: mutant.item for mutant in drawn}.values())
    return sorted((Mutant.of(item) for item in database.work_items), key=lambda m: m.job)  # a part is random, too


def _test(database: WorkDB, pending: list[Mutant], options: argparse.Namespace) -> None:
    covered, ended = Map(options.folder), time.monotonic() + 60 * options.minutes
    for done, mutant in enumerate(pending, 1):
        if time.monotonic() > ended:
            return
        started = time.monotonic()
        result = tested(mutant, covered, options.seconds)
        if options.again and result.is_killed:
            result = evolve(result, output=f"{table.AGAIN}{result.output}")
        database.set_result(mutant.job, result)
        what, took = result.output.split("\n", 1)[0], time.monotonic() - started
        where = f"{mutant.file}:{mutant.start[0]} {mutant.operator}"
        print(f"{done}/{len(pending)} {result.test_outcome.value} {where}: {what} ({took:.1f} s)", flush=True)


def tested(mutant: Mutant, covered: Map, seconds: float) -> WorkResult:
    """Test one mutant; the first line of the output says which test killed it, or how many it survived."""
    source, mutated = (ROOT / mutant.file).read_text(), mutant.mutated()
    diff = "\n".join(_make_diff(source, mutated, mutant.file))
    tests = chosen(mutant, covered, seconds)
    if not tests:
        return WorkResult(WorkerOutcome.NORMAL, "no test runs this line", TestOutcome.SURVIVED, diff)
    given = {"module": module_of(mutant.file), "file": str(ROOT / mutant.file), "source": mutated}
    ended = run_tests(tests, covered.times(), covered.cache, given, seconds)
    if ended.status == NO_SUCH_TEST:  # the mutant changed what tests are parametrized with: all of their cases then
        ended = run_tests(
            list(dict.fromkeys(t.partition("[")[0] for t in tests)), covered.times(), covered.cache, given, seconds
        )
    if ended.status in (0, NO_TESTS, ENOUGH):
        return WorkResult(WorkerOutcome.NORMAL, f"survived {len(tests)} tests", TestOutcome.SURVIVED, diff)
    cause = f"timeout in {ended.failed}" if ended.is_timeout else f"failed: {ended.failed or 'import'}"
    return WorkResult(WorkerOutcome.NORMAL, f"{cause}\n{ended.output}", TestOutcome.KILLED, diff)


def score(database: WorkDB) -> str:
    """Return one line about a session."""
    results = [r for item, r in database.completed_work_items if not Mutant.of(item).is_control]
    killed = sum(r.is_killed for r in results)
    return f"{killed} of {len(results)} killed, of {database.num_work_items}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
