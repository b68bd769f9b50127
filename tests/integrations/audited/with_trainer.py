"""The Trainer of transformers, over a model that was loaded in bf16."""

import sys
import tempfile
import warnings

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

faulty = sys.argv[1] == "faulty"
warnings.simplefilter("ignore")

torch.manual_seed(0)
sizes = dict(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(GPT2Config(**sizes)).to(torch.bfloat16 if faulty else torch.float32)
data = [{"input_ids": torch.randint(100, (16,)), "labels": torch.randint(100, (16,))} for _ in range(48)]
with tempfile.TemporaryDirectory() as folder:
    every = dict(report_to=[], logging_steps=1, disable_tqdm=True, save_strategy="no", use_cpu=True)
    arguments = TrainingArguments(folder, bf16=True, per_device_train_batch_size=4, max_steps=6, **every)
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)  # it prints times
    trainer.train()  # expect: AMP301, AMP302
    print([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
