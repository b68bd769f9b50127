"""AMP1xx: regions of ``torch.autocast`` that do nothing, fight, or cover the wrong calls."""

from __future__ import annotations

from collections.abc import Iterator

from amp_graph.audit.records import Finding, Watcher

LOW = ("bfloat16", "float16")


class AutocastRegions(Watcher):
    """Looks at what ran inside of each region."""

    def findings(self) -> Iterator[Finding]:
        """Yield what the regions did not do."""
        low = {call.region for call in self.training.calls if call.output in LOW and call.phase == "forward"}
        for number, region in enumerate(self.training.regions):
            if region.looked_at and region.enabled and number not in low:
                yield Finding(
                    "AMP101", "warning", region.place,
                    f"autocast({region.device!r}, {region.dtype}) was entered {region.entered} times, and no operation "
                    "in it ran in low precision",
                    "enter autocast for the device of the inputs, around the forward",
                    {"device": region.device, "dtype": region.dtype, "entered": region.entered},
                )  # fmt: skip
