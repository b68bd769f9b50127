"""Import one module from a mutated source, the file itself stays as it is.

Nothing but the standard library is imported here: ``site/sitecustomize.py`` reads this file in every Python process
that a test starts.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys

VARIABLE = "AMP_GRAPH_MUTANT"  # names a JSON file: {"module": ..., "file": ..., "source": ...}


class _Loader(importlib.machinery.SourceFileLoader):
    """Compile the mutated source; neither read nor write a .pyc."""

    def __init__(self, name, path, source):
        super().__init__(name, path)
        self.mutated = source

    def get_code(self, fullname):
        return compile(self.mutated, self.path, "exec", dont_inherit=True)

    def get_source(self, fullname):
        return self.mutated


class Finder(importlib.abc.MetaPathFinder):
    """Find the one module that is mutated."""

    def __init__(self, module, file, source):
        self.module, self.file, self.source = module, file, source

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.module:
            return None
        return importlib.util.spec_from_file_location(
            fullname, self.file, loader=_Loader(fullname, self.file, self.source)
        )


def install():
    """Install the mutant that the environment variable names, if there is one."""
    if path := os.environ.get(VARIABLE):
        with open(path, encoding="utf-8") as file:
            sys.meta_path.insert(0, Finder(**json.load(file)))
