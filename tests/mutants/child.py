"""Run pytest in a fork of this process, which has imported torch, pytest and what else takes seconds, and none of ours.

The fork imports amp_graph anew, one module of it mutated. Each test has a limit of time relative to what it takes
without a mutant; a test that passes its limit ends the fork.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import hook
from tests.mutants.population import ROOT

PRELOADED = (
    "torch", "torch._dynamo", "torch._inductor.compile_fx", "torch._functorch.aot_autograd", "torch.export", "pytest",
    "expecttest", "numpy", "networkx", "rich.console", "torch._inductor.codegen.cpp", "transformers",
    "torch._dynamo.backends.debugging", "torch.utils.flop_counter", "torch.testing._internal.common_utils",
)  # fmt: skip
# The limit of a test: factor × its time without a mutant + seconds, all of processor time: others may use the machine.
LIMIT_FACTOR, LIMIT_SECONDS = 5.0, 20.0
AT_TIMEOUT, ENOUGH = 99, 98  # exit statuses of the fork
WHOLE_SECONDS = 900.0  # beside the limits of all tests: of a mutant that waits for ever


def preload() -> None:
    """Import what is shared by all forks."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every fork compiles all modules and tests again
    sys.dont_write_bytecode = False
    for name in PRELOADED:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.split(".")[0] == "amp_graph"]
    assert not ours, f"imported before the fork, so that no mutant of them would be seen: {ours}"


@dataclass(frozen=True)
class Ended:
    """How a run of pytest ended: its exit status, the test that failed, and what it printed last."""

    status: int
    failed: str
    output: str

    @property
    def is_timeout(self) -> bool:
        """Say whether a test was stopped at its limit."""
        return self.status == AT_TIMEOUT


class Watch:
    """A plugin of pytest that sets the limit of each test and writes down which failed."""

    def __init__(self, usual: Mapping[str, float], written: Path, most: float):
        self.usual, self.written, self.most = usual, written, most

    def pytest_runtest_logstart(self, nodeid):
        usual = self.usual.get(nodeid, 5.0)
        self.now = nodeid
        signal.signal(signal.SIGPROF, self._stop)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_FACTOR * usual + LIMIT_SECONDS)

    def _stop(self, signum, frame):
        self.written.write_text(self.now)
        os._exit(AT_TIMEOUT)

    def pytest_runtest_logfinish(self, nodeid):
        signal.setitimer(signal.ITIMER_PROF, 0)
        if time.process_time() > self.most and not self.written.exists():
            os._exit(ENOUGH)

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.written.exists():
            self.written.write_text(report.nodeid)


def run_tests(tests: list[str], usual: Mapping[str, float], cache: Path, mutant: dict, most: float) -> Ended:
    """Run tests, by id or by file, with ``mutant`` (the arguments of ``hook.Finder``) in place of its module.

    No further test is begun after ``most`` seconds of processor time.
    """
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        at = Path(folder)
        copy = at / "cache"  # of compiled kernels: a mutant may write what is wrong into it
        shutil.copytree(cache, copy) if cache.exists() else copy.mkdir()
        (at / "mutant.json").write_text(json.dumps(mutant))

        def body():
            os.environ["AMP_GRAPH_CACHE"] = str(copy)
            os.environ["TMPDIR"] = str(at)
            tempfile.tempdir = None
            os.environ[hook.VARIABLE] = str(at / "mutant.json")
            os.environ["PYTHONPATH"] = python_path()
            hook.install()
            return pytest_main(["-x", *tests], [Watch(usual, at / "failed", time.process_time() + most)])

        limit = WHOLE_SECONDS + sum(LIMIT_FACTOR * usual.get(t, 5.0) + LIMIT_SECONDS for t in tests)
        status = forked(body, at / "output", limit)
        failed = (at / "failed").read_text() if (at / "failed").exists() else ""
        return Ended(status, failed, (at / "output").read_text(errors="replace")[-3000:])


def python_path() -> str:
    """Return PYTHONPATH with which Python processes that tests start are prepared as this one is."""
    site = str(Path(hook.__file__).parent / "site")
    return os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))


def spent() -> float:
    """Return the seconds of processor time of this process and of those that it started and waited for."""
    return sum(os.times()[:4])


def pytest_main(arguments: list[str], plugins: list[object]) -> int:
    """Run pytest in this process."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of plugins that are imported already, pytest warns
    options = [
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not integration and not browser",
        "--tb=short",
        "--show-capture=stderr",
    ]
    return int(pytest.main([*options, *arguments], plugins=plugins))


def forked(body: Callable[[], int], output: Path, limit: float) -> int:
    """Run ``body`` in a fork, in a process group of its own; return its exit status, ``AT_TIMEOUT`` at the limit."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _child(body, output)
    ended = time.monotonic() + limit
    status = None
    while status is None:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() > ended:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return AT_TIMEOUT
        else:
            time.sleep(0.02)
    try:
        os.killpg(child, signal.SIGKILL)  # what the tests started and left
    except ProcessLookupError:
        pass
    return status


def _child(body: Callable[[], int], output: Path) -> None:
    status = 3
    try:
        os.setsid()
        _end_with_the_parent()
        os.chdir(ROOT)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = body()
        sys.stdout.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _end_with_the_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
