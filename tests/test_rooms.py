"""Rooms: who imports whom, read off the sources. Every arrow points downwards, every folder is one small subject."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from amp_graph.lists.read_toml import tomllib

ROOT = Path(__file__).parents[1]
# Lowest first. A room, which is a folder or one file, imports what stands on lines above its own, and itself.
ROOMS = (
    ("lists",),
    ("passes/base.py", "passes/registry.py"),
    ("passes/torch_compat",),
    ("passes/native",),
    ("passes/graph",),
    ("passes/autocast_regions",),
    ("passes/calibration",),
    ("passes/pipeline_options.py",),
    ("passes/precision",),
    ("passes/casts", "passes/emulation", "passes/loss_scaling"),
    ("passes/step",),
    ("passes/sharding",),
    ("passes/layout",),
    ("passes/memory",),
    ("passes/weights",),
    ("passes/recognize",),
    ("passes/verify.py",),
    ("passes/manager.py",),
    ("passes/backends/cpu/loss", "passes/backends/cpu/norm"),
    ("passes/backends/cpu/linear",),
    ("passes/backends/cpu/attention", "passes/backends/cpu/convolution", "passes/backends/cpu/inference"),
    ("passes/backends/cuda", "passes/backends/inductor", "passes/backends/recurrent"),
    ("passes/pipeline_row.py",),
    ("passes/pipeline_table.py",),
    ("amp_graph/errors.py",),
    ("amp_graph/policy_words.py",),
    (
        "amp_graph/policy.py",
        "amp_graph/devices.py",
        "amp_graph/example_values.py",
        "amp_graph/precision.py",
        "amp_graph/model_state.py",
        "amp_graph/version.py",
    ),
    ("amp_graph/compiler_options.py", "amp_graph/rewrite.py"),
    ("amp_graph/optim",),
    ("amp_graph/scaling",),
    ("amp_graph/replay",),
    ("amp_graph/capture",),
    ("amp_graph/convert.py",),
    ("amp_graph/freeze.py",),
    ("amp_graph/step",),
    ("amp_graph/numerics",),
    ("amp_graph/export", "amp_graph/report"),
    ("amp_graph/search",),
    ("amp_graph/run",),
    ("amp_graph/audit",),
    ("amp_graph/integrations",),
    ("amp_graph/cli",),
    ("amp_graph/__main__.py",),
)
BACKENDS = "passes/backends"
COMPOSES = "passes/pipeline_table.py"  # of the core, the one file that may import backends
MOST = 25  # source files of a folder
SOURCES = (".py", ".c", ".h")
FOLDERS = ("amp_graph", "passes", "lists")
PRIVATE = "passes/torch_compat/"  # the one room that speaks private names of torch
BY_NAME = ("importlib.import_module", "import_module", "__import__")
# Imports inside of functions, each with its reason: (file, what it imports).
HIDDEN = {
    ("amp_graph/__init__.py", "a name"): "public names are imported when first used: --help does not wait for torch",
    (
        "amp_graph/cli/main.py",
        "a name",
    ): "a command is imported when it is to run: --help does not wait for torch",
    ("amp_graph/cli/main.py", "amp_graph.errors"): "as any command: errors.py imports torch",
    ("amp_graph/optim/master_weights.py", "amp_graph.optim.master_weight_updates"): "a master that is unpickled where"
    " nothing was converted: what tells optimizers of masters imports their module",
    (
        "amp_graph/policy_words.py",
        "amp_graph.passes.pipeline_table",
    ): "asked only of policies that skip passes: the table imports every pass",
    (
        "amp_graph/run/trained_models.py",
        "amp_graph.run.conversions",
    ): "what converts imports Dynamo, which takes as long"
    " as torch: not before the first model is converted, and after Module.__call__ is replaced",
    (
        "amp_graph/audit/speed/plan.py",
        "amp_graph.audit.speed.planned_call",
    ): "what plans imports Dynamo, which takes as long as torch: not before somebody reads what amp_graph would do",
    (
        "amp_graph/integrations/transformers.py",
        "amp_graph.integrations.accelerate",
    ): "a Trainer, which add_to is given, has accelerate; the callback alone does not need it",
    ("amp_graph/cli/target.py", "a name"): "the user's module, which the command line names",
}


@dataclass(frozen=True)
class Arrow:
    """``file`` imports ``target``, a file of ours, or "a name" that is not known here; ``hidden`` in a function."""

    file: str
    target: str
    module: str
    hidden: bool
    typing: bool


def files_of(root):
    found = [p for folder in FOLDERS for p in sorted((root / folder).rglob("*.py")) if "__pycache__" not in p.parts]
    return [str(p.relative_to(root)) for p in found]


def module_of(file):
    name = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return name if name.split(".")[0] == "amp_graph" else f"amp_graph.{name}"


@cache
def arrows_of(root):
    """Return every import of our own modules, and every import by name."""
    files = files_of(root)
    modules = {module_of(file): file for file in files}
    found = []
    for file in files:
        tree = ast.parse((root / file).read_text())
        inside = {n for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(f)}
        for_types = {
            n
            for branch in ast.walk(tree)
            if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
            for part in branch.body
            for n in ast.walk(part)
        }
        for node in ast.walk(tree):
            for module in imported(node, modules):
                if module in modules or module == "a name" or (node in inside and isinstance(node, ast.Call)):
                    target = modules.get(module, module)
                    found.append(Arrow(file, target, module, node in inside, node in for_types))
    return found


def imported(node, modules):
    """Return the modules that a node imports, as far as it says so."""
    if isinstance(node, ast.Import):
        return [a.name for a in node.names]
    if isinstance(node, ast.ImportFrom):
        assert not node.level, "imports of ours are absolute"
        return [full if (full := f"{node.module}.{a.name}") in modules else node.module for a in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
        (name, *_) = node.args
        return [name.value if isinstance(name, ast.Constant) else "a name"]
    return []


def room_of(file):
    """Return the line of ``ROOMS`` that has ``file``, and its room there; None for an ``__init__`` without imports."""
    found = [(i, r) for i, line in enumerate(ROOMS) for r in line if file == r or file.startswith(f"{r}/")]
    assert len(found) < 2, f"{file} is in two rooms: {found}"
    return found[0] if found else None


def is_upward(arrow):
    here, there = room_of(arrow.file), room_of(arrow.target)
    if arrow.target == "a name" or not here or not there or here[1] == there[1]:
        return False
    return there[0] >= here[0]


def cycles_of(edges):
    """Return the groups of nodes that reach each other."""
    after = {}
    for a, b in edges:
        after.setdefault(a, set()).add(b)
        after.setdefault(b, set())

    def reached(start):
        seen, left = set(), [start]
        while left:
            for other in after[left.pop()] - seen:
                seen.add(other)
                left.append(other)
        return seen

    reach = {node: reached(node) for node in after}
    return sorted({tuple(sorted(b for b in reach[a] if a in reach[b])) for a in after if a in reach[a]})


def faults_of(root):
    """Return what is wrong with the imports and folders under ``root``, a line each."""
    arrows, files = arrows_of(root), files_of(root)
    found = [f"{f} is in no room" for f in files if not f.endswith("/__init__.py") and room_of(f) is None]
    found += [f"{a.file} imports {a.target}, which is not below it" for a in arrows if is_upward(a)]
    core = [a for a in arrows if a.target.startswith(BACKENDS) and a.file.startswith("passes/")]
    found += [
        f"{a.file}, of the core, imports a backend: {a.target}"
        for a in core
        if not a.file.startswith(BACKENDS) and a.file != COMPOSES
    ]
    edges = {(a.file, a.target) for a in arrows if a.target.endswith(".py") and not a.typing and a.file != a.target}
    edges -= {(a.file, a.target) for a in arrows if a.hidden and (a.file, a.module) in HIDDEN}
    found += [f"a cycle of files: {', '.join(group)}" for group in cycles_of(edges)]
    rooms = {(room_of(a)[1], room_of(b)[1]) for a, b in edges if room_of(a) and room_of(b)}
    found += [f"a cycle of rooms: {', '.join(group)}" for group in cycles_of({(a, b) for a, b in rooms if a != b})]
    hidden = [a for a in arrows if a.hidden and (a.file, a.module) not in HIDDEN]
    found += [f"{a.file} imports {a.module} inside of a function" for a in hidden]
    others = [f for f in files if not f.startswith(PRIVATE)]
    found += [f"{f} speaks the private {name}" for f in others for name in private(root / f)]
    return sorted({*found, *faults_of_folders(root)})


def private(path):
    """Return the private names of torch that a file speaks or imports; pytrees have no public name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{a.name}" for a in node.names]
    return [name for name in found if re.fullmatch(r"torch\.(?!utils\._pytree)(\w+\.)*_[a-zA-Z][\w.]*", name)]


