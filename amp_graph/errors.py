"""All errors and the warning class of amp_graph.

Each message says what, where (node, module path, the user's line), what is legal, and the fix as code.
"""

from __future__ import annotations

from amp_graph.lists import AmpGraphError as AmpGraphError
from amp_graph.lists import AmpGraphWarning as AmpGraphWarning
from amp_graph.lists import ListError as ListError
from amp_graph.lists import warn as warn
from amp_graph.passes.base import PassError as PassError
from amp_graph.passes.base import VerifyError as VerifyError
from amp_graph.passes.calibration.calibration_file import CalibrationError as CalibrationError
from amp_graph.passes.native.jit_compiler import CompilerError as CompilerError
from amp_graph.passes.native.output_file import FileError as FileError


class PolicyError(AmpGraphError):
    """A policy that cannot be understood."""


class CaptureError(AmpGraphError):
    """A model that cannot be converted, or whose forward could not be captured."""


class RankError(AmpGraphError, RuntimeError):
    """Ranks of a step that differ, or of which one failed or did not come: which rank, and why."""


class ScaleError(AmpGraphError, RuntimeError):
    """Loss scaling called out of order, with invalid options, or with the state of another object."""
