"""Runs the tests as on a CPU without vector instructions, such as torch sees ARM, on a machine without a C compiler.

    python -m tests.versions.plain_cpu [--compiler] [--vectors] [PYTEST_ARGS]

torch and oneDNN are told to use no AVX, but for ``--vectors``; compilers are hidden from PATH, but for ``--compiler``;
nothing that other runs compiled for this CPU is used. Each skipped test and its reason is printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.versions.__main__ import SELECTED
from tests.versions.environments import ROOT

KEPT = ("--compiler", "--vectors")
COMPILER = re.compile(r"(.+-)?(cc|gcc|c\+\+|g\+\+|clang|clang\+\+|c89|c99|c89-gcc|c99-gcc)(-\d+)?")


def main(argv: list[str]) -> int:
    """Run pytest with ``argv``; return its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        kept = {word.removeprefix("--"): True for word in argv if word in KEPT}
        environ = plain_environment(os.environ, Path(folder), **kept)
        chosen = [word for word in argv if word not in KEPT] or ["-n", "2"]
        command = [sys.executable, "-m", "pytest", "-rs", "-m", SELECTED, *chosen]
        return subprocess.run(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, check=False).returncode


def plain_environment(
    environ: Mapping[str, str], folder: Path, *, compiler: bool = False, vectors: bool = False
) -> dict[str, str]:
    """Return ``environ`` of such a machine; ``folder``, an empty one, gets caches and links to programs.

    compiler, vectors: what the machine has nevertheless.
    """
    made = dict(environ) if vectors else dict(environ, ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41")
    made |= {name: str(folder / name.lower()) for name in ("AMP_GRAPH_CACHE", "TORCHINDUCTOR_CACHE_DIR")}
    if not compiler:
        made.pop("CC", None)
        made.pop("CXX", None)
        made["PATH"] = os.pathsep.join(_without_compilers(environ.get("PATH", os.defpath), folder / "programs"))
    return made


def _without_compilers(path: str, folder: Path) -> list[str]:
    """Return folders in place of those of ``path``, with links to all programs in them that compile no C."""
    made = []
    for number, place in enumerate(map(Path, filter(None, path.split(os.pathsep)))):
        linked = folder / str(number)
        linked.mkdir(parents=True)
        for program in place.iterdir() if place.is_dir() else ():
            if not COMPILER.fullmatch(program.name):
                (linked / program.name).symlink_to(program.absolute())
        made.append(str(linked))
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
