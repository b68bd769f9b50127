"""``amp-graph completion SHELL``: prints a script that completes commands, options and their values in a shell.

After ``eval "$(amp-graph completion bash)"``: ``amp-graph du<Tab>`` becomes ``amp-graph dump``.
"""

from __future__ import annotations

import argparse
import sys

from amp_graph.cli.main import parser
from amp_graph.errors import AmpGraphError


def run(args: argparse.Namespace) -> int:
    """Print the script, which shtab writes. Raises AmpGraphError where shtab is missing."""
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise AmpGraphError(
            "completion: shtab is not installed\n  legal: an installation with shtab\n  fix:   pip install shtab"
        ) from error
    sys.stdout.write(shtab.complete(parser(), shell=args.shell) + "\n")
    return 0
