"""Third-party models with random weights, one part of which leaves fp16's range, as tasks like the demo's.

``t5``: the last feed-forward layer of T5 writes some 1e6 into the residual stream, as large T5 models do in places.
``resnet``: the first convolution of a ResNet writes some 1e6 into its batch norm, whose result does not depend on it.
Both train in fp32 and in bf16. In fp16 every loss is NaN unless that part stays in fp32.
"""

from collections.abc import Callable

import root_on_path  # noqa: F401 examples.demo
import torch
from torch import Tensor, nn

from examples.demo.data import SYMBOLS, Digits, SourceText
from examples.demo.tasks import Phase, Task

LARGE = 3e5
GIVEN = 8  # characters that T5's encoder reads
PHASES = {"t5": (Phase("bf16", 150, 8, 50),), "resnet": (Phase("bf16", 150, 32, 40),)}


def t5() -> nn.Module:
    """Return transformers' T5, which writes large values in the last feed-forward layer of its decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128, "num_layers": 1, "num_decoder_layers": 1}
    config = T5Config(
        vocab_size=len(SYMBOLS), **sizes, dropout_rate=0.0, decoder_start_token_id=0, feed_forward_proj="gated-gelu",
        use_cache=False,
    )  # fmt: skip
    made = T5ForConditionalGeneration(config)
    with torch.no_grad():
        made.decoder.block[-1].layer[-1].DenseReluDense.wo.weight.mul_(LARGE)
    return made


def resnet() -> nn.Module:
    """Return transformers' ResNet, which writes large values in its first convolution."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=1, num_labels=10, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"
    )
    made = ResNetForImageClassification(config)
    with torch.no_grad():
        made.resnet.embedder.embedder.convolution.weight.mul_(LARGE)
    return made


def given_to(name: str) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return the function that makes the arguments of a model of a task's inputs."""
    if name == "t5":
        return lambda inputs: {"input_ids": inputs[:, :GIVEN].contiguous(), "decoder_input_ids": inputs}
    return lambda inputs: {"pixel_values": inputs}


def out_of_range(name: str) -> Task:
    """Return the task of that name: characters of source text for ``t5``, digits for ``resnet``."""
    given = given_to(name)
    logits = lambda model, inputs: model(**given(inputs)).logits  # noqa: E731
    if name == "t5":
        data: Digits | SourceText = SourceText.load(32, 200_000)
        return Task("t5", "T5 on Python's source text", t5, data, logits, 3e-3, PHASES[name])
    return Task("resnet", "ResNet of transformers on digits", resnet, Digits.load(), logits, 1e-3, PHASES[name])
