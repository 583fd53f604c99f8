"""The audit: what each iteration replayed, and why; one small parquet file a step.

A step that replays writes `audit-ITERATION.parquet` under a temporary name and renames
it. A step that is repeated after a restore replaces its file, so no row comes twice.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from rllib_exgrpo.replay.drawing import Choice
from rllib_exgrpo.replay.folder import Folder, ReplayFileError
from rllib_exgrpo.replay.ids import encode_id

AUDIT_FOLDER = "replay_audit"
"""Name of the folder in the folder of a run."""

SCHEMA = pa.schema(
    {
        "iteration": pa.int32(),
        "prompt_id": pa.string(),  # JSON, see `ids`
        "bucket": pa.int16(),  # k of the prompt's latest group before this step
        "probability": pa.float32(),  # of a single draw, with all prompts in place
        "completion_id": pa.int64(),
        "candidates": pa.int32(),
        "rule": pa.dictionary(pa.int8(), pa.string()),  # `completion_selection`
        "score": pa.float32(),  # nats a token; NaN where the rule needs none
        "mean_score": pa.float32(),  # over the candidates
        "rank": pa.int32(),  # of the score, from 1, the lowest; 0 without scores
        "age": pa.int32(),  # versions of the weights
        "tokens": pa.int32(),
        "importance_ratio": pa.float32(),  # mean over the tokens
        "saturated": pa.float32(),  # share of the tokens
        "bucket_after": pa.int16(),  # k of the prompt's group in this step
    }
)
_NAME = re.compile(r"audit-(\d{8})\.parquet")


class ReplayedTokens(tuple[float, float, float]):
    """Sums over the tokens of a replayed completion: tokens, ratio, saturated."""


RowSums: TypeAlias = Mapping[int, Sequence[float]]
