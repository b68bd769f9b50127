"""Draw the pictures of docs/quick-start.md and docs/policy.md, from what torch and amp_graph say of themselves.

python docs/images/draw_concepts.py    # writes formats.svg, levels.svg, loss-scale.svg and stages.svg beside this file
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
FULL, LOW, STEP, GREY = "#ffd8b0", "#c9ebd3", "#e3d0ff", "#d9e2ec"  # the colours of block.svg
BITS = {"sign": GREY, "exponent": FULL, "mantissa": LOW}
LOW_LEVELS = ("O2", "O3")
STAGES = (
    ("your module", "", GREY),
    ("capture", "one FX graph|at the first call", GREY),
    ("plan", "a precision and|a reason for each|operation", STEP),
    ("cast", "at most one cast|per value|and dtype", STEP),
    ("optimize", "kernels of the|device; fused|operations", STEP),
    ("run", "eager, Inductor,|or TrainStep", LOW),
)


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    """Return words at a place."""
    shown = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">{shown}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """Return a rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="#445"/>'


def page(width: int, height: int, parts: Iterator[str]) -> str:
    """Return a picture on white, so that it is readable in dark themes too."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    head += 'font-family="Helvetica,Arial,sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"


def formats() -> str:
    """Return the bits and the range of the three formats."""

    def parts() -> Iterator[str]:
        import torch

        for x, (name, fill) in zip((70, 160, 270), BITS.items(), strict=True):
            yield from (box(x, 12, 14, 14, fill), text(x + 20, 24, name))
        for row, (name, dtype) in enumerate({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.items()):
            found = torch.finfo(getattr(torch, dtype))
            mantissa = round(-torch.tensor(found.eps).log2().item())
            y, x = 44 + 62 * row, 70
            yield text(14, y + 17, name, 15, weight="bold")
            for kind, bits in zip(BITS, (1, found.bits - 1 - mantissa, mantissa), strict=True):
                yield box(x, y, 17 * bits, 24, BITS[kind])
                yield text(x + 8.5 * bits, y + 17, str(bits), 12, "middle")
                x += 17 * bits
            told = f"largest {found.max:.3g}, smallest {found.smallest_normal:.2g} at full precision"
            yield text(70, y + 42, f"{told}; relative step {found.eps:.2g}", 12)

    return page(640, 230, parts())


def stages() -> str:
    """Return the way from a module to what runs."""

    def parts() -> Iterator[str]:
        yield '<marker id="tip" orient="auto" markerWidth="8" markerHeight="8" refX="7" refY="4">'
        yield '<path d="M0,0 L8,4 L0,8 z" fill="#445"/></marker>'
        for column, (name, told, fill) in enumerate(STAGES):
            x = 12 + 138 * column
            yield box(x, 20, 112, 34, fill)
            yield text(x + 56, 42, name, 14, "middle", "bold")
            yield from (text(x + 56, 74 + 16 * row, words, 12, "middle") for row, words in enumerate(told.split("|")))
            if column:
                yield f'<path d="M{x - 26},37 L{x - 2},37" stroke="#445" marker-end="url(#tip)"/>'

    return page(830, 120, parts())


def bytes_of(level: str) -> dict[str, int]:
    """Return the bytes that one parameter takes at ``level`` with AdamW, as a report counts them."""
    import torch

    import amp_graph

    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    amp_graph.convert(model, f"bf16-{level}")
    model(torch.zeros(8, 64)).sum().backward()
    optimizer.step()
    found = amp_graph.report(model, optimizer).memory
    return {kind: count // 4096 for kind, count in found.items() if kind != "weight copies"}


def levels() -> str:
    """Return the bytes of a parameter, its gradient, master and state at each level."""

    def parts() -> Iterator[str]:
        for row, level in enumerate(("O0", "O1", "O2", "O3")):
            y, x = 16 + 50 * row, 60.0
            found = bytes_of(level)
            yield text(14, y + 22, level, 15, weight="bold")
            for kind, count in found.items():
                low = level in LOW_LEVELS and (kind in ("parameters", "gradients") or level == "O3")
                yield box(x, y, 38 * count, 34, LOW if low else FULL)
                yield text(x + 19 * count, y + 21, f"{kind.removesuffix('s')} {count}", 11, "middle")
                x += 38 * count
            yield text(x + 8, y + 22, f"{sum(found.values())} bytes", 12)
        yield from (
            box(60, 222, 14, 14, FULL),
            text(80, 234, "fp32"),
            box(140, 222, 14, 14, LOW),
            text(160, 234, "bf16"),
        )

    return page(750, 250, parts())


def loss_scale() -> str:
    """Return the course of a dynamic loss scale whose gradients overflow above a limit, which falls at step 40."""
    import torch

    import amp_graph

    scale = amp_graph.LossScale(init_scale=2.0**12, growth_interval=8).to(torch.device("cpu"))
    seen, bad = [], []
    for step in range(60):
        now = scale.scale.item()
        overflows = now > (2.0**14 if step < 40 else 2.0**11)
        seen.append(now)
        bad += [step] if overflows else []
        scale.update(torch.tensor(float(overflows)))

    def parts() -> Iterator[str]:
        def at(step: float, value: float) -> tuple[float, float]:
            return 60 + 10 * step, 190 - 30 * (torch.tensor(value).log2().item() - 10)

        for power in range(10, 16):
            x, y = at(0, 2.0**power)
            yield f'<path d="M{x},{y:g} H660" stroke="#ddd"/>'
            yield text(x - 8, y + 4, f"{2**power:,}", 11, "end")
        points = [at(step + edge, value) for step, value in enumerate(seen) for edge in (0, 1)]
        shown = " ".join(f"{x:g},{y:g}" for x, y in points)
        yield f'<polyline points="{shown}" fill="none" stroke="#2a6f6a" stroke-width="2"/>'
        for step in bad:
            x, y = at(step + 0.5, seen[step])
            yield f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="#c0392b"/>'
        yield text(60, 222, "step 0", 11)
        yield text(660, 222, "step 60", 11, "end")
        yield from (
            '<circle cx="250" cy="218" r="4" fill="#c0392b"/>',
            text(262, 222, "infinite gradient: the step is skipped"),
        )

    return page(690, 236, parts())


PICTURES: dict[str, Callable[[], str]] = {
    "formats": formats,
    "levels": levels,
    "loss-scale": loss_scale,
    "stages": stages,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
