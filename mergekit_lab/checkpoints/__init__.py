"""Named tensors on disk and in memory: read lazily, write atomically."""

from mergekit_lab.checkpoints.adapters import find_adapter
from mergekit_lab.checkpoints.align import align
from mergekit_lab.checkpoints.card import escape_markdown, fingerprint, write_results
from mergekit_lab.checkpoints.checkpoint import Checkpoint, TensorSpec
from mergekit_lab.checkpoints.hub import (
    check_push,
    explain_unreachable,
    find_cached_snapshot,
    get_snapshot,
    parse_hub_id,
    push_folder,
)
from mergekit_lab.checkpoints.inspection import list_mismatches
from mergekit_lab.checkpoints.layers import count_layers, split_layer, stands_before_layers
from mergekit_lab.checkpoints.libraries import TRANSFORMERS
from mergekit_lab.checkpoints.low_rank import LowRank, LowRankRecord
from mergekit_lab.checkpoints.model_files import plan_model_files, plan_tokenizer_files, write_files
from mergekit_lab.checkpoints.publish import make_folder
from mergekit_lab.checkpoints.quantized import refuse_quantized
from mergekit_lab.checkpoints.reader import list_deciding_files, open_checkpoint
from mergekit_lab.checkpoints.shards import ShardedWriter, write_tensors
from mergekit_lab.digests import hash_file

__all__ = [
    "TRANSFORMERS",
    "Checkpoint",
    "LowRank",
    "LowRankRecord",
    "ShardedWriter",
    "TensorSpec",
    "align",
    "check_push",
    "count_layers",
    "escape_markdown",
    "explain_unreachable",
    "find_adapter",
    "find_cached_snapshot",
    "fingerprint",
    "get_snapshot",
    "hash_file",
    "list_deciding_files",
    "list_mismatches",
    "make_folder",
    "open_checkpoint",
    "parse_hub_id",
    "plan_model_files",
    "plan_tokenizer_files",
    "push_folder",
    "refuse_quantized",
    "split_layer",
    "stands_before_layers",
    "write_files",
    "write_results",
    "write_tensors",
]
