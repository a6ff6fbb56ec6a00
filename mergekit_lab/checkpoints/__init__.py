"""Named tensors on disk and in memory: read lazily, write atomically."""

from mergekit_lab.checkpoints.reader import Checkpoint, TensorSpec, open_checkpoint
from mergekit_lab.checkpoints.writer import sha256_of, write_tensors

__all__ = ["Checkpoint", "TensorSpec", "open_checkpoint", "sha256_of", "write_tensors"]
