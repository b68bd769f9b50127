"""Train a BERT that classifies text, with the options of the BERT scripts that used apex's FP16_Optimizer.

    python examples/bert_classifier.py                                    # fp32, in a minute on 2 cores
    python examples/bert_classifier.py --fp16 --loss_scale 0              # level O2 in fp16; 0: a dynamic loss scale
    python examples/bert_classifier.py --opt_level O1 --data_dir SST-2
    python examples/bert_classifier.py --compare_levels                   # O0 to O3 in a table
    torchrun --nproc-per-node 2 examples/bert_classifier.py --fp16 --loss_scale 0

The BERT is small and starts from random weights. Without --data_dir it tells which package of Python's standard library
a passage is from. A batch is that of all processes together, as in the original scripts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from parts.levels import LEVELS, Rate, Training, at_level, table
from parts.processes import Processes
from parts.texts import Texts, load_texts
from transformers import BertConfig, BertForSequenceClassification

NO_DECAY = ("bias", "LayerNorm.weight")


def read_options(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data_dir", help="a folder with train.tsv and dev.tsv, as SST-2's")
    add("--output_dir", type=Path, help="where each epoch is saved")
    add("--resume", type=Path, help="a checkpoint to go on from")
    add("--max_seq_length", type=int, default=64)
    add("--vocab_size", type=int, default=4000)
    add("--hidden_size", type=int, default=128)
    add("--num_hidden_layers", type=int, default=2)
    add("--dropout", type=float, default=0.1)
    add("--train_batch_size", type=int, default=32, help="examples of all processes")
    add("--eval_batch_size", type=int, default=64)
    add("--gradient_accumulation_steps", type=int, default=1)
    add("--learning_rate", type=float, default=1e-3)
    add("--num_train_epochs", type=int, default=3)
    add("--max_steps", type=int, help="updates of an epoch, where it is to be shorter")
    add("--warmup_proportion", type=float, default=0.1, help="part of all updates in which the learning rate grows")
    add("--max_grad_norm", type=float, default=1.0)
    add("--seed", type=int, default=42)
    add("--fp16", action="store_true", help="train in fp16, at level O2 unless --opt_level says another")
    add("--loss_scale", type=float, default=0, help="a power of two; 0: a dynamic one")
    add("--opt_level", choices=LEVELS, help="O0 without --fp16; without it, other levels are in bf16")
    add("--compare_levels", action="store_true", help="train at every level, and print a table")
    return parser.parse_args(words)


def warmup_linear(update: int, updates: int, proportion: float) -> float:
    """Return the factor of the learning rate: it grows, then falls to 0."""
    warm = int(proportion * updates)
    return (update + 1) / warm if update < warm else max(0.0, (updates - update) / max(1, updates - warm))


def adamw(model: torch.nn.Module, lr: float, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return a fused AdamW that decays neither biases nor norms."""
    plain = {id(p) for name, p in model.named_parameters() if name.endswith(NO_DECAY)}
    groups = [
        {"params": [p for p in parameters if id(p) not in plain], "weight_decay": 0.01},
        {"params": [p for p in parameters if id(p) in plain], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, fused=True)


def start(args: argparse.Namespace, texts: Texts, processes: Processes, level: str) -> Training:
    """Make model and optimizer at ``level``."""
    torch.manual_seed(args.seed)
    config = BertConfig(
        **{"vocab_size": texts.tokens, "hidden_size": args.hidden_size, "num_hidden_layers": args.num_hidden_layers},
        **{"num_attention_heads": max(1, args.hidden_size // 64), "intermediate_size": 4 * args.hidden_size},
        **{"max_position_embeddings": args.max_seq_length, "num_labels": len(texts.classes)},
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), args.dropout),
    )
    model = BertForSequenceClassification(config).to(processes.device)
    dtype, scale = "fp16" if args.fp16 else "bf16", args.loss_scale or "dynamic"
    processes.print(f"{level}: BERT of {model.num_parameters():,} parameters, {processes.count} process(es)")
    return at_level(level, dtype, scale if args.fp16 else 1.0, model, partial(adamw, model, args.learning_rate))


def train_epoch(args: argparse.Namespace, texts: Texts, training: Training, schedule, processes: Processes) -> None:
    """Train one epoch; take note of the losses, averaged over the processes."""
    model, rate, epoch, micro = processes.wrap(training.model), Rate(), training.epoch, args.gradient_accumulation_steps
    model.train()
    torch.manual_seed(hash((args.seed, epoch, processes.rank)))  # for dropout, the same after a resume
    losses: list[torch.Tensor] = []
    for i, batch in enumerate(texts.batches(args.train_batch_size // micro, args.seed, epoch, processes)):
        if i // micro == args.max_steps:
            break
        loss = model(**batch).loss
        training.backward(loss / micro)
        losses.append(loss.detach())
        if (i + 1) % micro == 0:
            training.clip(args.max_grad_norm)
            training.optimizer.step()
            schedule.step()
            training.optimizer.zero_grad()
            rate.step(args.train_batch_size)
        if i % 50 == 0:
            processes.print(f"  epoch {epoch} step {i}: loss {processes.mean(loss):.4f}, {float(rate):.0f} examples/s")
            rate.pause()
    training.losses += processes.mean(torch.stack(losses)).tolist()
    training.rate = float(rate)
    training.epoch += 1


@torch.no_grad()
def evaluate(args: argparse.Namespace, texts: Texts, training: Training, processes: Processes) -> None:
    """Compute the accuracy on the held-out examples."""
    training.model.eval()
    right = total = 0.0
    for batch in texts.held_out(args.eval_batch_size, processes):
        labels = batch.pop("labels")
        found = training.model(**batch).logits.argmax(1)
        right, total = right + (found == labels).sum().item(), total + len(labels)
    both = processes.mean(torch.tensor([right, total], device=processes.device))
    training.accuracy = (both[0] / both[1]).item()
    processes.print(f"  accuracy {training.accuracy:.1%} on held-out texts (most frequent class {texts.chance():.1%})")


def train(args: argparse.Namespace, texts: Texts, processes: Processes, level: str) -> Training:
    """Train at one level, from the start or from a checkpoint."""
    training = start(args, texts, processes, level)
    updates = min(args.max_steps or 10**9, len(texts.train[1]) // args.train_batch_size) * args.num_train_epochs
    factor = partial(warmup_linear, updates=updates, proportion=args.warmup_proportion)
    schedule = torch.optim.lr_scheduler.LambdaLR(training.optimizer, factor)
    if args.resume is not None:
        schedule.load_state_dict(training.load(args.resume)["schedule"])
    while training.epoch < args.num_train_epochs:
        train_epoch(args, texts, training, schedule, processes)
        if args.output_dir is not None and processes.rank == 0:
            training.save(args.output_dir / f"bert-{level}-{training.epoch}.pt", schedule=schedule.state_dict())
        evaluate(args, texts, training, processes)
    return training


def main(words: Sequence[str] | None = None) -> list[Training]:
    """Train as the command line says; return what was trained, a level each."""
    args = read_options(words)
    if args.compare_levels and args.resume:
        raise SystemExit("--compare_levels trains every level from the start\n  fix:   leave --resume out")
    texts, processes = load_texts(args.data_dir, args.max_seq_length, args.vocab_size), Processes.start()
    levels = LEVELS if args.compare_levels else (args.opt_level or ("O2" if args.fp16 else "O0"),)
    trained = [train(args, texts, processes, level) for level in levels]
    processes.print(table(trained, "examples/s"))
    processes.end()
    return trained


if __name__ == "__main__":
    main()
