"""The replay buffer in RLlib's dialect."""

import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.replay_buffers.base import ReplayBufferInterface

from rllib_exgrpo.records import Group
from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.drawing import Choice, Draw
from rllib_exgrpo.replay.files import ReplayFiles
from rllib_exgrpo.replay.folder import MANIFEST, Folder, ReplayFileError

__all__ = ["Choice", "Draw", "ExGRPOReplayBuffer", "ReplayFileError"]


class ExGRPOReplayBuffer(ReplayBuffer, ReplayBufferInterface, Checkpointable):
    """A `ReplayBuffer` that an RLlib algorithm can hold and checkpoint.

    A checkpoint is a folder of parquet files, see `rllib_exgrpo.replay.folder`, and
    holds no pickle.
    """

    METADATA_FILE_NAME = MANIFEST

    _last_counters: dict[str, Any] | None = None  # of the last `get_state`

    @override(ReplayBufferInterface)
    def __len__(self) -> int:
        return super().__len__()

    @override(ReplayBufferInterface)
    def add(self, batch: Sequence[Group], *, iteration: int = 0, **kwargs: Any) -> None:
        """Records groups; see `record`."""
        self.record(batch, iteration)

    @override(ReplayBufferInterface)
    def sample(
        self,
        num_items: int | None = None,
        *,
        weights_version: int | None = None,
        **kwargs: Any,
    ) -> list[Draw]:
        """Draws prompts; see `draw`.

        Args:
            num_items: how many; None means one.
            weights_version: None means the newest one seen.
            **kwargs: ignored.
        """
        version = self.newest_version if weights_version is None else weights_version
        return self.draw(1 if num_items is None else num_items, version)

    @override(Checkpointable)
    def get_state(
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the whole state, whatever `components` says: it has none."""
        state = super().get_state()
        self._last_counters = state["counters"]
        return state

    @override(Checkpointable)
    def save_to_path(
        self,
        path: str | Path | None = None,
        *,
        state: dict[str, Any] | None = None,
        filesystem: pa.fs.FileSystem | None = None,
        use_msgpack: bool = False,
    ) -> str:
        """Saves the buffer, after the first time only what changed since the last.

        Args:
            path: a folder; None makes a temporary one.
            state: what to save instead of the buffer as it is now. It is saved in full
                unless it is what `get_state` returned last and nothing changed since.
            filesystem: None infers it from `path`.
            use_msgpack: ignored, the files are parquet.

        Returns:
            The folder's path.
        """
        folder = Folder.at(tempfile.mkdtemp() if path is None else path, filesystem)
        if state is None or self._is_current(state):
            self._files.save(self, folder)
        else:
            buffer = ReplayBuffer(**self.knobs)
            buffer.set_state(state)
            ReplayFiles().save(buffer, folder)
        return folder.path

    @override(Checkpointable)
    def restore_from_path(
        self,
        path: str | Path,
        *,
        component: str | None = None,
        filesystem: pa.fs.FileSystem | None = None,
        **kwargs: Any,
    ) -> None:
        """Replaces the contents by those of a saved buffer.

        Raises:
            ReplayFileError: if a file is missing, damaged or of another format.
            ValueError: if it has another group size or tokenizer.
        """
        self._files.load(self, Folder.at(path, filesystem))

    @classmethod
    @override(Checkpointable)
    def from_checkpoint(
        cls,
        path: str | Path,
        filesystem: pa.fs.FileSystem | None = None,
        **kwargs: Any,
    ) -> Self:
        """Returns a buffer with a saved one's knobs, but for `kwargs`, and contents."""
        manifest = Folder.at(path, filesystem).read_manifest()
        buffer = cls(**{**manifest["knobs"], **kwargs})
        buffer.restore_from_path(path, filesystem=filesystem)
        return buffer

    @override(Checkpointable)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        """Returns what builds an empty buffer with the same knobs."""
        return (), self.knobs

    @cached_property
    def _files(self) -> ReplayFiles:
        return ReplayFiles()

    def _is_current(self, state: dict[str, Any]) -> bool:
        counters = state["counters"]
        is_last = counters is self._last_counters
        return is_last and counters["revision"] == self.revision
