"""Reports which modules a piece of code calls itself, before they run: the modules to convert.

Before: ``loss_fn(self.net(x), y)`` in a training step. After: ``heard(self.net)``, and then the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module


@contextmanager
def outermost_calls(heard: Callable[[Module], bool]) -> Iterator[None]:
    """Call ``heard`` with each module that the block calls, before its forward is looked up.

    ``heard`` returns whether the module is dealt with; if not, the modules that it calls are reported as well. Calls
    of other threads are not reported. Inside of a module that is dealt with, modules are called as without this block.
    """
    original = Module.__call__
    thread = threading.get_ident()

    def called(module: Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or not heard(module):
            return original(module, *args, **kwargs)
        Module.__call__ = original  # type: ignore[method-assign]
        try:
            return original(module, *args, **kwargs)
        finally:
            Module.__call__ = called  # type: ignore[method-assign]

    Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        Module.__call__ = original  # type: ignore[method-assign]
