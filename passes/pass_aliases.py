"""Former names of passes and of groups of passes, which policies may still use.

Before: ``skip=old_name``. After: ``skip=new_name``, which is what the policy holds and prints.
"""

from __future__ import annotations

ALIASES: dict[str, str] = {}  # former word -> word, both with underscores