def faults_of_folders(root):
    folders = sorted({p.parent for top in FOLDERS for p in (root / top).rglob("*") if p.suffix in SOURCES})
    found = []
    for folder in folders:
        name = folder.relative_to(root)
        count = sum(p.suffix in SOURCES for p in folder.iterdir())
        if count > MOST:
            found.append(f"{name} has {count} source files, more than {MOST}")
        init = folder / "__init__.py"
        doc = ast.get_docstring(ast.parse(init.read_text())) if init.exists() else None
        if doc is None:
            found.append(f"{name} does not say in the docstring of its __init__ what lives there")
        elif str(name).startswith(("passes/", "amp_graph/")) and len(doc.split("\n\n", 1)[-1].splitlines()) < 2:
            found.append(f"{name} does not say in the docstring of its __init__ what may be imported from where")
    return found


def test_every_import_points_downwards_and_every_folder_is_one_subject():
    assert faults_of(ROOT) == []


def test_every_exception_is_one():
    taken = {(a.file, a.module) for a in arrows_of(ROOT) if a.hidden}
    assert {*HIDDEN} - taken == set(), "no longer hidden"
    rooms = [room for line in ROOMS for room in line]
    assert [room for room in rooms if not (ROOT / room).exists()] == []


def test_every_folder_is_installed_with_its_sources():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {module_of(file) for file in files_of(ROOT) if file.endswith("__init__.py")}
    assert packages == {*told["packages"]}
    data = told["package-data"]
    for path in sorted(p for top in FOLDERS for p in (ROOT / top).rglob("*") if p.suffix in (".c", ".h", ".toml")):
        folder = path.parent.relative_to(ROOT)
        owner = next(f for f in (folder, *folder.parents) if (ROOT / f / "__init__.py").exists())
        patterns = data.get(module_of(f"{owner}/__init__.py"), [])
        assert any((path.relative_to(ROOT / owner)).match(p) for p in patterns), (
            f"{path.relative_to(ROOT)} is not installed"
        )


