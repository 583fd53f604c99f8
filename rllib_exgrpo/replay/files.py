"""Saving a replay buffer, each time only what changed, and loading it; see `folder`."""

import json

import numpy as np

from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.folder import (
    FORMAT,
    MANIFEST,
    VERSION,
    Folder,
    Manifest,
    entries_of,
)
from rllib_exgrpo.replay.loading import Load
from rllib_exgrpo.replay.saving import Save
from rllib_exgrpo.replay.store import NONE, CompletionStore


class ReplayFiles:
    """Saves a buffer and loads it.

    A second save writes new completions, changed usage and prompts, and from time to
    time merges small files or rewrites files that are mostly dead. The other files
    stay, or are shared by hard links where the folder is another one on the same file
    system. Each completion is rewritten O(log n) times.
    """

    def __init__(self) -> None:
        self._folder: Folder | None = None
        self._manifest: Manifest | None = None
        self._store: CompletionStore | None = None  # that the manifest describes
        self._dead_written: dict[int, int] = {}

    def save(self, buffer: ReplayBuffer, folder: Folder) -> int:
        """Saves a buffer; what an earlier save left in the folder is replaced.

        Returns:
            Bytes written, without the files that were shared.
        """
        folder.filesystem.create_dir(folder.path, recursive=True)
        if not self._can_build_on_last(buffer, folder):
            self._start_over(buffer)
        save = Save(buffer, folder, self._manifest, self._dead_written)
        manifest = {**_header(buffer), **save.run()}
        text = json.dumps(manifest, indent=1).encode()
        folder.write(MANIFEST, lambda sink: sink.write(text))
        folder.keep_only(entries_of(manifest))
        save.mark_saved()
        self._remember(buffer, folder, manifest)
        return save.bytes_written + len(text)

    def load(self, buffer: ReplayBuffer, folder: Folder) -> None:
        """Replaces the contents of a buffer by a saved one.

        Raises:
            ReplayFileError: if a file is missing, damaged or of another format.
            ValueError: if the group size or the tokenizer is another.
        """
        manifest = folder.read_manifest()
        check_tokenizer(manifest, buffer, folder)
        loaded = Load(folder, manifest)
        buffer.set_state(loaded.state)
        rows = np.arange(len(loaded.saved_in))
        buffer.store.table["saved_in"][rows] = loaded.saved_in
        buffer.store.dead_in = loaded.dead_in
        buffer.prompts.table.fill("saved", True)
        buffer.prompts.table.fill("changed", False)
        self._remember(buffer, folder, manifest)

    def _remember(
        self, buffer: ReplayBuffer, folder: Folder, manifest: Manifest
    ) -> None:
        self._folder, self._manifest, self._store = folder, manifest, buffer.store
        self._dead_written = {n: len(ids) for n, ids in buffer.store.dead_in.items()}

    def _can_build_on_last(self, buffer: ReplayBuffer, folder: Folder) -> bool:
        """Whether the files of the last save are still right and within reach."""
        if self._manifest is None or self._folder is None:
            return False
        if buffer.store is not self._store:  # the contents were replaced since
            return False
        entries = entries_of(self._manifest)
        if folder != self._folder and not folder.link(self._folder, entries):
            return False
        return all(map(folder.holds, entries))

    def _start_over(self, buffer: ReplayBuffer) -> None:
        self._manifest = None
        self._dead_written = {}
        buffer.store.table.fill("saved_in", NONE)
        buffer.store.dead_in.clear()
        buffer.prompts.table.fill("saved", False)
        buffer.prompts.removed.clear()


def check_tokenizer(manifest: Manifest, buffer: ReplayBuffer, folder: Folder) -> None:
    """Refuses a saved buffer whose token ids mean other text than the buffer's own.

    Raises:
        ValueError: if both name their tokenizer and the two differ.
    """
    ours = buffer.metadata.get("tokenizer")
    theirs = manifest["knobs"]["metadata"].get("tokenizer")
    if ours and theirs and ours != theirs:
        raise ValueError(
            f"The replay buffer in {folder.path} was filled with the tokenizer "
            f"{theirs!r}, but this run's is {ours!r}: its token ids mean other text "
            "here. Use the same model family, or start with an empty buffer."
        )


def _header(buffer: ReplayBuffer) -> Manifest:
    return {
        "format": FORMAT,
        "version": VERSION,
        "group_size": buffer.group_size,
        "knobs": buffer.knobs,
        "prompts": len(buffer),
        "retired": buffer.num_retired,
        "completions": buffer.num_completions,
        "tokens": buffer.store.num_tokens,
        "counters": buffer.get_counters(),
    }
