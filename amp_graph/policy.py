"""The conversion policy: a frozen value with a text form.

``"bf16"``, ``"fp16-O1,accuracy=fast"``, ``"bf16,keep_fp32=lm_head|.*norm,lists=my.toml"``.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from amp_graph.errors import PolicyError
from amp_graph.lists import OpClass, OpList, effective, merge
from amp_graph.lists.errors import shortened
from amp_graph.lists.path_pattern import LEGAL, PatternError, matches
from amp_graph.passes.calibration.calibration import Calibration
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.machine_rates import is_faster_in, machine_for
from amp_graph.passes.torch_compat.onednn import ONEDNN_RNN
from amp_graph.policy_words import (
    BOOLEAN_WORDS,
    DTYPES,
    LEVELS,
    PLANNERS,
    RECOMPUTED,
    REPLAY,
    UNPROFITABLE,
    accuracy_of,
    as_stored,
    check,
    check_path,
    field_of,
    passes_of,
    skip_words,
    unknown,
)

if TYPE_CHECKING:
    from amp_graph.passes.memory.gradient_buffers import GradientMemory
    from amp_graph.passes.precision.measure_sensitivity import Measured
    from amp_graph.passes.weights.frozen_weights import FrozenWeights


@dataclass(frozen=True)
class Policy:
    """How a model is converted; every field has a word in the text form.

    dtype: "bf16", "fp16", or "auto" (bf16 if the device computes in it, else fp16; fp32 for calls where that is not
    profitable).
    level: "O0" (as is), "O1" (fp32 parameters, casts by plan), "O2" (parameters held in low precision except those
    of norms, with fp32 master weights that optimizers update) or "O3" (all parameters in low precision, no masters).
    accuracy: "autocast" (mixed operands promote, as torch.autocast does), "fast" (low-precision streams), or a number
    above 0, an error budget: the fastest plan whose predicted error is at most that multiple of "autocast"'s error.
    lists: names of built-in lists or paths of TOML files; later ones override earlier ones.
    allow, deny, fp32_inside, follow, neutral, opaque: operations in that class; they override the lists.
    remove: operations whose list entries are ignored.
    keep_fp32: a regular expression; modules whose path matches wholly, and all inside them, stay fp32.
    keep_outputs: cast outputs back to their captured dtype (true), or leave them as computed.
    device: "cpu" or "cuda" to plan for; empty for the device of the model.
    skip: passes to leave out, by name (``attention``, ``fuse_gelu``, ...; or with dashes) or by
    group (``backend``: passes that only one device or compiler needs); ``amp-graph passes`` lists both.
    recompute: what backward recomputes instead of saving: "some" (what costs little time), "all" that a kernel can
    recompute, or "most" (all but what would slow small networks noticeably); empty: "most" with accuracy "fast", else
    "some". See docs/policy.md.
    planner: "mincut" (the least predicted time on this machine) or "paint" (by neighboring operations, as a baseline);
    empty: "mincut". Lists that reproduce torch.autocast always use "paint".
    skip_unprofitable: what stays in fp32 if low precision is predicted not to be faster: whole calls ("graphs"), single
    matmuls as well ("true"), or nothing ("false"); empty: "graphs" with dtype "auto", else "false".
    widen: hold trained parameters that come in half precision in fp32 while the model is converted; ``revert`` rounds
    them again. Frozen ones stay as they are.
    replay: whether forward and backward of calls that repeat are recorded as CUDA graphs and replayed: "true", "false",
    or "auto" (where Python, not the GPU, is the bottleneck); empty: "false". See docs/internals/replay.md.
    calibration: the path of a file of ``amp_graph.calibrate``; operations whose values or gradients the low precision
    cannot hold stay in fp32. See docs/numerics.md.
    keep_ops: operations that stay in fp32, by the keys that ``amp_graph.compare`` and ``amp_graph.bisect`` print:
    module path, operation and number, such as ``layers.3.fc:linear`` or ``layers.3:add.1``.
    emulate: "cuda": plan as for a CUDA device, and compute on the CPU what that would compute: sums in fp32, rounded
    where its kernels round. For trying, calibrating and debugging a policy without a GPU. See docs/numerics.md.

    Raises PolicyError for a value that means nothing, with the legal ones.
    """

    dtype: str = "auto"
    level: str = "O1"
    accuracy: str | float = "autocast"
    lists: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    fp32_inside: tuple[str, ...] = ()
    follow: tuple[str, ...] = ()
    neutral: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    keep_fp32: str = ""
    keep_outputs: bool = True
    device: str = ""
    skip: tuple[str, ...] = ()
    recompute: str = ""
    planner: str = ""
    skip_unprofitable: str = ""
    replay: str = ""
    widen: bool = False
    calibration: str = ""
    keep_ops: tuple[str, ...] = ()
    emulate: str = ""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, as_stored(field.name, field.default, getattr(self, field.name)))
        check("dtype", self.dtype, (*DTYPES, "auto"))
        check("level", self.level, LEVELS)
        object.__setattr__(self, "accuracy", accuracy_of(self.accuracy))
        check("device", self.device, ("", "cpu", "cuda"))
        object.__setattr__(self, "skip", skip_words(self.skip))
        check("recompute", self.recompute, ("", *RECOMPUTED))
        check("planner", self.planner, ("", *PLANNERS))
        self._word_booleans()
        check("skip_unprofitable", self.skip_unprofitable, ("", *UNPROFITABLE))
        check("replay", self.replay, ("", *REPLAY))
        check_path(self.calibration)
        self._check_emulate()
        if self.widen and self.level == "O0":
            raise PolicyError(
                "policy: widen=true with level O0, which leaves the model as it is\n  legal: levels O1, O2, O3\n"
                "  fix:   Policy.parse('bf16,widen=true')"
            )
        if self.planner == "paint" and self.budget is not None:
            raise PolicyError(
                f"policy: planner=paint with accuracy={self.accuracy:g}: this planner has no error budget\n"
                f"  legal: planner=mincut, the default\n  fix:   Policy(accuracy={self.accuracy:g})"
            )
        self.keeps_fp32("")

    def keeps_fp32(self, path: str) -> bool:
        """Say whether ``keep_fp32`` matches the path of a module. Raises PolicyError for one that takes too long."""
        try:
            return matches(self.keep_fp32, path)
        except PatternError as error:
            raise PolicyError(
                f"policy: keep_fp32={shortened(self.keep_fp32)} is not a regular expression to use: {error.what}\n"
                f"  legal: {LEGAL}\n"
                "  fix:   Policy.parse('bf16,keep_fp32=lm_head|.*norm')"
            ) from error

    def _word_booleans(self) -> None:
        for name in BOOLEAN_WORDS:
            if isinstance(getattr(self, name), bool):
                object.__setattr__(self, name, str(getattr(self, name)).lower())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, which may be of a version in which some words were booleans."""
        self.__dict__.update(state)
        self._word_booleans()

    @property
    def budget(self) -> float | None:
        """The error budget if ``accuracy`` is a number, else None."""
        return None if isinstance(self.accuracy, str) else self.accuracy

    @property
    def recomputes(self) -> str:
        """How much backward recomputes: ``recompute``, or its default."""
        return self.recompute or ("most" if self.accuracy == "fast" else "some")

    def runs_under_autocast(self, device: str) -> bool:
        """Say whether what has no plan runs under ``torch.autocast`` on ``device``: where that pays, by rates.

        In fp32 with rules that autocast does not know.
        """
        own = self.deny or self.opaque or self.calibration or self.keep_ops or self.emulate or self.keep_fp32
        if own or self.level == "O0" or any(name.endswith(".toml") for name in self.lists):
            return False
        planned_for = "cpu" if self._planned_for(device) == "cpu" else "cuda"
        dtype = str(self.torch_dtype(device)).removeprefix("torch.")
        return self.leaves == "false" or is_faster_in(machine_for(planned_for), dtype)

    @property
    def replays(self) -> str:
        """Whether calls are recorded: ``replay``, or its default; never at level O0, which captures nothing."""
        return "false" if self.level == "O0" else self.replay or "false"

    @property
    def plans_by(self) -> str:
        """The planner in force: ``planner``, or its default."""
        return self.planner or "mincut"

    @property
    def leaves(self) -> str:
        """What stays fp32 if low precision is not profitable: ``skip_unprofitable``, or its default."""
        return self.skip_unprofitable or ("graphs" if (self.dtype, self.level) == ("auto", "O1") else "false")

    @staticmethod
    def parse(text: str | Policy | None) -> Policy:
        """Parse a policy's text form. Raises PolicyError for an unknown word."""
        if isinstance(text, Policy):
            return text
        if text is None:
            return Policy()
        if not isinstance(text, str):
            raise PolicyError(
                f"policy: {shortened(text)} is a {type(text).__name__}\n  legal: a Policy or its text form\n"
                "  fix:   policy='bf16'"
            )
        words = [w.replace("\\,", ",").strip() for w in re.split(r"(?<!\\),", text)]
        defaults = {field.name: field.default for field in dataclasses.fields(Policy)}
        fields: dict[str, Any] = {}
        before = ""
        for word in filter(None, words):
            found = field_of(word, text, defaults, before)
            before = word if "=" in word else ""
            for name in found.keys() & fields.keys():
                raise PolicyError(
                    f"policy: {shortened(text)} sets {name} twice, {shortened(fields[name])} and "
                    f"{shortened(found[name])}\n  fix:   keep one of them"
                )
            fields.update(found)
        return Policy(**fields)

    def __str__(self) -> str:
        """Return the text form; ``Policy.parse(str(policy)) == policy``."""
        words = [f"{self.dtype}-{self.level}"]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                shown = (
                    "|".join(value)
                    if isinstance(value, tuple)
                    else str(value).lower()
                    if isinstance(value, bool)
                    else value
                )
                word = f"{field.name}={shown}".replace(",", "\\,")
                words.append(f"{word} " if word.endswith("\\") else word)  # it would hide the comma after it
        return ",".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values (lists for tuples)."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Policy:
        """Return the policy of a ``to_dict`` result. Raises PolicyError for an unknown field or a wrong type."""
        known = {f.name for f in dataclasses.fields(Policy)}
        if not isinstance(fields, Mapping):
            raise PolicyError(
                f"policy: {shortened(fields)} is a {type(fields).__name__}\n  legal: a dict of fields\n"
                "  fix:   Policy.from_dict({'dtype': 'bf16'})"
            )
        for name in fields:
            if name not in known:
                raise PolicyError(unknown("field", str(name), known))
        return Policy(**fields)

    def torch_dtype(self, device: str) -> torch.dtype:
        """Return the low precision for ``device`` ("cpu", "cuda")."""
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        if (
            device == "cuda"
            and torch.cuda.is_available()
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            return torch.float16
        return torch.bfloat16

    def measured_ranges(self) -> Calibration | None:
        """Return the calibration that the policy names; None without one. Raises CalibrationError for a bad file."""
        if not self.calibration:
            return None
        try:
            changed = os.stat(self.calibration).st_mtime_ns
        except (OSError, ValueError):
            changed = 0
        return _calibration(self.calibration, changed)

    def op_list(self, device: str) -> OpList:
        """Return the lists in force for ``device``. Raises ListError, and PolicyError if they contradict the policy."""
        where = self._planned_for(device)
        dtype = str(self.torch_dtype(device)).removeprefix("torch.")
        classes = {
            c: getattr(self, c) for c in ("allow", "deny", "fp32_inside", "follow", "neutral", "opaque", "remove")
        }
        where = where if where in ("cpu", "cuda") else "cuda"
        self.measured_ranges()  # a bad file raises here, not at the first capture
        found = effective(self.lists, dtype=dtype, device=where, accuracy=self.accuracy, **classes)
        if self.emulate:
            found = _with_cpu_names(found)
        if self.skip_unprofitable in ("true", "graphs"):
            self._check_skips(found)
        if self.budget is not None and found.unlisted != "opaque":
            raise PolicyError(
                f"policy: accuracy={self.budget:g} with lists that reproduce torch.autocast, without a budget\n"
                "  legal: an error budget with the default lists or others over them\n"
                f"  fix:   Policy.parse('{self.dtype},accuracy={self.budget:g}')"
            )
        return found

    def pipeline_options(
        self,
        device: str,
        *,
        eager: bool = False,
        inductor: Mapping[str, Any] | None = None,
        in_step: bool = False,
        portable: bool = False,
        measured: tuple[Measured, ...] = (),
        frozen: FrozenWeights | None = None,
        gradients: GradientMemory | None = None,
        user: object = None,
    ) -> PipelineOptions:
        """Return the options that select passes for a graph on ``device``, with gradients if they are enabled now."""
        skip = passes_of(self.skip)
        lists = self.op_list(device)
        if ("gru-state" in skip or portable) and lists.rules.get("aten.gru.input"):  # torch's kernel rounds the state
            lists = merge(lists, remove=("aten.gru.input",))
        return PipelineOptions(
            lists=lists,
            dtype=self.torch_dtype(device),
            device=device,
            planned_for=self._planned_for(device),
            emulates=bool(self.emulate),
            accuracy=self.accuracy,
            keep_fp32=self.keep_fp32,
            keep_outputs=self.keep_outputs,
            planner=self.plans_by,
            leaves=self.leaves,
            recompute=self.recomputes,
            skip=skip,
            eager=eager,
            inductor=inductor,
            in_step=in_step,
            training=torch.is_grad_enabled(),
            portable=portable,
            measured=measured,
            calibration=self.measured_ranges(),
            keep_ops=self.keep_ops,
            frozen=frozen,
            gradients=gradients,
            user=user,
        )

    def _planned_for(self, device: str) -> str:
        """Return the device to plan for. Raises PolicyError for an emulation anywhere but on the CPU."""
        if self.emulate and device not in ("cpu", "meta"):
            raise PolicyError(
                f"policy: emulate={self.emulate} for a model on a {device} device, which needs no emulation\n"
                "  legal: emulate=cuda for a model on the CPU\n"
                f"  fix:   policy='{replace(self, emulate='')}', or model.cpu()"
            )
        return self.device or self.emulate or device

    def _check_emulate(self) -> None:
        check("emulate", self.emulate, ("", "cuda"))
        if self.emulate and self.device not in ("", self.emulate):
            raise PolicyError(
                f"policy: emulate={self.emulate} with device={self.device}, a plan for another device\n"
                "  legal: emulate=cuda without device=\n"
                "  fix:   policy='fp16,emulate=cuda'"
            )

    def _check_skips(self, lists: OpList) -> None:
        """Refuse ``skip_unprofitable`` with a planner that predicts no times."""
        painted = self.plans_by != "mincut" and self.skip_unprofitable == "true"
        if lists.unlisted == "opaque" and not painted:
            return
        why = "which predicts no times" if painted else "and lists that reproduce torch.autocast"
        raise PolicyError(
            f"policy: skip_unprofitable={self.skip_unprofitable} with planner={self.plans_by}, {why}\n"
            "  legal: planner=mincut, with the default lists or others over them\n"
            "  fix:   Policy.parse('bf16,skip_unprofitable=true')"
        )


@functools.lru_cache(maxsize=8)
def _calibration(path: str, changed: int) -> Calibration:
    """Read a calibration once for each time that it is written."""
    return Calibration.load(path)


def _with_cpu_names(lists: OpList) -> OpList:
    """Return CUDA's lists with the name that an LSTM has in a graph that was captured on the CPU."""
    rules = lists.rules.get("aten.lstm", ())
    return merge(lists, allow=(ONEDNN_RNN,)) if any(rule.cls is OpClass.ALLOW for rule in rules) else lists
