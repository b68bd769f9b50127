"""Note which statements of the core are run, in memory that all processes of a run share.

Each module of the core is compiled with a mark before every statement: a call that sets a byte of a mapped file. That
costs a few percent of the time of a test, where a trace function takes as much again; and what forks, and Python
processes that tests start, run is noted as well (``site/sitecustomize.py``), however they end. Nothing but the
standard library is imported here.
"""

import ast
import builtins
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import marshal
import mmap
import os
import sys
from pathlib import Path

VARIABLE = "AMP_GRAPH_LINES"  # names a JSON file: {"ran": ..., "code": ..., "modules": {name: [file, first mark]}}
OWN = Path(__file__).read_bytes()
RAN = "__ran__"  # a built-in name, so that no module has one more


def statements(tree):
    """Return the (body, index, statement) of each statement but docstrings and what has to stand first in a file."""
    found = []
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                found += [(body, at, s) for at, s in enumerate(body) if not _stands_first(s, at, name)]
    return sorted(found, key=lambda place: (place[2].lineno, place[2].col_offset))


def _stands_first(statement, at, name):
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        return True
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text and at == 0 and name == "body" and isinstance(statement.value.value, str)


def lines_of(source):
    """Return the line that each statement begins at, in the order of their marks."""
    return [s.lineno for _, _, s in statements(ast.parse(source))]


def owners(source):
    """Return the number of the statement that runs each line: of those over several lines, and of what heads a block.

    A line of no statement (``except``, ``else``, ``case``) is run by the statement after it.
    """
    tree, found = ast.parse(source), {}
    for number, (_, _, statement) in enumerate(statements(tree)):
        first = min((d.lineno for d in getattr(statement, "decorator_list", [])), default=statement.lineno)
        for line in range(first, statement.end_lineno + 1):
            found[line] = number  # what is nested comes later, and takes its lines
        for inner in ast.walk(statement):
            body = getattr(inner, "body", None)
            if isinstance(inner, (ast.ExceptHandler, ast.match_case)):
                start = inner.lineno if isinstance(inner, ast.ExceptHandler) else inner.pattern.lineno
                found.update(dict.fromkeys(range(start, body[0].lineno), ("next", body[0].lineno)))
    return {line: found[n[1]] if isinstance(n, tuple) else n for line, n in found.items()}


def marked(source, file, first):
    """Compile a source with a mark before each statement, the first one numbered ``first``."""
    tree = ast.parse(source)
    places = list(enumerate(statements(tree), first))
    for number, (body, at, statement) in sorted(places, key=lambda place: -place[1][1]):  # the last of each body first
        body.insert(at, _mark(number, statement))
    return compile(tree, file, "exec", dont_inherit=True)


def _mark(number, statement):
    where = {name: getattr(statement, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")}
    where["end_lineno"], where["end_col_offset"] = where["lineno"], where["col_offset"]
    call = ast.Call(ast.Name(RAN, ast.Load(), **where), [ast.Constant(number, **where)], [], **where)
    return ast.Expr(call, **where)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name, path, first, code):
        super().__init__(name, path)
        self.first, self.code = first, code

    def get_code(self, fullname):
        source = Path(self.path).read_bytes()
        kept = self.code / hashlib.sha256(b"%d %s %s" % (self.first, OWN, source)).hexdigest()[:24]
        if kept.exists():
            return marshal.loads(kept.read_bytes())
        code = marked(source, self.path, self.first)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_bytes(marshal.dumps(code))
        partial.replace(kept)
        return code


class Finder(importlib.abc.MetaPathFinder):
    """Find the modules whose statements are noted."""

    def __init__(self, modules, code):
        self.modules, self.code = modules, Path(code)

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.modules:
            return None
        file, first = self.modules[fullname]
        return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(fullname, file, first, self.code))


def install():
    """Note statements in this process, if the environment variable says so; return the bytes of the marks."""
    if not (path := os.environ.get(VARIABLE)):
        return None
    given = json.loads(Path(path).read_text())
    with open(given["ran"], "r+b") as file:
        ran = mmap.mmap(file.fileno(), 0)

    def mark(number):
        ran[number] = 1

    setattr(builtins, RAN, known_to_dynamo(mark))
    sys.meta_path.insert(0, Finder(given["modules"], given["code"]))
    return ran


def known_to_dynamo(mark):
    """Let Dynamo run a mark where it traces, as ``torch.compiler.assume_constant_result`` does."""
    mark._dynamo_marked_constant = True
    return mark
