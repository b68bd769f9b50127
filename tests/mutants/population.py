"""The mutants that cosmic-ray's operators make of source files, samples of them, and the tests for each.

A place is a range of source text that at least one operator changes. Annotations are left out: a changed one either
fails at import or changes nothing. A sample takes places at equal distances through the list of all, from a random
start, so that each file is represented by its share; and of each place one mutant at random.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code
from cosmic_ray.work_item import MutationSpec, WorkItem

ROOT = Path(__file__).parents[2]
FOLDERS = ("amp_graph", "passes", "lists")
NOT_CORE = "passes/backends/"
FAMILIES = ("ReplaceBinaryOperator", "ReplaceUnaryOperator")  # all of one from-operator look at the same places


def core(only: Iterable[str] = ()) -> list[str]:
    """Return the core's files, or those in the folders or files of ``only``."""
    files = [str(p.relative_to(ROOT)) for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]
    chosen = tuple(only)
    return [f for f in files if not f.startswith(NOT_CORE) and (not chosen or f.startswith(chosen))]


def module_of(file: str) -> str:
    """Return the name that a file of the core is imported by."""
    name = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return name if name.split(".")[0] == "amp_graph" else f"amp_graph.{name}"


def item_of(spec: MutationSpec) -> WorkItem:
    """Return the item of a session, whose id another content of the file changes."""
    source = (ROOT / spec.module_path).read_text()
    return WorkItem.single(hashlib.sha256(f"{spec} {source}".encode()).hexdigest()[:24], spec)


def mutated(spec: MutationSpec) -> str:
    """Return the file's text with the change."""
    operator = cosmic_ray.plugins.get_operator(spec.operator_name)()
    changed = mutate_code((ROOT / spec.module_path).read_text(), operator, spec.occurrence)
    assert changed is not None, f"{spec}: the operator finds no such place"
    return changed


def places(file: str) -> dict[tuple, list[MutationSpec]]:
    """Return the mutants of a file by the place that they change."""
    source = (ROOT / file).read_text()
    notes, nodes = annotations(source), list(ast_nodes(get_ast(source)))
    comparisons = [node for node in nodes if node.type == "comparison"]
    found = defaultdict(list)
    for names in _families().values():
        operator = cosmic_ray.plugins.get_operator(names[0])()
        looked_at = comparisons if "ReplaceComparison" in names[0] else nodes
        positions = ((node, *at) for node in looked_at for at in operator.mutation_positions(node))
        for occurrence, (node, start, end) in enumerate(positions):
            if not any(first <= start and end <= last for first, last in notes):
                definition = ASTQuery(node).get_definition_name() or ""
                found[start, end] += [MutationSpec(file, n, occurrence, start, end, {}, definition) for n in names]
    return dict(sorted(found.items()))


def _families() -> dict[str, list[str]]:
    found = defaultdict(list)
    for name in cosmic_ray.plugins.operator_names():
        kind, _, rest = name.partition("/")[2].partition("_")
        if not cosmic_ray.plugins.get_operator(name).arguments():
            from_operator = rest if rest.startswith("Delete_") else rest.partition("_")[0]
            found[f"{kind}_{from_operator}" if kind in FAMILIES else name].append(name)
    return found


def annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where the annotations of a source are, (line, column) of start and end."""
    nodes = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            nodes.append(node.annotation)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes.append(node.returns)
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in nodes if n is not None]


def sample(files: Iterable[str], count: int, seed: int) -> list[MutationSpec]:
    """Return ``count`` mutants, or one of each place where there are fewer."""
    chance = random.Random(seed)
    everywhere = [found for file in files for found in places(file).values()]
    step = max(1.0, len(everywhere) / count)
    start = chance.random() * step
    at = [int(start + step * n) for n in range(count)]
    return [chance.choice(everywhere[n]) for n in at if n < len(everywhere)]


def tests_of(file: str) -> list[str]:
    """Return the test file that mirrors a source, those that name its module, and those of the mirrored folder."""
    path, (package, _, name) = PurePosixPath(file.removeprefix("amp_graph/")), module_of(file).rpartition(".")
    imported = re.compile(rf"\b{re.escape(package)}\.{name}\b|from {re.escape(package)} import .*\b{name}\b")
    tests, folder = sorted((ROOT / "tests").rglob("test_*.py")), ROOT / "tests" / path.parent
    rank = {t: (t == folder / f"test_{path.stem}.py", bool(imported.search(t.read_text())), t.parent == folder)
            for t in tests}  # fmt: skip
    return [str(t.relative_to(ROOT)) for t in sorted(tests, key=rank.get, reverse=True) if any(rank[t])]
