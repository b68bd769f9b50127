"""Export models in every format and dtype, run them where amp_graph cannot be imported, and print the errors.

python -m benchmarks.export_table [--output benchmarks/results/export.md]
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import torch

from amp_graph.errors import AmpGraphError
from amp_graph.export import export, to_onnx
from tests.export.language_models import language_model
from tests.export.models import Cnn, Mlp, error, made, run_without_amp_graph

MODELS = ("mlp", "cnn", "bert", "gpt2", "llama")
FORMATS = ("pt2", "onnx", "aoti")
COLUMNS = ("model", "format", "dtype", "error to the rewritten graph", "error to fp32", "KiB")
HEAD = """# Exported models

`python -m benchmarks.export_table`, on a CPU, with torch {torch}. Each file was loaded and run in a process that cannot
import amp_graph: by `torch.export.load`, by onnxruntime {onnxruntime}, and by `torch._inductor.aoti_load_package`.
Weights are folded. Errors are norms of differences, relative to the norm of the reference. The models are small, with
random weights: `mlp` and `cnn` are those of `tests/export/models.py`, the others are of transformers {transformers}.

"""
RUNS = {
    "pt2": "y = torch.export.load('model.pt2').module()(x)",
    "aoti": "y = torch._inductor.aoti_load_package('model.pt2')(x)",
    "onnx": "import onnxruntime\n"
    "session = onnxruntime.InferenceSession('model.onnx', providers=['CPUExecutionProvider'])\n"
    "(y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})\n"
    "y = torch.from_numpy(y)",
}


def main() -> int:
    """Print the table; write it to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", metavar="FILE")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    args = parser.parse_args()
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for name in MODELS:
        for kind in args.formats:
            for dtype in ("fp16", "bf16"):
                rows.append(row(name, kind, dtype))
                print("| " + " | ".join(rows[-1]) + " |", flush=True)
    text = head() + "\n".join("| " + " | ".join(one) + " |" for one in rows) + "\n"
    if args.output:
        Path(args.output).write_text(text)
    return 0


def head() -> str:
    """Return the text above the table, with the versions."""
    import onnxruntime
    import transformers

    return HEAD.format(
        onnxruntime=onnxruntime.__version__, torch=torch.__version__, transformers=transformers.__version__
    )


def model_of(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a model in evaluation, and its input."""
    return made({"mlp": Mlp, "cnn": Cnn}[name]) if name in ("mlp", "cnn") else language_model(name)


def row(name: str, kind: str, dtype: str) -> tuple[str, ...]:
    """Export, load and run one model; return its row."""
    model, x = model_of(name)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        program = export(model, (x,), policy=dtype, fold_weights=True)
        rewritten, full = program.module()(x), model(x)
        torch.save(x, f"{folder}/x.pt")
        try:
            path = written(program, kind, folder)
            code = f"import torch\nx = torch.load('x.pt')\n{RUNS[kind]}\ntorch.save(y.detach(), 'y.pt')"
            run_without_amp_graph(code, folder)
        except (AmpGraphError, AssertionError) as failure:
            why = str(failure).strip().splitlines()
            shown = why[0] if isinstance(failure, AmpGraphError) else why[-1]
            lacks = re.search(r"Could not find an implementation for (\S+) node", shown)
            told = f"onnxruntime has no kernel of {lacks[1]}" if lacks else shown.replace("|", "/")[:160]
            return name, kind, dtype, told, "", ""
        got = torch.load(f"{folder}/y.pt")
        size = path.stat().st_size // 1024
        return name, kind, dtype, f"{error(got, rewritten):.1e}", f"{error(got, full):.1e}", str(size)


def written(program: torch.export.ExportedProgram, kind: str, folder: str) -> Path:
    """Write ``program`` in a format; return the path."""
    path = Path(folder) / ("model.onnx" if kind == "onnx" else "model.pt2")
    if kind == "onnx":
        to_onnx(program, path)
    elif kind == "aoti":
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    else:
        torch.export.save(program, path)
    return path


if __name__ == "__main__":
    sys.exit(main())
