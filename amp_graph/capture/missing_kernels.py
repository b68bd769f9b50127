"""Warns once that compiled kernels are missing: no C compiler, or a cache that cannot be written.

Before: a model at half the speed, and a line in its report. After: an AmpGraphWarning at the first capture, with the
fix.
"""

from __future__ import annotations

from amp_graph.errors import warn
from amp_graph.passes.native.code_cache import FIX
from amp_graph.passes.native.jit_compiler import why_refused

TELLS = True  # whether anything is said; tests that remove the compiler turn it off
_told: set[str] = set()  # reasons, once per process


def tell_of_missing_kernels() -> None:
    """Warn of each new reason for which kernels could not be compiled or loaded."""
    for why, names in why_refused().items():
        if TELLS and why not in _told:
            _told.add(why)
            warn(
                f"amp_graph: torch's kernels run in place of compiled ones ({', '.join(names)}), which is slower: "
                f"{why}\n"
                f"  fix:   install gcc or clang, or set CC; a folder that can be written: {FIX}"
            )
