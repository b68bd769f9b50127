"""Every block of docs/trainers.md runs as it is written."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import amp_graph
from tests.doc_blocks import PAGES, blocks_of, run_blocks
from tests.integrations import training
from tests.integrations.test_transformers import _alone, gpt2, rows

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE))
pytestmark = pytest.mark.needs("lightning", "transformers", "accelerate", "peft")
assert _alone  # a fixture


def given(section, folder):
    """Return what the blocks of a section take as given."""
    model = training.net()
    data = torch.utils.data.DataLoader(training.batches(4), batch_size=None)
    names = {"amp_graph": amp_graph, "model": model, "loader": data, "loss_fn": F.cross_entropy}
    if section in ("Lightning", "Audit"):
        from tests.integrations.test_lightning import module

        return {**names, "module": module()}
    if section == "transformers":
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(str(folder), max_steps=2, use_cpu=True, report_to="none", save_strategy="no")
        return {**names, "Trainer": Trainer, "arguments": arguments, "dataset": rows(2), "model": gpt2()}
    if section == "accelerate":
        return {**names, "optimizer": training.adamw(model.parameters())}
    if section == "peft":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        return {**names, "get_peft_model": get_peft_model, "base": gpt2(torch.bfloat16), "config": config}
    if section == "Metrics":
        return {**names, "model": amp_graph.convert(model), "scaler": amp_graph.GradScaler(), "norm": 1.0}
    return {**names, "model": model.bfloat16()}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_blocks_of_a_section_run_in_order(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)
    assert blocks
    names = given(section, tmp_path)
    for block in blocks:
        exec(compile(block, f"docs/trainers.md, {section}", "exec"), names)


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in blocks_of(page) if block.needs], ids=lambda block: block.name
)
def test_blocks_of_other_pages_that_need_packages_run(block):
    assert block.needs == ["peft"]
    run_blocks([block], {"amp_graph": amp_graph, "torch": torch, "model": gpt2()})
