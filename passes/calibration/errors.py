"""The error of calibrations."""

from __future__ import annotations

from amp_graph.lists.errors import AmpGraphError


class CalibrationError(AmpGraphError, ValueError):
    """A calibration that cannot be measured, merged, read or written."""
