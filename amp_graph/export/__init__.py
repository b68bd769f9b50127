"""Programs in mixed precision that run where amp_graph is not installed: torch.export, AOTInductor, ONNX.

>>> from amp_graph.export import export
>>> program = export(model, (x,), policy="fp16")
>>> torch.export.save(program, "model.pt2")

``program.py`` captures, rewrites and exports, and stores weights in low precision; ``formats.py`` writes ONNX.
Imports ``amp_graph.rewrite`` and below; only ``amp_graph.cli`` imports this folder.
"""

from amp_graph.export.formats import to_onnx as to_onnx
from amp_graph.export.program import export as export
