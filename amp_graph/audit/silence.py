"""Leaves findings out that the user does not want: by a comment at their line, by configuration, by ``--ignore``.

``loss = total.half()  # amp: ignore[AMP405]``; or on a line of its own above; ``# amp: ignore`` for all codes.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from pathlib import Path

from amp_graph.audit.codes import CODES
from amp_graph.audit.records import Finding
from amp_graph.errors import AmpGraphError
from amp_graph.lists.read_toml import check_table, did_you_mean, nearest, read_text, read_toml

CONFIGURATION = "pyproject.toml"  # of the current folder
COMMENT = re.compile(r"#\s*amp:\s*ignore(?:\[(?P<codes>[^\]]*)\])?\s*(?:#|$)")
BARE = re.compile(r"#\s*amp:\s*ignore\W+AMP\d+.*")
CODE = re.compile(r"AMP\d+")
FIX = '[tool.amp_graph.audit]\nignore = ["AMP101"]'
TAKES = {"ignore": (lambda value: isinstance(value, list), 'a list of codes, ["AMP101"]')}


def ignored_codes(given: Iterable[str], folder: Path) -> frozenset[str]:
    """Return ``given`` and the codes that ``folder`` has in its configuration; AmpGraphError for an unknown one."""
    return frozenset(_known(given, "audit: ignore")) | frozenset(_configured(folder / CONFIGURATION))


def _configured(path: Path) -> Iterable[str]:
    if not path.exists():
        return ()
    tables = read_toml(read_text(path, FIX), str(path), FIX)
    for name in ("tool", "amp_graph", "audit"):
        tables = tables.get(name, {})  # type: ignore[assignment]
        if not isinstance(tables, dict):
            return ()
    where = f"{path.name}: [tool.amp_graph.audit]"
    found = check_table(tables, TAKES, "it", lambda _: where, FIX)
    return _known(found.get("ignore", ()), where)  # type: ignore[arg-type]


def _known(codes: Iterable[object], where: str) -> Iterable[str]:
    for code in map(str, codes):
        if code not in CODES:  # AMP2 stands for AMP201 and all others
            all_of = [one for one in CODES if CODE.fullmatch(code) and one.startswith(code)]
            hint = f"; these begin so: {', '.join(all_of)}" if all_of else did_you_mean(code, CODES)
            raise AmpGraphError(
                f"{where}: there is no code {code!r}{hint}\n  legal: {', '.join(CODES)}\n"
                f"  fix:   {','.join(all_of) or next(iter(nearest(code, CODES) or CODES))}"
            )
        yield code


def loud(findings: Iterable[Finding], ignored: frozenset[str], folder: Path) -> list[Finding]:
    """Return the findings that nothing silences; ``folder``: that of relative places."""
    return [
        finding
        for finding in findings
        if finding.code not in ignored
        and not any(not codes or finding.code in codes for codes in _comments(finding, folder))
    ]


def unknown_codes(files: Iterable[str], folder: Path) -> Iterable[str]:
    """Yield the comments of ``files`` that silence nothing: with a code that does not exist, or without brackets."""
    for file in files:
        for line, text in enumerate(linecache.getlines(str(folder / file)), start=1):
            for code in sorted(_codes(text) - {*CODES}):
                yield f"{file}:{line}: # amp: ignore[{code}]: there is no such code{did_you_mean(code, CODES)}"
            if (bare := BARE.search(text)) and COMMENT.search(text) is None:
                codes = ", ".join(CODE.findall(bare[0]))
                yield f"{file}:{line}: this comment silences nothing; write # amp: ignore[{codes}], and no more"


def _codes(text: str) -> frozenset[str]:
    """Return the codes of the comment in a line."""
    comment = COMMENT.search(text)
    return frozenset(re.findall(r"[^\s,]+", (comment and comment["codes"]) or ""))


def _comments(finding: Finding, folder: Path) -> Iterable[frozenset[str]]:
    """Yield the codes of the comments for a finding's line; none for all codes."""
    file, line = str(folder / finding.place.file), finding.place.line
    above = linecache.getline(file, line - 1).strip()
    for text in (linecache.getline(file, line), above if above.startswith("#") else ""):
        if COMMENT.search(text) is not None:
            yield _codes(text)
