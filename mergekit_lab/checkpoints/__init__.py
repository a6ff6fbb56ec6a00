"""Named tensors on disk and in memory: read lazily, write atomically."""

from mergekit_lab.checkpoints.adapter_layout import find_conv1d_weights
from mergekit_lab.checkpoints.adapter_writing import LowRankChange, write_adapter
from mergekit_lab.checkpoints.adapters import find_adapter
from mergekit_lab.checkpoints.align import align, list_computed_buffers, untie
from mergekit_lab.checkpoints.card import Card, escape_markdown, fingerprint, read_versions, write_results
from mergekit_lab.checkpoints.casting import FLOATING, cast, check_range
from mergekit_lab.checkpoints.checkpoint import Checkpoint, TensorSpec
from mergekit_lab.checkpoints.generation import describe_tokenizer, follow_tokenizer
from mergekit_lab.checkpoints.hub import (
    check_push,
    explain_unreachable,
    find_cached_folder,
    find_cached_snapshot,
    get_snapshot,
    parse_hub_id,
    push_folder,
)
from mergekit_lab.checkpoints.inspection import (
    Report,
    assume_ties,
    describe_inputs,
    describe_model,
    describe_tensors,
    list_mismatches,
    plan_specs,
)
from mergekit_lab.checkpoints.layers import (
    LayerRange,
    arrange_layers,
    count_layers,
    split_layer,
    stands_before_layers,
)
from mergekit_lab.checkpoints.libraries import (
    LIBRARIES,
    OPEN_CLIP,
    TRANSFORMERS,
    Library,
    find_library,
    find_other_weights,
)
from mergekit_lab.checkpoints.low_rank import LowRank, LowRankRecord
from mergekit_lab.checkpoints.model_config import compare_configs
from mergekit_lab.checkpoints.model_files import (
    find_parts_with_weights,
    measure_files,
    plan_model_files,
    plan_tokenizer_files,
    write_files,
)
from mergekit_lab.checkpoints.plain_files import read_json
from mergekit_lab.checkpoints.publish import RECORD, check_out, make_folder
from mergekit_lab.checkpoints.quantized import refuse_quantized
from mergekit_lab.checkpoints.reader import find_source, list_deciding_files, open_checkpoint
from mergekit_lab.checkpoints.shards import MAX_SHARD_BYTES, ShardedWriter, plan_files, plan_shards
from mergekit_lab.checkpoints.tokens import read_tokens
from mergekit_lab.checkpoints.vocabulary import count_vocabulary_rows, reconcile
from mergekit_lab.checkpoints.vocabulary_rows import Reconciled, TokenPlan, TokenSource
from mergekit_lab.checkpoints.writer import hash_file, hash_folder, write_tensors

__all__ = [
    "FLOATING",
    "LIBRARIES",
    "MAX_SHARD_BYTES",
    "OPEN_CLIP",
    "RECORD",
    "TRANSFORMERS",
    "Card",
    "Checkpoint",
    "LayerRange",
    "Library",
    "LowRank",
    "LowRankChange",
    "LowRankRecord",
    "Reconciled",
    "Report",
    "ShardedWriter",
    "TensorSpec",
    "TokenPlan",
    "TokenSource",
    "align",
    "arrange_layers",
    "assume_ties",
    "cast",
    "check_out",
    "check_push",
    "check_range",
    "compare_configs",
    "count_layers",
    "count_vocabulary_rows",
    "describe_inputs",
    "describe_model",
    "describe_tensors",
    "describe_tokenizer",
    "escape_markdown",
    "explain_unreachable",
    "find_adapter",
    "find_cached_folder",
    "find_cached_snapshot",
    "find_conv1d_weights",
    "find_library",
    "find_other_weights",
    "find_parts_with_weights",
    "find_source",
    "fingerprint",
    "follow_tokenizer",
    "get_snapshot",
    "hash_file",
    "hash_folder",
    "list_computed_buffers",
    "list_deciding_files",
    "list_mismatches",
    "make_folder",
    "measure_files",
    "open_checkpoint",
    "parse_hub_id",
    "plan_files",
    "plan_model_files",
    "plan_shards",
    "plan_specs",
    "plan_tokenizer_files",
    "push_folder",
    "read_json",
    "read_tokens",
    "read_versions",
    "reconcile",
    "refuse_quantized",
    "split_layer",
    "stands_before_layers",
    "untie",
    "write_adapter",
    "write_files",
    "write_results",
    "write_tensors",
]
