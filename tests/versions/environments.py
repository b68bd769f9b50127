"""Makes a virtual environment for a version of Python and of torch, with this checkout installed in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
CORNERS = Path(__file__).parent / "corners.toml"
DONE = ".complete"


@dataclass(frozen=True)
class Corner:
    """One environment."""

    python: str  # major and minor
    torch: str

    @property
    def name(self) -> str:
        """Name the environment's folder."""
        return f"python{self.python}-torch{self.torch}"

    def interpreter(self) -> str | None:
        """Return the Python to start from; None if this machine has none of that version."""
        if sys.version_info[:2] == tuple(map(int, self.python.split("."))):
            return sys.executable
        found = shutil.which(f"python{self.python}")
        if found is not None and not subprocess.run([found, "--version"], capture_output=True).returncode:
            return found
        pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")  # its shim fails for one not switched on
        installed = sorted(pyenv.glob(f"versions/{self.python}.*/bin/python{self.python}"))
        return str(installed[-1]) if installed else None


def corners() -> list[Corner]:
    """Read the corners that are run by default."""
    return [Corner(row["python"], row["torch"]) for row in tomllib.loads(CORNERS.read_text())["corner"]]


def environment(corner: Corner, interpreter: str, folder: Path) -> Path:
    """Return the Python of the environment of ``corner``, which is made in ``folder`` if it is not there yet.

    The arguments of TORCH_INSTALL_ARGS go to the installation of torch, as in the Makefile.
    """
    place = folder / corner.name
    python = place / "bin" / "python"
    if (place / DONE).exists():
        return python
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", str(place)], check=True)
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    extra = os.environ.get("TORCH_INSTALL_ARGS", "").split()
    subprocess.run([*install, *extra, f"torch=={corner.torch}"], check=True)
    versions = place / "constraints.txt"
    others = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    versions.write_text("\n".join([*others, f"torch=={corner.torch}"]) + "\n")
    subprocess.run([*install, "-c", str(versions), "-e", ".[test]"], check=True, cwd=ROOT)
    (place / DONE).touch()
    return python
