"""Colors of precisions, in a terminal's words."""

from __future__ import annotations

LOW, FULL, CAST, DIM = "green", "yellow", "magenta", "dim"
STYLES = {"low": LOW, "full": FULL, "cast": CAST}