# -- broken controls --------------------------------------------------------------------------------------

DOC = '"""A room.\n\nWhat.\nWhere.\n"""\n'
SOUND = {
    "lists/__init__.py": DOC,
    "passes/__init__.py": DOC,
    "passes/base.py": "import torch\n",
    "passes/graph/__init__.py": DOC,
    "passes/graph/aliasing.py": "from amp_graph.passes import base\n",
    "passes/casts/__init__.py": DOC,
    "passes/casts/insert.py": "from amp_graph.passes.graph.aliasing import x\n",
    "passes/backends/__init__.py": DOC,
    "passes/backends/cuda/__init__.py": DOC,
    "passes/backends/cuda/pad.py": "from amp_graph.passes.casts import insert\n",
    "passes/pipeline_table.py": "from amp_graph.passes.backends.cuda.pad import x\n",
    "amp_graph/__init__.py": DOC,
}
BROKEN = {
    "upward": ({"passes/graph/aliasing.py": "from amp_graph.passes.casts import insert\n"}, "which is not below it"),
    "a module by its attribute": (
        {"passes/graph/aliasing.py": "import amp_graph.passes.casts.insert\n"},
        "not below it",
    ),
    "for types alone": (
        {"passes/base.py": "if TYPE_CHECKING:\n    from amp_graph.passes.graph import aliasing\n"},
        "not below it",
    ),
    "a backend in the core": (
        {"passes/casts/insert.py": "from amp_graph.passes.backends.cuda.pad import x\n"},
        "of the core, imports a backend",
    ),
    "a cycle in a room": (
        {
            "passes/graph/aliasing.py": "from amp_graph.passes.graph import other\n",
            "passes/graph/other.py": "from amp_graph.passes.graph.aliasing import x\n",
        },
        "a cycle of files: passes/graph/aliasing.py, passes/graph/other.py",
    ),
    "a cycle of rooms": (
        {"passes/graph/aliasing.py": "from amp_graph.passes.casts import insert\n"},
        "a cycle of rooms: passes/casts, passes/graph",
    ),
    "hidden": (
        {"passes/casts/insert.py": "def f():\n    from amp_graph.passes.graph import aliasing\n"},
        "inside of a function",
    ),
    "hidden, by name": (
        {"passes/casts/insert.py": "def f():\n    importlib.import_module('amp_graph.passes.graph')\n"},
        "inside of a function",
    ),
    "no room": ({"passes/new.py": "import torch\n"}, "passes/new.py is in no room"),
    "no docstring": ({"passes/graph/__init__.py": ""}, "passes/graph does not say"),
    "a docstring of one line": ({"passes/graph/__init__.py": '"""A room."""\n'}, "what may be imported"),
    "a private name": ({"passes/base.py": "import torch\ntorch._C._set_grad_enabled(True)\n"}, "the private torch._C"),
    "a private import": ({"passes/base.py": "from torch._dynamo import config\n"}, "the private torch._dynamo.config"),
    "large": ({f"passes/graph/f{i}.c": "" for i in range(MOST)}, "more than 25"),
}


def written(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_control_what_is_sound_is_found_sound(tmp_path):
    assert faults_of(written(tmp_path, SOUND)) == []


@pytest.mark.parametrize("name", BROKEN)
def test_control_what_is_broken_is_found(tmp_path, name):
    files, expected = BROKEN[name]
    found = faults_of(written(tmp_path, SOUND | files))
    assert any(expected in line for line in found), found
