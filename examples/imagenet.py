"""Train a ResNet on a folder of images, with the options of apex's and DALI's ImageNet scripts.

    python examples/imagenet.py                                  # scikit-learn's digits, in 2 minutes on 2 cores
    python examples/imagenet.py --compare-levels                 # O0 to O3 in a table
    python examples/imagenet.py DATA --arch resnet50 --opt-level O2 --static-loss-scale 128.0 --channels-last
    torchrun --nproc-per-node 2 examples/imagenet.py DATA --dynamic-loss-scale

DATA has train/CLASS/*.jpg and val/CLASS/*.jpg. A batch of one process with -b 64 is that of two with -b 32.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from parts.dali import DaliImages, check_dali
from parts.images import Images, load_images
from parts.levels import LEVELS, Rate, Training, at_level, table
from parts.processes import Processes
from parts.resnet import make_model
from torch import nn

NORMS_ARE_FP32 = """--keep-batchnorm-fp32 False: below O3 the parameters of norms are always in fp32
  legal: --keep-batchnorm-fp32 True, or without it
  fix:   --opt-level O3, which is in low precision throughout"""


def read_options(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("data", nargs="?", help="a folder of images; without it, scikit-learn's handwritten digits")
    add("-a", "--arch", default="resnet18", help="resnet18, resnet34; any of torchvision where it is installed")
    add("-b", "--batch-size", type=int, default=32, help="images of each process")
    add("-j", "--workers", type=int, default=0, help="processes or threads that load images")
    add("--size", type=int, help="pixels of a side: 32 for digits, else 224")
    add("--epochs", type=int, default=3)
    add("--steps", type=int, help="steps of an epoch, where it is to be shorter")
    add("--lr", type=float, default=0.01, help="for 32 images; in proportion for others")
    add("--momentum", type=float, default=0.9)
    add("--weight-decay", type=float, default=1e-4)
    add("--norm", choices=("batch", "group"), default="batch", help="group: the same for any number of processes")
    add("--seed", type=int, default=0)
    add("--print-freq", type=int, default=10)
    add("--output-dir", type=Path, help="where each epoch is saved")
    add("--resume", type=Path, help="a checkpoint to go on from")
    add("-e", "--evaluate", action="store_true", help="only evaluate, after --resume")
    add("--opt-level", choices=LEVELS, default="O1")
    add("--compare-levels", action="store_true", help="train at every level, and print a table")
    add("--keep-batchnorm-fp32", choices=("True", "False"), help="at O3; below it norms are in fp32 in any case")
    add("--dtype", choices=("fp16", "bf16"), help="the low precision: fp16 on a GPU, else bf16")
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--static-loss-scale", type=float, default=1.0)
    scale.add_argument("--dynamic-loss-scale", action="store_true")
    add("--channels-last", action="store_true")
    add("--cudnn-benchmark", action="store_true", help="let cuDNN time its kernels, on a GPU")
    add("--loader", choices=("torch", "dali"), default="torch")
    return parser.parse_args(words)


def start(args: argparse.Namespace, processes: Processes, level: str, classes: int) -> Training:
    """Make model and optimizer at ``level``."""
    torch.manual_seed(args.seed)
    model, source = make_model(args.arch, classes, args.norm)
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = model.to(processes.device, memory_format=layout)
    processes.print(f"{level}: {args.arch} from {source}, {processes.count} x {args.batch_size} images")
    lr = args.lr * args.batch_size * processes.count / 32
    sgd = partial(torch.optim.SGD, lr=lr, momentum=args.momentum, weight_decay=args.weight_decay)
    dtype = args.dtype or ("fp16" if processes.device.type == "cuda" else "bf16")
    scale = "dynamic" if args.dynamic_loss_scale else args.static_loss_scale
    training = at_level(level, dtype, scale, model, sgd, keep_norms=args.keep_batchnorm_fp32 == "True")
    if args.resume is not None:
        training.load(args.resume)
    return training


def train_epoch(args: argparse.Namespace, images: Images, training: Training, processes: Processes) -> None:
    """Train one epoch; take note of the losses, averaged over the processes."""
    model, rate, epoch = processes.wrap(training.model), Rate(), training.epoch
    model.train()
    whole = args.batch_size * processes.count
    for i, (x, y) in enumerate(images.batches(whole, args.seed, epoch, processes, args.workers)):
        if i == args.steps:
            break
        layout = torch.channels_last if args.channels_last else torch.contiguous_format
        x, y = x.to(processes.device, memory_format=layout), y.to(processes.device)
        loss = nn.functional.cross_entropy(model(x), y)
        training.optimizer.zero_grad()
        training.backward(loss)
        training.optimizer.step()
        rate.step(whole)
        training.losses.append(loss.detach())
        if i % args.print_freq == 0:
            now = processes.mean(loss).item()
            processes.print(f"  epoch {epoch} step {i}: loss {now:.4f}, {float(rate):.0f} images/s")
            rate.pause()
    recent = [loss for loss in training.losses if isinstance(loss, torch.Tensor)]
    if recent:
        training.losses[-len(recent) :] = processes.mean(torch.stack(recent)).tolist()
    training.rate = float(rate)
    training.epoch += 1


@torch.no_grad()
def evaluate(args: argparse.Namespace, images: Images, training: Training, processes: Processes) -> None:
    """Compute the accuracy on the held-out images."""
    training.model.eval()
    right = total = 0.0
    for x, y in images.held_out(args.batch_size, processes, args.workers):
        found = training.model(x.to(processes.device)).argmax(1)
        right, total = right + (found == y.to(processes.device)).sum().item(), total + len(y)
    both = processes.mean(torch.tensor([right, total], device=processes.device))
    training.accuracy = (both[0] / both[1]).item()
    chance = 1 / len(images.classes)
    processes.print(f"  accuracy {training.accuracy:.1%} on held-out images (chance {chance:.1%})")


def main(words: Sequence[str] | None = None) -> list[Training]:
    """Train as the command line says; return what was trained, a level each."""
    args = read_options(words)
    args.size = args.size or (224 if args.data else 32)
    if args.loader == "dali":
        check_dali(args.data)
    if args.compare_levels and args.resume:
        raise SystemExit("--compare-levels trains every level from the start\n  fix:   leave --resume out")
    if args.keep_batchnorm_fp32 == "False" and (args.compare_levels or args.opt_level != "O3"):
        raise SystemExit(NORMS_ARE_FP32)
    if args.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    images, processes = load_images(args.data, args.size, args.seed), Processes.start()
    if args.loader == "dali":
        images = DaliImages(images.train, images.held, images.classes, args.data, args.size)
    trained = []
    for level in LEVELS if args.compare_levels else (args.opt_level,):
        training = start(args, processes, level, len(images.classes))
        while training.epoch < args.epochs and not args.evaluate:
            train_epoch(args, images, training, processes)
            if args.output_dir is not None and processes.rank == 0:
                training.save(args.output_dir / f"{args.arch}-{level}-{training.epoch}.pt")
            evaluate(args, images, training, processes)
        if args.evaluate:
            evaluate(args, images, training, processes)
        trained.append(training)
    if trained[0].losses:
        processes.print(table(trained, "images/s"))
    processes.end()
    return trained


if __name__ == "__main__":
    main()
