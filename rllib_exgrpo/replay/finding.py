"""Where the saved buffer is, in a folder that a user names."""

from pathlib import Path, PurePosixPath

import pyarrow.fs

from rllib_exgrpo.replay.folder import MANIFEST, Folder, ReplayFileError, entries_of

BUFFER_FOLDER = "replay_buffer"
"""Name of the buffer's folder in a checkpoint."""


def find_buffer(path: str | Path) -> Folder:
    """Returns the folder of a saved buffer.

    Args:
        path: that folder; a checkpoint; or a folder with checkpoints in it, however
            deep, such as that of a run that is still going on: the whole one of the
            latest training step counts.

    Raises:
        ReplayFileError: if there is none.
    """
    folder = Folder.at(path)
    for place in (folder, Folder(folder.file(BUFFER_FOLDER), folder.filesystem)):
        if place.filesystem.get_file_info(place.file(MANIFEST)).is_file:
            return place
    selector = pyarrow.fs.FileSelector(
        folder.path, recursive=True, allow_not_found=True
    )
    found = []
    for info in folder.filesystem.get_file_info(selector):
        if info.base_name == MANIFEST:
            place = Folder(str(PurePosixPath(info.path).parent), folder.filesystem)
            manifest = place.read_manifest()
            # A checkpoint that is being copied may have its manifest before its files.
            if all(map(place.holds, entries_of(manifest))):
                found.append((manifest["counters"]["iteration"], info.path, place))
    if found:
        # By the step it was saved after: a copied folder has lost its files' times.
        return max(found)[-1]
    raise ReplayFileError(
        f"{path} holds no saved replay buffer: give the folder of a run with a "
        f"checkpoint, a checkpoint, or a folder with a {MANIFEST}. Checkpoints come "
        "with `--checkpoint-freq N`, and at the end of a run."
    )
