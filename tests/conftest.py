"""Settings of every test: one thread, a fixed seed, and the warnings of other packages."""

import gc
import importlib.util
import logging
import os
import shutil
import sys
import zlib
from pathlib import Path

import pytest
import torch
import torch._dynamo.guards

from tests.versions import known

# Of other packages only; a warning of our own code is an error (pyproject.toml).
IGNORED_WARNINGS = (
    # Dynamo looks at `.grad` of every input it wraps, and hides this warning only where it is not an error.
    r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning",
    # torch 2.11 says of its profiler what its later versions take for granted.
    r"ignore:Warning. Profiler clears events at the end of each cycle:UserWarning",
    # Dynamo of torch 2.11 does that where code it traces registers a hook.
    r"ignore:<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
    # torch 2.14 scripts its own decompositions for forward-mode derivatives.
    r"ignore:`torch.jit.script` is deprecated:FutureWarning",
    # So it says of what a user may still call: the tests of a converted model in torch.jit.trace.
    r"ignore:`torch.jit.trace\w*` is deprecated:FutureWarning",
)


# Where each package of this checkout lies; nothing here imports them before it is known that these are they.
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"amp_graph": ROOT / "amp_graph", "amp_graph.passes": ROOT / "passes", "amp_graph.lists": ROOT / "lists"}


def packages_elsewhere(packages, found):
    """Say which of ``packages`` (name: folder) are imported from another folder, and how to mend that; "" if none."""
    wrong = {name: found(name) for name, folder in packages.items() if found(name) != folder}
    if not wrong:
        return ""
    lines = [f"  {name} comes from {place}, and not from {packages[name]}" for name, place in wrong.items()]
    return "\n".join([
        "tests: the tests of this checkout would run the code of another one:", *lines,
        f"  fix:   {sys.executable} -m pip install --no-deps -e {ROOT}",
    ])  # fmt: skip


def folder_of(name):
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent


def pytest_configure(config):
    if told := packages_elsewhere(PACKAGES, folder_of):
        pytest.exit(told, returncode=4)
    os.environ["AMP_GRAPH_MACHINE"] = "default"  # not what was calibrated on the machine that runs the tests
    os.environ["AMP_GRAPH_STRICT"] = "1"  # a pass that fails is an error here, and left out of the graph elsewhere
    for line in IGNORED_WARNINGS:
        config.addinivalue_line("filterwarnings", line)
    torch.set_num_threads(1)
    _let_captures_be_short()


def _let_captures_be_short():
    """Leave out of captures what no test looks at, and what takes a tenth of their time."""
    # pytest hangs handlers on all loggers that do not propagate, and torch would write its trace of captures for them.
    logging.getLogger("torch.__trace").propagate = True
    # After each capture torch flushes the CPU's caches, to say in a debug log how long its guards take.
    torch._dynamo.guards.profile_guard_manager = lambda *given: 0.0


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(items):
    """Leave to ``make test`` one case of n, always the same, of what is marked ``sampled(n)``; the others are slow."""
    found = {}
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            found.setdefault((item.path, item.originalname), (mark.args[0], []))[1].append(item)
    for count, cases in found.values():
        cases.sort(key=lambda item: zlib.crc32(item.name.encode()))  # in order they would share a parameter
        seen = set()
        for _ in range(-(-len(cases) // count)):
            case = max(cases, key=lambda item: len(values_of(item) - seen))
            seen |= values_of(case)
            cases.remove(case)
        for item in cases:
            item.add_marker(pytest.mark.slow)
    known.expect(items, torch.__version__)


def values_of(item):
    """Return the places and values of a case's parameters, of which a sample should have as many as it can."""
    return set(enumerate(item.callspec.id.split("-"))) if hasattr(item, "callspec") else set()


def pytest_collection_finish():
    """Let no collection of garbage go through the modules of torch and transformers again: an eighth of all time."""
    _freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_runtest_teardown(item, nextitem):
    """Nor through what earlier files left: a look for holders of weights, which collects, took a second by the end."""
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze():
    gc.collect()
    gc.freeze()


# Thresholds of calls, for which the tests' tensors are too small, and the values at which everything is rewritten.
ALWAYS_PROFITABLE = {
    "amp_graph.passes.casts.share_casts.FEWEST_SHARED": 0,
    "amp_graph.passes.backends.cpu.attention.lower_attention.MOST_SCORES_OF_TORCH": -1,
    "amp_graph.passes.backends.recurrent.lower_rnn.LEAST_RECURRENT": 0,
    "amp_graph.passes.backends.recurrent.lower_rnn.LEAST_RECURRENT_BY_UNITS": 0,
}


@pytest.fixture(autouse=True)
def _all_is_worth_it(request, monkeypatch):
    """Rewrite the tests' small models, whatever time that takes, but for what is marked ``by_profit``."""
    if "by_profit" not in request.keywords:
        monkeypatch.setattr("amp_graph.passes.precision.predict_time.WORTH_IT", 0.0)
        monkeypatch.setattr("amp_graph.policy.is_faster_in", lambda machine, dtype: True)
        for name, at_least in ALWAYS_PROFITABLE.items():
            monkeypatch.setattr(name, at_least)


@pytest.fixture(autouse=True)
def _said_once_per_process(monkeypatch):
    """Keep quiet of what is said once in a process, or once a model; the tests of it turn it on."""
    monkeypatch.setattr("amp_graph.capture.diagnostics.LARGEST_UNSCALED", -1.0)
    monkeypatch.setattr("amp_graph.capture.diagnostics.WARNS", False)


def no_compiler():
    """Say what is missing for compiled C; "" where nothing is."""
    from amp_graph.passes.native.code_cache import CompilerError, compiler

    try:
        compiler()
    except CompilerError:
        return "needs a C compiler"
    return ""


def no_bf16_products():
    """Say what is missing for products of bf16, and for kernels that are made of them; "" where nothing is."""
    from amp_graph.passes.torch_compat.devices import multiplies_bf16

    return "" if multiplies_bf16() else "needs a CPU that multiplies bf16"


def no_bf16_of_onednn():
    """Say whether oneDNN has nothing in bf16 for this CPU; "" where it has."""
    from amp_graph.passes.torch_compat.devices import onednn_takes_bf16

    return "" if onednn_takes_bf16() else "needs a CPU for which oneDNN has bf16"


LACKING = {"compiled": no_compiler, "multiplied": no_bf16_products, "onednn": no_bf16_of_onednn}


def pytest_runtest_setup(item):
    """Skip a test of what this machine lacks, and say what that is."""
    for name, lacking in LACKING.items():
        if item.get_closest_marker(name) and (why := lacking()):
            pytest.skip(why)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip a test that lets Inductor compile where there is no C++ compiler."""
    try:
        return (yield)
    except Exception as error:
        if "InvalidCxxCompiler" not in str(error) or shutil.which(os.environ.get("CXX", "g++")):
            raise
    pytest.skip("Inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


TORCHS_CALL = torch.nn.Module.__call__


@pytest.fixture(autouse=True)
def _modules_are_called_by_torch():
    """Refuse a test that leaves ``Module.__call__`` replaced: Dynamo traces into no module then, in no later test."""
    yield
    left, torch.nn.Module.__call__ = torch.nn.Module.__call__, TORCHS_CALL
    assert left is TORCHS_CALL, "the test left a replaced torch.nn.Module.__call__"


@pytest.fixture(autouse=True)
def _one_thread():
    """Go back to one thread: Lightning's DDP leaves as many as there are cores, for all later tests of the process."""
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
