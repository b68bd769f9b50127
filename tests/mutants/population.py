"""The mutants that cosmic-ray's operators make of source files, and samples of them.

A place is a range of source text that at least one operator changes. Annotations are left out: a changed one either
fails at import or changes nothing. A sample takes places at equal distances through the list of all, from a random
start, so that each file is represented by its share; and of each place one mutant at random.
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code
from cosmic_ray.work_item import MutationSpec, WorkItem

ROOT = Path(__file__).parents[2]
FOLDERS = ("amp_graph", "passes", "lists")
NOT_CORE = "passes/backends/"
FAMILIES = ("ReplaceBinaryOperator", "ReplaceUnaryOperator")  # all of one from-operator look at the same places
NO_MUTANT = "none"  # of a control: an operator that changes nothing


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    operator: str
    occurrence: int
    start: tuple[int, int]
    end: tuple[int, int]
    definition: str

    @property
    def is_control(self) -> bool:
        """Say whether nothing is changed."""
        return self.operator == NO_MUTANT

    @property
    def job(self) -> str:
        """Return an id that another content of the file changes."""
        source = hashlib.sha256((ROOT / self.file).read_bytes()).hexdigest()
        return hashlib.sha256(f"{self} {source}".encode()).hexdigest()[:24]

    @property
    def item(self) -> WorkItem:
        """Return it as cosmic-ray's session stores it."""
        spec = MutationSpec(self.file, self.operator, self.occurrence, self.start, self.end, {}, self.definition)
        return WorkItem.single(self.job, spec)

    @classmethod
    def of(cls, item: WorkItem) -> Mutant:
        """Read it back from a session."""
        (spec,) = item.mutations
        start, end = tuple(spec.start_pos), tuple(spec.end_pos)
        return cls(str(spec.module_path), spec.operator_name, spec.occurrence, start, end, spec.definition_name or "")

    def mutated(self) -> str:
        """Return the file's text with the change."""
        source = (ROOT / self.file).read_text()
        if self.is_control:
            return source
        changed = mutate_code(source, cosmic_ray.plugins.get_operator(self.operator)(), self.occurrence)
        assert changed is not None, f"{self}: the operator finds no such place"
        return changed


def core(only: Iterable[str] = ()) -> list[str]:
    """Return the core's files, or those in the folders or files of ``only``."""
    files = [str(p.relative_to(ROOT)) for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]
    chosen = tuple(only)
    return [f for f in files if not f.startswith(NOT_CORE) and (not chosen or f.startswith(chosen))]


def module_of(file: str) -> str:
    """Return the name that a file of the core is imported by."""
    name = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return name if name.split(".")[0] == "amp_graph" else f"amp_graph.{name}"


def places(file: str) -> dict[tuple, list[Mutant]]:
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
                found[start, end] += [Mutant(file, n, occurrence, start, end, definition) for n in names]
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


def sample(files: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """Return ``count`` mutants, or one of each place where there are fewer."""
    chance = random.Random(seed)
    everywhere = [found for file in files for found in places(file).values()]
    step = max(1.0, len(everywhere) / count)
    start = chance.random() * step
    at = [int(start + step * n) for n in range(count)]
    return [chance.choice(everywhere[n]) for n in at if n < len(everywhere)]


def controls(files: list[str], count: int, seed: int) -> Iterator[Mutant]:
    """Yield places of ``count`` files with no change: what kills one of these is a fault of the tests, or of ours."""
    for mutant in sample(files, count, seed + 1):
        yield Mutant(mutant.file, NO_MUTANT, 0, mutant.start, mutant.end, mutant.definition)
