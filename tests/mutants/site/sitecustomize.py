"""Install the mutant, or the marks of lines, in Python processes that tests start: PYTHONPATH has this folder then."""

import importlib.util
import os
from pathlib import Path

for _name, _variable in (("hook", "AMP_GRAPH_MUTANT"), ("lines", "AMP_GRAPH_LINES")):
    if _variable in os.environ:
        _spec = importlib.util.spec_from_file_location(f"_mutants_{_name}", Path(__file__).parents[1] / f"{_name}.py")
        _module = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(_module)
        _module.install()
