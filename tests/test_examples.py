"""Every example runs, and does what it says."""

from pathlib import Path

import pytest
import torch

from tests.doc_blocks import module_at

FOLDER = Path(__file__).parent.parent / "examples"
SCRIPTS = ("imagenet", "bert_classifier")  # whole scripts with options: tests/test_example_scripts.py


def load(name):
    return module_at(FOLDER / f"{name}.py", f"example_{name}")


def test_train_digits():
    assert load("train_digits").main(epochs=6) > 0.9


def test_inspect_graph():
    assert "softmax" in load("inspect_graph").main()


def test_custom_policy():
    found = load("custom_policy").main()
    linear = {name: precision for name, precision in found.items() if name.endswith("linear")}
    assert linear == {
        "encoder.0 linear": "full",
        "encoder.1 linear": "low",
        "encoder.2 linear": "low",
        "head linear": "full",
    }
    assert {p for name, p in found.items() if name.endswith(("gelu", "tanh"))} == {"full"}


def test_torch_compile_backend():
    assert load("torch_compile_backend").main() == torch.bfloat16


def test_scale_a_joint_graph(capsys):
    assert load("scale_a_joint_graph").main() == (2.0**29, 2.0**11)
    assert capsys.readouterr().out.count("amp_graph.check_finite_and_unscale_") == 1


def test_ask_the_graph():
    graph, chain, ways = load("ask_the_graph").main()
    assert {graph.nodes[name]["dtype"] for name in chain} == {"f32"}  # GPT-2's residual stream, to its last norm
    assert [graph.nodes[name]["operation"].partition(".")[2] for name in chain] == [
        *("embedding", "add", "dropout"), *["add"] * 4, "layer_norm",
    ]  # fmt: skip
    ends = [(graph.nodes[way[0]]["module"], graph.nodes[way[-1]]["module"]) for way in ways]
    assert ends[:4] == [
        ("transformer.h.0.attn.c_attn", "transformer.h.0.attn"),
        ("transformer.h.0.attn", "transformer.h.0.attn.c_proj"),
        ("transformer.h.0.attn.c_proj", "transformer.h.0.mlp.c_fc"),
        ("transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"),
    ]
    assert len(ends) == 10
    assert "gelu" in " ".join(graph.nodes[name]["operation"] for name in ways[3])


def test_all_examples_are_tested():
    assert {path.stem for path in FOLDER.glob("*.py")} == {
        "train_digits",
        "inspect_graph",
        "custom_policy",
        "torch_compile_backend",
        "scale_a_joint_graph",
        "ask_the_graph",
        *SCRIPTS,
    }


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.stem)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) <= (170 if path.stem in SCRIPTS else 60)
