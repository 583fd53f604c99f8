"""The audit: what each iteration replayed, and why; one small parquet file a step.

A step that replays writes `audit-ITERATION.parquet` under a temporary name and renames
it. A step that is repeated after a restore replaces its file, so no row comes twice.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rllib_exgrpo.records import PromptId
from rllib_exgrpo.replay.drawing import Choice
from rllib_exgrpo.replay.folder import Folder, ReplayFileError
from rllib_exgrpo.replay.ids import encode_id

AUDIT_FOLDER = "replay_audit"
"""Name of the folder inside that of a run."""

SCHEMA = pa.schema(
    {
        "iteration": pa.int32(),
        "prompt_id": pa.string(),  # JSON, see `ids`
        "bucket": pa.int16(),  # k of the latest group before this step
        "probability": pa.float32(),  # of a single draw, with all prompts in place
        "completion_id": pa.int64(),
        "candidates": pa.int32(),
        "rule": pa.string(),  # `completion_selection`
        "score": pa.float32(),  # nats a token; NaN where the rule needs none
        "mean_score": pa.float32(),  # over the candidates
        "rank": pa.int32(),  # of the score, from 1, the lowest; 0 without scores
        "age": pa.int32(),  # versions of the weights
        "tokens": pa.int32(),  # trained on; 0 if the update left the completion out
        "importance_ratio": pa.float32(),  # mean over the tokens; NaN without any
        "saturated": pa.float32(),  # share of the tokens; NaN without any
        "correct": pa.int16(),  # k of this step's group, the replayed one included
    }
)
_FROM_CHOICE = {
    "bucket": "bucket",
    "probability": "probability",
    "completion_id": "completion_id",
    "candidates": "num_candidates",
    "score": "score",
    "mean_score": "mean_score",
    "rank": "rank",
    "age": "age",
}
_NAME = re.compile(r"audit-(\d{8})\.parquet")


def audit_table(
    iteration: int,
    rule: str,
    choices: Sequence[Choice],
    sums: Mapping[PromptId, NDArray[np.float64]],
    correct: Mapping[PromptId, int],
) -> pa.Table:
    """Returns the rows of one step.

    Args:
        iteration: of the step.
        rule: the `completion_selection`.
        choices: what was replayed.
        sums: prompt id -> (3,) counted tokens of the replayed completion, sum of their
            importance ratios, how many are saturated. Completions that the update left
            out, as the advantages of their groups are 0, are missing.
        correct: prompt id -> k of the step's group.
    """
    sums_C3 = np.array([sums.get(c.prompt_id, np.zeros(3)) for c in choices])
    tokens = sums_C3[:, 0]
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN, as it should be
        importance_ratio, saturated = (sums_C3[:, 1:] / tokens[:, None]).T
    columns = {
        "iteration": [iteration] * len(choices),
        "prompt_id": [encode_id(c.prompt_id) for c in choices],
        "rule": [rule] * len(choices),
        "tokens": tokens.astype(np.int32),
        "importance_ratio": importance_ratio,
        "saturated": saturated,
        "correct": [correct[c.prompt_id] for c in choices],
    }
    for name, attribute in _FROM_CHOICE.items():
        columns[name] = [getattr(choice, attribute) for choice in choices]
    arrays = [pa.array(columns[field.name], field.type) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


class Audit:
    """The audit files of a run.

    Args:
        folder: that holds them; created by the first `write`.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def write(self, table: pa.Table) -> None:
        """Writes the rows of a step in place of what the step wrote before."""
        iteration = table["iteration"][0].as_py()
        self._folder.filesystem.create_dir(self._folder.path, recursive=True)
        self._folder.write(
            f"audit-{iteration:08d}.parquet",
            lambda sink: pq.write_table(table, sink, write_statistics=False),
        )

    def forget_after(self, iteration: int) -> None:
        """Deletes the files of later steps, which a restored run makes anew."""
        for number, path in self._files().items():
            if number > iteration:
                self._folder.filesystem.delete_file(path)

    def iterations(self) -> list[int]:
        """Returns the steps in which something was replayed, in order."""
        return sorted(self._files())

    def latest(self) -> pa.Table:
        """Returns the rows of the latest step that replayed, none if none did."""
        steps = self.iterations()
        return self.read(steps[-1]) if steps else SCHEMA.empty_table()

    def read(self, iteration: int | None = None) -> pa.Table:
        """Returns the rows of a step, or of all steps in order.

        Raises:
            ReplayFileError: if a file is damaged or of another format.
        """
        tables = [
            self._read_file(path)
            for number, path in sorted(self._files().items())
            if iteration in (None, number)
        ]
        return pa.concat_tables([SCHEMA.empty_table(), *tables])

    def _files(self) -> dict[int, str]:
        selector = pa.fs.FileSelector(self._folder.path, allow_not_found=True)
        found = self._folder.filesystem.get_file_info(selector)
        matches = ((_NAME.fullmatch(info.base_name), info.path) for info in found)
        return {int(match[1]): path for match, path in matches if match}

    def _read_file(self, path: str) -> pa.Table:
        try:
            with self._folder.filesystem.open_input_file(path) as source:
                table = pq.read_table(source)
        except (pa.ArrowException, OSError) as error:
            raise ReplayFileError(f"{path} is damaged: {error}") from error
        if not table.schema.equals(SCHEMA):
            raise ReplayFileError(
                f"{path} has the columns {table.column_names}, but an audit file has "
                f"{SCHEMA.names}: another version of the package wrote it."
            )
        return table
