"""Choose the tests for a mutant: of those that run the changed lines the mirrored ones first, and the fast ones first.

Tests mirror the sources: passes/casts/insert_casts.py has tests/passes/casts/test_insert_casts.py, and its folder has
tests/passes/casts/.
"""

from __future__ import annotations

import ast
import re
from pathlib import PurePosixPath

from tests.mutants.coverage_map import Map, test_files
from tests.mutants.population import ROOT, Mutant, module_of


def mirrored(source: str) -> tuple[str, str]:
    """Return the test file and the folder of tests that mirror a source, whether they exist or not."""
    path = PurePosixPath(source.removeprefix("amp_graph/"))
    folder = PurePosixPath("tests") / path.parent
    return str(folder / f"test_{path.stem}.py"), str(folder)


def chosen(mutant: Mutant, covered: Map, seconds: float) -> list[str]:
    """Return ids of tests that take ``seconds`` together without a mutant, the first to be run first.

    Then, as far as they are not recorded: the mirrored test file, or if there is none, the test files that name the
    module, and those of the mirrored folder.
    """
    lines, times = covered.lines(mutant.file), covered.times()
    tests = set(lines.get(-1, ()))
    if _is_in_a_function(mutant):
        for line in range(mutant.start[0], mutant.end[0] + 1):
            tests |= lines.get(line, set())
    else:  # run by the import, in whichever test that was: any test of the file may see it, or reads a constant of it
        naming = tuple(f"{f}::" for f in _naming(mutant.file))
        tests = lines[0] | {t for t in times if t.startswith(naming)}
    file, folder = mirrored(mutant.file)

    def rank(test: str) -> tuple[int, float, str]:
        mirror = (
            0
            if test.startswith(file)
            else 1
            if PurePosixPath(test.partition("::")[0]).parent == PurePosixPath(folder)
            else 2
        )
        return mirror, times[test], test

    found, spent = [], 0.0
    for test in sorted(tests, key=rank):
        if spent + times[test] <= seconds:
            found.append(test)
            spent += times[test]
    nearest = [f for f in test_files() if f == file] or _of_the_folder(mutant.file, folder)
    return [*_grouped(found), *(f for f in nearest if not covered.is_recorded(f))]


def _of_the_folder(source: str, folder: str) -> list[str]:
    """Return the test files that name the source's module, and then those of the folder that mirrors its own."""
    of_folder = (f for f in test_files() if str(PurePosixPath(f).parent) == folder)
    return list(dict.fromkeys([*_naming(source), *of_folder]))


def _naming(source: str) -> list[str]:
    """Return the test files that name the source's module, or are its mirror."""
    package, _, name = module_of(source).rpartition(".")
    imported = re.compile(rf"\b{re.escape(package)}\.{name}\b|from {re.escape(package)} import .*\b{name}\b")
    return [f for f in test_files() if f == mirrored(source)[0] or imported.search((ROOT / f).read_text())]


def _is_in_a_function(mutant: Mutant) -> bool:
    tree = ast.parse((ROOT / mutant.file).read_text())
    bodies = [n.body for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return any(body[0].lineno <= mutant.start[0] <= body[-1].end_lineno for body in bodies)


def _grouped(tests: list[str]) -> list[str]:
    """Keep the tests of a file together, in the order of the files' first tests."""
    order = list(dict.fromkeys(t.partition("::")[0] for t in tests))
    return sorted(tests, key=lambda t: order.index(t.partition("::")[0]))
