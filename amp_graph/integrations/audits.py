"""What a trainer's callback does to audit its training: ``callbacks=[AmpGraphAudit(every=100)]``.

It begins when training begins, and prints the report when training ends; it converts nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import Any

from amp_graph.audit.audit_report import AuditReport
from amp_graph.audit.session import Audit
from amp_graph.run.exit_report import is_first_rank


class Audits:
    """The methods of ``AmpGraphAudit`` that are the same for all trainers.

    every: look at each step whose number it divides, beside the 2nd and the 3rd. page: a file for the report as an HTML
    page. ignore: codes of findings to leave out. ``report`` is the report of the last training.

    Raises AmpGraphError for a negative number and an unknown code.
    """

    def __init__(
        self, *, every: int = 0, page: str | os.PathLike[str] | None = None, ignore: Collection[str] = ()
    ) -> None:
        """Check the options; the audit begins when training begins."""
        self.options: dict[str, Any] = {"every": every, "ignore": ignore}
        self.page = page
        self.report: AuditReport | None = None
        self.audit = Audit(**self.options)

    def begin(self, model: Any) -> None:
        """Begin to look."""
        self.audit = Audit(model, **self.options)
        self.audit.__enter__()

    def end(self) -> None:
        """Look no more; the first rank prints the report, and writes the page."""
        self.audit.stop()
        self.report = self.audit.report()
        if is_first_rank():
            print(self.report.text(), file=sys.stderr, end="")
            if self.page is not None:
                self.report.html(self.page)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin to look: Lightning."""
        self.begin(module)

    def on_train_end(self, *_: Any, **given: Any) -> None:
        """Print the report: Lightning, and transformers."""
        self.end()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Print the report of what ran before an error; the error goes on."""
        self.end()
