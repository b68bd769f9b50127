"""Where Triton kernels are tested: in its interpreter, on a GPU, or nowhere, with the reason."""

import numpy as np
import pytest
import torch

from amp_graph.passes.native.triton_loader import _is_installed, interprets, why_failed, why_no_triton

DEVICE = "cpu" if interprets() else "cuda"


def why_not():
    if not _is_installed():
        return "triton is not installed: pip install --no-deps triton"
    if not interprets() and not torch.cuda.is_available():
        return "there is no GPU, and TRITON_INTERPRET=1 is not set: make test-triton"
    return why_no_triton()


def mark_where_they_run():
    """The mark of a module's tests."""
    return pytest.mark.skipif(bool(why_not()), reason=why_not())


def gave_up():
    """What the process no longer launches: a fallback would hide a kernel that does not work."""
    return why_failed()


def round_as_gpus_do(monkeypatch):
    """Let the interpreter round fp32 to the nearest bf16, half to even, as ``cvt.rn.bf16`` does: it cuts off the rest.

    Its other mode adds the first bit that is cut off to the significand, without a carry to the exponent.
    """
    if not interprets():
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data, source, to, mode):
        if (source.name, to.name) != ("fp32", "bf16"):
            return convert(data, source, to, mode)
        low = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
        return low.view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
