"""Batches by NVIDIA DALI, which decodes, crops and flips on the GPU: ``--loader dali``. DALI is optional."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from parts.images import MEAN, STD, Images
from parts.processes import Processes

MISSING = """--loader dali: NVIDIA DALI is not installed ({error})
  legal: --loader torch, which needs no package
  fix:   pip install nvidia-dali-cuda120, on Linux with an NVIDIA GPU"""


@dataclass(frozen=True)
class DaliImages(Images):
    """The same folder as ``Images`` has; DALI shuffles in an order of its own."""

    folder: str = ""
    size: int = 224

    def batches(
        self, batch: int, seed: int, epoch: int, processes: Processes, workers: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return this process's share of the batches of an epoch."""
        share = batch // processes.count
        steps = len(self.train) // batch
        found = _pipeline(Path(self.folder, "train"), self.size, share, seed + epoch, processes, max(workers, 1), True)
        for _, (batches,) in zip(range(steps), found, strict=False):
            yield batches["images"], batches["labels"].squeeze(-1).long()


def check_dali(folder: str | None) -> None:
    """End the script with a clear message where DALI cannot be used."""
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        raise SystemExit(MISSING.format(error=error)) from None
    if folder is None:
        raise SystemExit("--loader dali reads files, and the digits are none\n  fix:   name a folder of images")


def _pipeline(
    folder: Path, size: int, batch: int, seed: int, processes: Processes, workers: int, training: bool
) -> Any:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    on_gpu = processes.device.type == "cuda"
    where = "gpu" if on_gpu else "cpu"

    @pipeline_def(
        batch_size=batch, num_threads=workers, device_id=processes.device.index if on_gpu else None, seed=seed
    )
    def images() -> tuple[Any, Any]:
        shard = {"shard_id": processes.rank, "num_shards": processes.count, "random_shuffle": training}
        files, labels = fn.readers.file(file_root=str(folder), name="Reader", seed=seed, **shard)
        decoded = fn.decoders.image_random_crop(files, device="mixed" if on_gpu else "cpu", random_area=[0.25, 1.0])
        resized = fn.resize(decoded, device=where, resize_x=size, resize_y=size)
        normal = {"mean": [255 * m for m in MEAN], "std": [255 * s for s in STD], "mirror": fn.random.coin_flip()}
        return fn.crop_mirror_normalize(resized, dtype=types.FLOAT, output_layout="CHW", **normal), labels

    made = images()
    made.build()
    policy = LastBatchPolicy.DROP
    return DALIGenericIterator([made], ["images", "labels"], reader_name="Reader", last_batch_policy=policy)
