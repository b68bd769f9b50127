"""ONNX, checked in onnxruntime, and packages of AOTInductor, in processes that cannot import amp_graph."""

import importlib

import pytest
import torch

from amp_graph.errors import AmpGraphError, CaptureError
from amp_graph.export import export, formats, to_onnx

from .language_models import language_model
from .models import Attention, Cnn, Mlp, error, made, run_without_amp_graph

NEEDED = ("onnx", "onnxscript", "onnxruntime")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
needs_onnx = pytest.mark.skipif(bool(missing), reason=f"pip install {' '.join(missing)}")
# Warnings of the packages that torch.onnx imports, and of onnx_ir about dynamic sizes.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
MORE = ((Mlp, True), (Cnn, False), (Attention, False), (Attention, True))
BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # two roundings


def run_onnx(path, x):
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(out)


def assert_runs_as_rewritten(model, x, path, fold=True, **options):
    with torch.no_grad():
        program = export(model, (x,), policy="fp16", fold_weights=fold, **options)
        assert any(n.meta["val"].dtype == torch.float16 for n in program.graph.nodes if "linear" in n.name)
        to_onnx(program, path)
        assert error(run_onnx(path, x), program.module()(x)) < BOUNDS[torch.float16]
        return program


@needs_onnx
@pytest.mark.parametrize(
    ("kind", "fold"),
    [(Mlp, False), (Cnn, True), *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)],
)
def test_fp16_in_onnxruntime_is_the_rewritten_graph(kind, fold, tmp_path):
    model, x = made(kind)
    assert_runs_as_rewritten(model, x, tmp_path / "model.onnx", fold)


@needs_onnx
@pytest.mark.slow
def test_dynamic_sizes_are_dynamic_in_onnx(tmp_path):
    model, x = made(Mlp)
    shapes = {"x": {0: torch.export.Dim("batch")}}
    program = assert_runs_as_rewritten(model, x, tmp_path / "model.onnx", dynamic_shapes=shapes)
    y = torch.randn(7, 32)
    assert error(run_onnx(tmp_path / "model.onnx", y), program.module()(y)) < BOUNDS[torch.float16]


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_language_models_run_in_onnxruntime(name, tmp_path):
    pytest.importorskip("transformers", reason="pip install transformers")
    model, ids = language_model(name)
    assert_runs_as_rewritten(model, ids, tmp_path / "model.onnx")


@needs_onnx
def test_a_dtype_that_the_opset_lacks_is_one_error_and_no_file(tmp_path):
    model, x = made(Cnn)
    program, path = export(model, (x,), policy="bf16"), tmp_path / "model.onnx"
    with pytest.raises(CaptureError, match=r"(?s)Conv of ONNX opset 18 takes no bfloat16.*opset 22 and newer.*fix: "):
        to_onnx(program, path, 18)
    assert not path.exists()


@needs_onnx
@pytest.mark.parametrize("kind", [Mlp, pytest.param(Cnn, marks=pytest.mark.slow)])
def test_bf16_is_legal_in_a_newer_opset_and_runs_where_the_runtime_has_kernels(kind, tmp_path):
    """A file of a legal type is written; onnxruntime's CPU kernels say which operator they lack."""
    onnx = importlib.import_module("onnx")
    model, x = made(kind)
    path = tmp_path / "model.onnx"
    with torch.no_grad():
        program = export(model, (x,), policy="bf16", fold_weights=True)
        to_onnx(program, path, 22)
        onnx.checker.check_model(onnx.load(path), full_check=True)
        try:
            got = run_onnx(path, x)
        except importlib.import_module("onnxruntime").capi.onnxruntime_pybind11_state.NotImplemented as refusal:
            pytest.skip(f"onnxruntime: {str(refusal)[-200:]}")
        assert error(got, program.module()(x)) < BOUNDS[torch.bfloat16]


def test_a_missing_package_is_one_error(monkeypatch, tmp_path):
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    model, x = made(Mlp)
    with pytest.raises(AmpGraphError, match=r"(?s)onnx is not installed.*pip install 'amp-graph\[export\]'"):
        to_onnx(export(model, (x,), policy="fp16"), tmp_path / "model.onnx")


@needs_onnx
def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    model, x = made(Mlp)
    program = export(model, (x,), policy="bf16")
    with pytest.raises(AmpGraphError, match=r"(?s)cannot write .*no directory .*fix: "):
        to_onnx(program, tmp_path / "none" / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [Mlp, Cnn])
def test_a_package_of_aotinductor_runs_where_amp_graph_cannot_be_imported(kind, dtype, tmp_path):
    model, x = made(kind)
    with torch.no_grad():
        program = export(model, (x,), policy=dtype)
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        torch.save((x, program.module()(x)), tmp_path / "io.pt")
    run_without_amp_graph(
        "import torch\n"
        "x, want = torch.load('io.pt')\n"
        "got = torch._inductor.aoti_load_package('model.pt2')(x)\n"
        f"bound = {BOUNDS[torch.bfloat16 if dtype == 'bf16' else torch.float16]}\n"
        "assert (got - want).norm() < bound * want.norm(), (got, want)\n",
        tmp_path,
    )
