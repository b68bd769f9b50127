"""The conversion policy: a frozen value with a text form.

``"bf16"``, ``"fp16-O1,accuracy=fast"``, ``"bf16,keep_fp32=lm_head|.*norm,lists=my.toml"``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from amp_graph.errors import PolicyError
from amp_graph.lists import OpClass, OpList, effective, merge
from amp_graph.lists.errors import shortened
from amp_graph.lists.path_pattern import LEGAL, PatternError, matches
from amp_graph.passes.calibration.calibration import Calibration
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.machine_rates import is_faster_in, machine_for
from amp_graph.passes.torch_compat.devices import ONEDNN_RNN
from amp_graph.policy_words import (
    DTYPES,
    LEVELS,
    accuracy_of,
    field_of,
    passes_of,
    path_of,
    skip_words,
    stored,
    unknown,
    word,
)

OPERATIONS = "operations"


@dataclass(frozen=True)
class Policy:
    """How a model is converted; every field is a word of the text form, and says what it is for.

    Raises PolicyError for a value that means nothing, with the legal ones.
    """

    dtype: str = word(
        "auto",
        "the low precision; `auto` (default) is bf16, or fp16 on a CUDA device without bf16, and fp32 for calls where "
        "that is [not profitable](#profitability)",
        *DTYPES,
        "auto",
    )
    level: str = word("O1", "how parameters are stored, see [levels](#levels); the default is `O1`", *LEVELS)
    accuracy: str | float = word(
        "autocast",
        "what runs in low precision when low and full precision meet; see [accuracy](#accuracy)",
        takes="`autocast`, `fast`, a number",
        read=accuracy_of,
    )
    lists: tuple[str, ...] = word(
        (),
        "these lists instead of the default one; a later list wins ([lists.md](lists.md))",
        takes="names, `.toml` paths",
    )
    allow: tuple[str, ...] = word((), "run in low precision, whatever the lists say: `allow=aten.mm`", takes=OPERATIONS)
    deny: tuple[str, ...] = word((), "stay in fp32, whatever the lists say: `deny=gelu|aten.tanh`", takes=OPERATIONS)
    fp32_inside: tuple[str, ...] = word(
        (), "take and return low precision, and compute in fp32 inside, whatever the lists say", takes=OPERATIONS
    )
    follow: tuple[str, ...] = word(
        (), "run in the precision of their operands, by the accuracy, whatever the lists say", takes=OPERATIONS
    )
    neutral: tuple[str, ...] = word((), "only move values, in any precision, whatever the lists say", takes=OPERATIONS)
    opaque: tuple[str, ...] = word((), "run as they were captured, whatever the lists say", takes=OPERATIONS)
    remove: tuple[str, ...] = word((), "taken out of the lists, so they run as captured", takes=OPERATIONS)
    keep_fp32: str = word(
        "", "modules whose whole path matches, and everything inside them, stay in fp32", takes="a regular expression"
    )
    keep_outputs: bool = word(True, "whether outputs get their captured dtype back (default) or stay as computed")
    device: str = word("", "plans for this device; the default is the model's device", "cpu", "cuda")
    skip: tuple[str, ...] = word(
        (),
        "leaves out these passes, to compare or to work around one: `skip=attention|channels_last`. `skip=backend` "
        "leaves out everything that only one device or compiler needs. [passes.md](internals/passes.md) has the legal "
        "words",
        takes="passes",
        read=skip_words,
    )
    recompute: str = word(
        "some", "what backward recomputes instead of saving it, see [recomputation](#recomputation)", "some", "all"
    )
    planner: str = word("mincut", "how precisions are chosen, see [planner](#planner)", "mincut", "paint")
    skip_unprofitable: str = word(
        "",
        "what stays in fp32 if low precision is not profitable: whole graphs, single matmuls, or nothing, see "
        "[profitability](#profitability). The default is `graphs` if the dtype is `auto`, else `false`",
        "graphs",
        "true",
        "false",
    )
    replay: bool = word(
        False,
        "whether forward and backward of calls that repeat are recorded as CUDA graphs and replayed "
        "([details](internals/replay.md))",
    )
    widen: bool = word(
        False,
        "whether trained parameters that come in half precision are held in fp32 while the model is converted; "
        "`revert` rounds them to their dtype again. Without it (default), O1 refuses a model that trains such "
        "parameters; frozen ones are legal and stay as they are",
    )
    calibration: str = word(
        "",
        "a file of `amp_graph.calibrate`: operations whose values or gradients the low precision cannot hold stay in "
        "fp32 ([numerics.md](numerics.md#calibration))",
        takes="a path",
        read=path_of,
    )
    keep_ops: tuple[str, ...] = word(
        (),
        "these operations stay in fp32, by module path, name and number, as `amp_graph.compare` and "
        "`amp_graph.bisect` print them: `keep_ops=layers.3.fc:linear|layers.3:add.1`",
        takes=OPERATIONS,
    )
    emulate: str = word(
        "",
        "plans as for a CUDA device, and computes on the CPU what that would compute: sums in fp32, rounded where its "
        "kernels round ([numerics.md](numerics.md#fp16-without-a-gpu))",
        "cuda",
    )
    measured_on: str = word(
        "",
        "where `amp_graph.search` measured the policy: on another machine, `convert` warns that its time, memory and "
        "error were not measured there",
        takes="a name",
    )

    def __post_init__(self) -> None:
        """Refuse values that mean nothing, alone or together."""
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, stored(field, getattr(self, field.name)))
        if self.emulate and self.device not in ("", self.emulate):
            raise PolicyError(
                f"policy: emulate={self.emulate} with device={self.device}, a plan for another device\n"
                "  legal: emulate=cuda without device=\n"
                "  fix:   policy='fp16,emulate=cuda'"
            )
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

    @property
    def budget(self) -> float | None:
        """The error budget if ``accuracy`` is a number, else None."""
        return None if isinstance(self.accuracy, str) else self.accuracy

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
    def replays(self) -> bool:
        """Whether calls are recorded: ``replay``; never at level O0, which captures nothing."""
        return self.replay and self.level != "O0"

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
        for one in filter(None, words):
            found = field_of(one, text, defaults)
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
        return Calibration.load(self.calibration) if self.calibration else None

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

    def pipeline_options(self, device: str, **mode: Any) -> PipelineOptions:
        """Return the options of the passes for a graph on ``device``, with gradients if they are enabled now.

        ``mode``: further fields of ``PipelineOptions``, which no policy decides.
        """
        skip = passes_of(self.skip)
        lists = self.op_list(device)
        rounds_state = "gru-state" in skip or mode.get("portable")  # as torch's kernel does
        if rounds_state and lists.rules.get("aten.gru.input"):
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
            planner=self.planner,
            leaves=self.leaves,
            recompute=self.recompute,
            skip=skip,
            training=torch.is_grad_enabled(),
            calibration=self.measured_ranges(),
            keep_ops=self.keep_ops,
            **mode,
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

    def _check_skips(self, lists: OpList) -> None:
        """Refuse ``skip_unprofitable`` with a planner that predicts no times."""
        painted = self.planner != "mincut" and self.skip_unprofitable == "true"
        if lists.unlisted == "opaque" and not painted:
            return
        why = "which predicts no times" if painted else "and lists that reproduce torch.autocast"
        raise PolicyError(
            f"policy: skip_unprofitable={self.skip_unprofitable} with planner={self.planner}, {why}\n"
            "  legal: planner=mincut, with the default lists or others over them\n"
            "  fix:   Policy.parse('bf16,skip_unprofitable=true')"
        )


def _with_cpu_names(lists: OpList) -> OpList:
    """Return CUDA's lists with the name that an LSTM has in a graph that was captured on the CPU."""
    rules = lists.rules.get("aten.lstm", ())
    return merge(lists, allow=(ONEDNN_RNN,)) if any(rule.cls is OpClass.ALLOW for rule in rules) else lists
