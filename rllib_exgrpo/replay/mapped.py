"""Segments in memory-mapped Arrow files, for buffers larger than memory."""

import os
import tempfile
from pathlib import Path

import pyarrow as pa

from rllib_exgrpo.replay.segment import Logps, Tokens

_SCHEMA = pa.schema([("token_ids", pa.int32()), ("behavior_logp", pa.float32())])


class MappedSegments:
    """Writes full segments to disk and reads them through memory maps.

    A file loses its name as soon as it is mapped: its space is freed when the segment
    is dropped, or when the process ends, however it ends.

    Args:
        folder: on a disk with room for the whole buffer; created if missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def __call__(self, token_ids: Tokens, behavior_logp: Logps) -> tuple[Tokens, Logps]:
        """Returns arrays of the same contents that live on disk."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(".arrow", dir=self._folder)
        os.close(descriptor)
        batch = pa.record_batch([token_ids, behavior_logp], schema=_SCHEMA)
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
            writer.write_batch(batch)
        mapped = pa.ipc.open_file(pa.memory_map(path)).get_batch(0)
        os.unlink(path)
        return mapped["token_ids"].to_numpy(), mapped["behavior_logp"].to_numpy()
