"""The exceptions of the lists; they live here because ``lists`` may not import ``amp_graph.errors``."""

from __future__ import annotations


class AmpGraphError(Exception):
    """Anything that amp_graph refuses: what, where, what is legal, and the fix."""


class ListError(AmpGraphError):
    """An operator list that cannot be used as written."""

    def __init__(self, what: str, *, where: str = "", legal: str = "", fix: str = "") -> None:
        lines = [f"{where}: {what}" if where else what]
        if legal:
            lines.append(f"  legal: {legal}")
        if fix:
            lines.append("  fix:")
            lines.extend(f"    {line}" for line in fix.splitlines())
        super().__init__("\n".join(lines))
