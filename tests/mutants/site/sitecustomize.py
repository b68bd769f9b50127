"""Install the mutant in Python processes that tests start: PYTHONPATH has this folder then."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("_mutants_hook", Path(__file__).parents[1] / "hook.py")
_hook = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_hook)
_hook.install()
