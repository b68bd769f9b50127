"""``amp-graph cache``: lists or removes the C kernels that were compiled on this machine.

Before: a folder of libraries. After: a row a library: its name, size and time; or an empty folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from amp_graph.cli.terminal import write_json, write_table
from amp_graph.errors import AmpGraphError
from amp_graph.passes.native.code_cache import FOLDER, folder, is_there, libraries, remove

COLUMNS = ("library", "KiB", "compiled")


def run(args: argparse.Namespace) -> int:
    """Print the libraries, or remove them. Raises AmpGraphError for a folder that cannot be trusted or changed."""
    kept = folder()
    found = libraries(kept) if is_there(kept) else []
    if args.action == "list":
        return _listed(kept, found, args.json)
    size = sum(library.stat().st_size for library in found)
    try:
        count = remove(kept)
    except OSError as error:
        raise AmpGraphError(
            f"cache: cannot remove {error.filename or kept}: {error.strerror}\n"
            f"  legal: a folder that you may write to\n  fix:   {FOLDER}=/a/folder/of/your/own"
        ) from error
    if args.json:
        write_json({"folder": str(kept), "removed": count, "bytes": size}, sys.stdout)
    else:
        print(f"removed {count} libraries, {size // 1024} KiB, from {kept}; they are compiled again when needed")
    return 0


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _listed(kept: Path, found: list[Path], as_json: bool) -> int:
    rows = [(one.name, one.stat().st_size, one.stat().st_mtime) for one in found]
    if as_json:
        told = [{"library": name, "bytes": size, "compiled": made} for name, size, made in rows]
        write_json({"folder": str(kept), "libraries": told}, sys.stdout)
        return 0
    print(f"{kept}: {len(rows)} libraries, {sum(size for _, size, _ in rows) // 1024} KiB")
    if rows:
        shown = ((name, str(size // 1024), _date(t)) for name, size, t in rows)
        write_table(COLUMNS, [(cells, "") for cells in shown], sys.stdout)
    return 0
