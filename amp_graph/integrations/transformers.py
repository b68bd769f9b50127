"""A callback for transformers' Trainer: ``Trainer(..., callbacks=[AmpGraphCallback("bf16")])``.

Before: ``TrainingArguments(bf16=True)``, the model's forward under ``torch.autocast``. After: neither, and
this callback, which converts the model while it trains.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from amp_graph.capture.conversion import conversion_of
from amp_graph.convert import convert, revert
from amp_graph.errors import AmpGraphWarning, CaptureError, PolicyError
from amp_graph.integrations import missing
from amp_graph.integrations.audits import Audits
from amp_graph.optim.master_weight_updates import keep_loaded_states
from amp_graph.optim.widened_parameters import trained_halves
from amp_graph.policy import Policy
from amp_graph.policy_words import HELD_LOW
from amp_graph.report.metrics import metrics

try:
    from transformers.trainer_callback import TrainerCallback
except ModuleNotFoundError as error:
    raise missing(error, "transformers", "amp_graph.integrations.transformers") from None


class AmpGraphCallback(TrainerCallback):
    """Converts the model when training begins, adds metrics to the log, and reverts the model when training ends.

    policy: as for ``amp_graph.convert``. scaler: for fp16; by default an ``amp_graph.GradScaler``. keep_converted: do
    not revert the model when training ends, for ``amp_graph.report(trainer.model)``.

    Raises PolicyError for a Trainer with ``bf16`` or ``fp16`` of its own and for fp16 without ``add_to``, CaptureError
    for O2 and O3 over several processes, all when training begins.

    ``TrainingArguments`` leaves ``bf16`` and ``fp16`` off: the Trainer's autocast would decide precision as well, and
    is refused. fp16 needs a scaler, which the Trainer must know before it trains: ``AmpGraphCallback("fp16").add_to(
    trainer)``. That puts the callback before those that report, too, so that TensorBoard and others get the metrics;
    of a callback that was given as ``callbacks=[...]`` they reach ``state.log_history`` and the callbacks after it.
    With ``widen=true``, ``add_to`` converts the model before the Trainer loads a checkpoint, whose fp32 values would
    be rounded to the dtypes that the model came in: a resumed run then equals the uninterrupted one.
    """

    def __init__(
        self,
        policy: Policy | str | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        keep_converted: bool = False,
    ) -> None:
        """Parse the policy; the model is converted when training begins."""
        self.policy, self.scaler, self.keep_converted = Policy.parse(policy), scaler, keep_converted
        self.model: Any = None  # while it is converted by this callback
        self._ready = False  # whether the Trainer has the scaler

    def add_to(self, trainer: Any) -> AmpGraphCallback:
        """Add this callback to ``trainer``, before all others, with a scaler if the policy needs one; return it."""
        from amp_graph.integrations.accelerate import give_scaler

        self._refuse_autocast(trainer.args)
        if self._needs_scaler(trainer.args.device.type):
            self.scaler = give_scaler(trainer.accelerator, self.scaler)
            self._ready = True
        trainer.callback_handler.callbacks.insert(0, self)
        if self.policy.widen:
            _before(trainer, "_load_from_checkpoint", lambda: self._convert(trainer.model, trainer.args))
            # Of an optimizer made in between.
            _before(trainer, "_load_optimizer_and_scheduler", keep_loaded_states)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Convert the model, unless it was converted before a checkpoint was loaded."""
        model = given["model"]
        if self.policy.widen and state.global_step and conversion_of(model) is None and trained_halves(model):
            warnings.warn(
                f"amp_graph: resumed at step {state.global_step}: the Trainer has rounded the checkpoint to the dtypes "
                f"that {type(model).__name__} came in, before widen=true took effect\n"
                f"  fix:   AmpGraphCallback('{self.policy}').add_to(trainer), in place of callbacks=[...]",
                AmpGraphWarning,
                stacklevel=2,
            )
        self._convert(model, args)

    def _convert(self, model: Any, args: Any) -> None:
        """Convert the model, unless it is; or say what keeps it from being converted."""
        self._refuse_autocast(args)
        if self._needs_scaler(args.device.type) and not self._ready:
            raise PolicyError(
                f"AmpGraphCallback: policy '{self.policy}' trains in fp16, and the Trainer has no scaler\n"
                "  legal: fp16 with add_to; bf16 anywhere\n"
                f"  fix:   AmpGraphCallback('{self.policy}').add_to(trainer), in place of callbacks=[...]"
            )
        if self.policy.level in HELD_LOW and args.world_size > 1:
            raise CaptureError(
                f"AmpGraphCallback: level {self.policy.level} lowers parameters, and DDP has built its buckets for "
                f"fp32 gradients\n  legal: levels O1 and O0 over several processes\n  fix:   AmpGraphCallback('"
                f"{self.policy.dtype}')"
            )
        if conversion_of(model) is None:
            self.model = convert(model, self.policy)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Revert the model, unless ``keep_converted``: what follows sees it as it was written."""
        if self.keep_converted:
            return
        if self.model is not None and conversion_of(self.model) is not None:
            revert(self.model)
        self.model = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """Add the metrics to a log entry of training; one copy from the device."""
        if self.model is None or not logs or not any(name in logs for name in ("loss", "train_loss")):
            return
        found = metrics(self.model, self.scaler)
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def _needs_scaler(self, kind: str) -> bool:
        return self.policy.level != "O0" and self.policy.torch_dtype(kind) is torch.float16

    def _refuse_autocast(self, args: Any) -> None:
        on = next((name for name in ("bf16", "fp16") if getattr(args, name, False)), None)
        if on is not None:
            raise PolicyError(
                f"AmpGraphCallback: TrainingArguments({on}=True) runs the model under torch.autocast, and policy "
                f"'{self.policy}' decides its precision\n  legal: one of them\n"
                f"  fix:   leave {on}=True out: AmpGraphCallback('{on}') does the same"
            )


class AmpGraphAudit(Audits, TrainerCallback):
    """Prints what precision a training really uses, and what is wrong with it, when it ends; it changes no bit.

    every: look at each step whose number it divides, beside the 2nd and the 3rd. page: a file for the report as an HTML
    page. ignore: codes of findings to leave out. ``report`` is the report of the last training. A training that raises
    has no end: ``callback.end()`` prints what was seen.

    Raises AmpGraphError for a negative number and an unknown code.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin to look."""
        self.begin(given["model"])


def _before(trainer: Any, name: str, first: Callable[[], None]) -> None:
    """Call ``first`` before the method ``name`` of ``trainer``, which transformers 5.0 - 5.23 have."""
    load = getattr(trainer, name)

    @functools.wraps(load)
    def loading(*args: Any, **given: Any) -> Any:
        first()
        return load(*args, **given)

    setattr(trainer, name, loading)
