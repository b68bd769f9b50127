"""What somebody may have of a tensor's memory without having a tensor: for tests of memory that is used again."""

import torch

SEEN = {
    "a storage": lambda t: t.untyped_storage(),
    "a typed storage": lambda t: t._typed_storage(),
    "a part of a storage": lambda t: t.untyped_storage()[:64],
    "an array": lambda t: t.numpy(),
    "a part of an array": lambda t: t.numpy()[1:],
    "a view of bytes": lambda t: memoryview(t.numpy()),
    "a capsule": torch.utils.dlpack.to_dlpack,
}
