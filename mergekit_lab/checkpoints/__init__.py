"""Named tensors on disk and in memory: read lazily, write atomically."""

from mergekit_lab.checkpoints.adapter_layout import conv1d_weights
from mergekit_lab.checkpoints.adapters import ADAPTER_FILES
from mergekit_lab.checkpoints.align import align, computed_buffers, untie
from mergekit_lab.checkpoints.card import Card, escape_markdown, fingerprint, versions
from mergekit_lab.checkpoints.casting import FLOATING, cast, check_range
from mergekit_lab.checkpoints.checkpoint import Checkpoint, TensorSpec, View
from mergekit_lab.checkpoints.generation import describe_tokenizer, follow_tokenizer
from mergekit_lab.checkpoints.hub import cached_folder, cached_snapshot, fetch_snapshot, hub_id, unreachable
from mergekit_lab.checkpoints.inspection import (
    Report,
    assumed_ties,
    describe_inputs,
    describe_model,
    describe_tensors,
    disagreements,
    size_text,
    written_specs,
)
from mergekit_lab.checkpoints.libraries import (
    LIBRARIES,
    OPEN_CLIP,
    TRANSFORMERS,
    Library,
    library_of,
    other_weights,
)
from mergekit_lab.checkpoints.low_rank import LowRank, LowRankRecord
from mergekit_lab.checkpoints.model_config import compare_configs
from mergekit_lab.checkpoints.model_files import (
    Files,
    copy_model_files,
    copy_tokenizer_files,
    parts_with_weights,
    plan_model_files,
    plan_tokenizer_files,
    sizes_of,
    write_files,
)
from mergekit_lab.checkpoints.plain_files import check_file, read_json
from mergekit_lab.checkpoints.publish import RECORD, check_out, new_folder
from mergekit_lab.checkpoints.quantized import refuse_quantized
from mergekit_lab.checkpoints.reader import find_source, open_checkpoint
from mergekit_lab.checkpoints.shards import MAX_SHARD_BYTES, ShardedWriter, plan_files, plan_shards
from mergekit_lab.checkpoints.tokens import read_tokens
from mergekit_lab.checkpoints.vocabulary import Reconciled, reconcile, vocabulary_rows
from mergekit_lab.checkpoints.writer import hash_file, write_tensors

__all__ = [
    "ADAPTER_FILES",
    "FLOATING",
    "LIBRARIES",
    "MAX_SHARD_BYTES",
    "OPEN_CLIP",
    "RECORD",
    "TRANSFORMERS",
    "Card",
    "Checkpoint",
    "Files",
    "Library",
    "LowRank",
    "LowRankRecord",
    "Reconciled",
    "Report",
    "ShardedWriter",
    "TensorSpec",
    "View",
    "align",
    "assumed_ties",
    "cached_folder",
    "cached_snapshot",
    "cast",
    "check_file",
    "check_out",
    "check_range",
    "compare_configs",
    "computed_buffers",
    "conv1d_weights",
    "copy_model_files",
    "copy_tokenizer_files",
    "describe_inputs",
    "describe_model",
    "describe_tensors",
    "describe_tokenizer",
    "disagreements",
    "escape_markdown",
    "fetch_snapshot",
    "find_source",
    "fingerprint",
    "follow_tokenizer",
    "hash_file",
    "hub_id",
    "library_of",
    "new_folder",
    "open_checkpoint",
    "other_weights",
    "parts_with_weights",
    "plan_files",
    "plan_model_files",
    "plan_shards",
    "plan_tokenizer_files",
    "read_json",
    "read_tokens",
    "reconcile",
    "refuse_quantized",
    "size_text",
    "sizes_of",
    "unreachable",
    "untie",
    "versions",
    "vocabulary_rows",
    "write_files",
    "write_tensors",
    "written_specs",
]
