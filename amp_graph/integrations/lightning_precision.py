"""What a precision plugin of Lightning does here, for both names of the package: lightning and pytorch_lightning.

Before: ``Trainer(precision="bf16-mixed")``, the training step under ``torch.autocast``. After:
``Trainer(plugins=AmpGraphPrecision("bf16"))``, the modules that it calls are converted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from amp_graph.capture.conversion import WRAPPERS, conversion_of, whole_of
from amp_graph.convert import convert, revert
from amp_graph.errors import CaptureError, PolicyError, ScaleError
from amp_graph.integrations import unscale_once
from amp_graph.optim.master_weight_updates import narrow_gradients, widen_gradients
from amp_graph.policy import Policy
from amp_graph.policy_words import HELD_LOW
from amp_graph.report.metrics import metrics
from amp_graph.scaling.grad_scaler import GradScaler


@contextmanager
def outermost_calls(heard: Callable[[Module], bool]) -> Iterator[None]:
    """Call ``heard`` with each module that the block calls, before its forward is looked up.

    ``heard`` returns whether the module is dealt with; if not, the modules that it calls are reported as well. Calls
    of other threads are not reported. Inside of a module that is dealt with, modules are called as without this block.
    """
    original = Module.__call__
    thread = threading.get_ident()

    def called(module: Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or not heard(module):
            return original(module, *args, **kwargs)
        Module.__call__ = original  # type: ignore[method-assign]
        try:
            return original(module, *args, **kwargs)
        finally:
            Module.__call__ = called  # type: ignore[method-assign]

    Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        Module.__call__ = original  # type: ignore[method-assign]


REDIRECTED = "_ForwardRedirection"  # Lightning's forward of a LightningModule while DDP calls it


class ConvertsModules:
    """The methods of ``AmpGraphPrecision``; a class of Lightning's ``Precision`` follows it in the bases.

    policy: as for ``amp_graph.convert``. scaler: for fp16; by default an ``amp_graph.GradScaler``; a
    ``torch.amp.GradScaler`` is legal as well. keep_converted: do not revert the modules when the trainer finishes.

    The modules with parameters that ``training_step`` calls itself are converted when it first calls them: the
    LightningModule for ``self(x)``, ``self.net`` for ``self.net(x)``. The trainer's other functions (``validate``,
    ``test``, ``predict``) convert what their steps call. The rest of a step runs as it is written, in fp32. When
    the trainer finishes, the modules are reverted: checkpoints, exports and pickles see the module as it was written.
    """

    _after_closure: Any  # Lightning's: the hooks before a step, and the clip
    main_params: Any

    def __init__(
        self,
        policy: Policy | str | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        keep_converted: bool = False,
    ) -> None:
        """Parse the policy; modules are converted by the trainer."""
        self.policy = Policy.parse(policy)
        self.scaler, self.keep_converted = scaler, keep_converted
        self.precision: Any = "16-mixed" if self.policy.dtype == "fp16" else "bf16-mixed"  # for loggers
        self.converted: dict[str, Module] = {}  # by the path in the LightningModule
        self._module: Any = None
        self._low, self._kind = torch.bfloat16, "cpu"
        self._grad_norm: Tensor | None = None

    # -- modules --------------------------------------------------------------------------------------

    def convert_module(self, module: Module) -> Module:
        """Learn the LightningModule and its device; nothing is converted before it is called."""
        self._module = module
        self._kind = self._module.trainer.strategy.root_device.type
        self._low = self.policy.torch_dtype(self._kind)
        needs_scaler = self._low is torch.float16 and self.policy.level != "O0"
        if self.scaler is not None and not needs_scaler:
            raise PolicyError(
                f"AmpGraphPrecision: scaler= with policy '{self.policy}', whose gradients need no scale\n"
                "  legal: a scaler with fp16\n  fix:   AmpGraphPrecision('bf16')"
            )
        if needs_scaler:
            self.precision, self.scaler = "16-mixed", self.scaler or GradScaler()
        return module

    def connect(self, model: Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, Any, Any]:
        """Refuse what would fail, or train wrongly, later."""
        if isinstance(model, WRAPPERS) and self.policy.level in HELD_LOW:
            raise CaptureError(
                f"AmpGraphPrecision: {type(model).__name__} has built its buckets for fp32 gradients; level "
                f"{self.policy.level} lowers parameters\n  legal: levels O1 and O0 over several processes\n"
                f"  fix:   amp_graph.convert(self.net, '{self.policy}') in configure_model(), and no plugin"
            )
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS) and (self.scaler is not None or self.policy.level in HELD_LOW):
                raise ScaleError(
                    f"AmpGraphPrecision: LBFGS calls its closure several times in a step, and policy '{self.policy}' "
                    "computes gradients once\n  legal: LBFGS at level O1 in bf16\n  fix:   AmpGraphPrecision('bf16')"
                )
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Revert what was converted here, unless ``keep_converted``."""
        for path, module in [*self.converted.items()]:
            if not self.keep_converted and conversion_of(module) is not None:
                revert(module)
            del self.converted[path]
        self._module = None

    def _heard(self, module: Module) -> bool:
        """Convert a module that a step calls; return whether what it calls is not to be converted."""
        if conversion_of(module) is not None and not isinstance(module, WRAPPERS):
            return True
        if isinstance(module, WRAPPERS) or REDIRECTED in getattr(module.__dict__.get("forward"), "__qualname__", ""):
            return False
        is_plain = isinstance(module, torch.jit.ScriptModule) or next(module.parameters(), None) is None
        if is_plain or whole_of(module) is not None:  # or a part of a converted model, called by itself
            return True
        if any(conversion_of(part) is not None for part in module.modules()):
            return False
        path = next((name for name, part in self._module.named_modules() if part is module), None)
        if path is not None:
            self.converted[path] = convert(module, self.policy)
        return True

    # -- steps ----------------------------------------------------------------------------------------

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Convert what a training step calls."""
        with outermost_calls(self._heard):
            yield

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        """Convert what the step calls, unless the training steps of ``fit`` say what is converted."""
        converts = self._module is not None and not self._module.trainer.state.fn == "fit"
        with outermost_calls(self._heard) if converts else nullcontext():
            yield

    test_step_context = predict_step_context = val_step_context

    # -- gradients ------------------------------------------------------------------------------------

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Scale the loss in fp16."""
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, model: Any = None, closure: Any = None, **kwargs: Any) -> Any:
        """Run the closure once, clip the unscaled fp32 gradients, and step unless one is infinite."""
        if self.scaler is None and self.policy.level not in HELD_LOW:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)  # type: ignore[misc]
        result = closure()
        if result is None and model.automatic_optimization:  # the step asked to be left out
            self._after_closure(model, optimizer)
            return result
        if self.scaler is None:
            widen_gradients(optimizer)
            self._after_closure(model, optimizer)
            optimizer.step(**kwargs)
            narrow_gradients(optimizer)
            return result
        unscale_once(self.scaler, optimizer)
        self._after_closure(model, optimizer)
        self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip the unscaled fp32 gradients; also where ``training_step`` of manual optimization calls it."""
        inner = getattr(optimizer, "optimizer", optimizer)  # a LightningOptimizer holds torch's
        if clip_val > 0:
            if self.scaler is not None:
                unscale_once(self.scaler, inner)
            elif self.policy.level in HELD_LOW:
                widen_gradients(inner)
        super().clip_gradients(inner, clip_val, gradient_clip_algorithm)  # type: ignore[misc]

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip by norm, and remember the norm for the log."""
        self._grad_norm = torch.nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val)

    # -- reading and saving ---------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return what ``amp_graph.metrics`` reads of the modules and the scaler; one copy from the device."""
        return metrics(*self.converted.values(), self.scaler, grad_norm=self._grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler, for the checkpoint."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scaler from a checkpoint of this plugin or of Lightning's own."""
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)


class LogsMetrics:
    """The methods of ``AmpGraphMetrics``: log the plugin's metrics, once per ``log_every_n_steps``, to all loggers."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log at the steps at which Lightning logs."""
        plugin = trainer.precision_plugin
        every, step = trainer.log_every_n_steps, trainer.global_step
        if isinstance(plugin, ConvertsModules) and trainer.loggers and every and step and step % every == 0:
            found = {f"amp_graph/{name}": value for name, value in plugin.metrics().items()}
            for logger in trainer.loggers:
                logger.log_metrics(found, step=step)
