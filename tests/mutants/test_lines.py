"""The marks: which statements are noted as run, in which processes, and what of a module they leave as it is."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.mutants import hook, lines

SOURCE = textwrap.dedent('''\
    """What it is."""
    from __future__ import annotations
    import functools

    @functools.lru_cache(
        maxsize=None,
    )
    def f(x):
        """Text."""
        if x > 1:
            return sum([
                x,
                1,
            ])
        elif x:
            try:
                return 1 / (x - 1)
            except (
                ZeroDivisionError,
            ):
                return 0
        return -1
''')
STARTS = [3, 8, 10, 11, 15, 16, 17, 21, 22]


def test_every_statement_but_docstrings_has_a_mark_and_every_line_a_statement():
    assert lines.lines_of(SOURCE) == STARTS
    owner = {line: STARTS[number] for line, number in lines.owners(SOURCE).items()}
    assert {line: owner[line] for line in (3, 5, 6, 8, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 21, 22)} == {
        3: 3, 5: 8, 6: 8, 8: 8, 10: 10, 11: 11, 12: 11, 13: 11, 14: 11, 15: 15, 17: 17, 18: 21, 19: 21, 20: 21, 21: 21,
        22: 22,
    }  # fmt: skip


@pytest.fixture
def noted(tmp_path):
    """Run Python with a marked module on its path; return the lines that are noted."""
    (tmp_path / "plain.py").write_text(SOURCE)
    first = 7
    modules = {"plain": [str(tmp_path / "plain.py"), first]}
    given = {"ran": str(tmp_path / "ran"), "code": str(tmp_path / "code"), "modules": modules}
    (tmp_path / "lines.json").write_text(json.dumps(given))
    (tmp_path / "code").mkdir()

    def run(program):
        (tmp_path / "ran").write_bytes(bytes(first + len(STARTS)))
        path = os.pathsep.join([str(Path(hook.__file__).parent / "site"), str(tmp_path)])
        given = {**os.environ, "PYTHONPATH": path, lines.VARIABLE: str(tmp_path / "lines.json")}
        ended = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True)
        run.printed, run.told = ended.stdout, ended.stderr
        ran = (tmp_path / "ran").read_bytes()
        assert not any(ran[:first])
        return [line for line, mark in zip(STARTS, ran[first:], strict=True) if mark]

    return run


def test_marks_of_forks_and_of_processes_that_end_at_once_are_noted(noted):
    assert noted("import plain") == [3, 8]
    assert noted("import plain; plain.f(2)") == [3, 8, 10, 11]
    assert noted("import os, plain; plain.f(1); os._exit(9)") == [3, 8, 10, 15, 16, 17, 21]
    forked = "import os, plain\nif os.fork() == 0:\n    plain.f(0)\n    os._exit(0)\nos.wait()"
    assert noted(forked) == [3, 8, 10, 15, 22]


def test_a_marked_module_has_the_names_lines_and_texts_of_the_plain_one(noted):
    program = "import plain, inspect; f = plain.f.__wrapped__; print([n for n in vars(plain) if n[:2] != '__'])"
    noted(program + "; print(f.__doc__, plain.__doc__, inspect.getsource(f).splitlines()[-1])")
    assert noted.printed.splitlines() == ["['annotations', 'functools', 'f']", "Text. What it is.     return -1"]
    noted("import plain; plain.f(None)")
    assert 'plain.py", line 10, in f' in noted.told


def test_dynamo_captures_a_marked_function_whole(monkeypatch):
    import builtins

    import torch

    seen = bytearray(40)

    def mark(number):
        seen[number] = 1

    monkeypatch.setattr(builtins, lines.RAN, lines.known_to_dynamo(mark), raising=False)
    held = {"torch": torch}
    exec(lines.marked("def f(x):\n    y = x + 1\n    return y * 2\n", "<marked>", 5), held)
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    out = torch.compile(held["f"], backend=backend, fullgraph=True)(torch.ones(2))
    assert out.tolist() == [4.0, 4.0]
    assert len(graphs) == 1
    assert seen[6:8] == b"\x01\x01"
