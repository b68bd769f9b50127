"""The rows of the zoo: a JSON file, written after each model, and the table made of it.

{"format": 1, "versions": {...}, "models": {"timm/resnet18": {"uncounted": "", "bf16": {...}, "fp16": {...}}}}
"""

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import torch

from amp_graph.passes.native.output_file import write_atomically

FORMAT = 1
WORDS = ("bf16", "fp16")


class Results:
    """What was measured, by model: two rows each, or the reason that it has none."""

    def __init__(self, path: Path):
        self.path = path
        self.models: dict[str, dict[str, Any]] = json.loads(path.read_text())["models"] if path.exists() else {}

    def has(self, name: str) -> bool:
        """Say whether a model needs no run."""
        found = self.models.get(name, {})
        return bool(found.get("uncounted")) or all(word in found for word in WORDS)

    def put(self, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Take the rows of a child, and write the file."""
        found: dict[str, Any] = {}
        died = ""
        for row in rows:
            died = row.pop("died", died)
            word = row.pop("word", None)
            found |= {word: row} if word else row
        if died and "uncounted" not in found:
            found["uncounted"] = died
        for word in WORDS:
            if died and word not in found:
                found[word] = {"ok": False, "cause": died, "notes": []}
                break
        self.models[name] = found
        self.write()
        return found

    def write(self) -> None:
        """Write the file, models in order of their names."""
        held = {"format": FORMAT, "versions": versions(), "models": dict(sorted(self.models.items()))}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(held, indent=1) + "\n")


PACKAGES = (
    "transformers", "timm", "torchvision", "diffusers", "torch_geometric", "segmentation-models-pytorch", "monai",
    "vit-pytorch", "x-transformers", "deepctr-torch", "torch-rechub",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return what the figures depend on."""
    found = {"torch": torch.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
