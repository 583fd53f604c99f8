"""Which checkpoints in a run's folder are whole.

A checkpoint is copied into the run's folder file by file, so one that a kill cut short
looks like any other. The last file written is the marker: without it a checkpoint is
not whole and is never resumed from.
"""

import json
import pickle
import re
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSelector, FileSystem

MARKER = "complete.json"
CONSTRUCTOR_FILE = "class_and_ctor_args.pkl"
"""RLlib's own; trust a checkpoint as you would trust its code."""

_NAME = re.compile(r"checkpoint_(\d+)")


def mark_complete(path: str, filesystem: FileSystem, iteration: int) -> None:
    """Marks a checkpoint as whole.

    Args:
        path: of its folder.
        filesystem: that holds it.
        iteration: training steps it has seen.
    """
    text = json.dumps({"training_iteration": iteration})
    with filesystem.open_output_stream(f"{path}/{MARKER}") as file:
        file.write(text.encode())


def last_index(path: str, filesystem: FileSystem) -> int:
    """Returns the highest number of a trial's checkpoints, whole or not.

    Returns:
        -1 if there is none, so that the next number is always one more.
    """
    selector = FileSelector(path, allow_not_found=True)
    names = (info.base_name for info in filesystem.get_file_info(selector))
    matches = filter(None, map(_NAME.fullmatch, names))
    return max((int(match[1]) for match in matches), default=-1)


def latest_complete(trial: Path) -> tuple[Path | None, list[Path]]:
    """Finds the checkpoint to resume from.

    Args:
        trial: local folder of a trial.

    Returns:
        The latest whole checkpoint, None if there is none; and those after it, which
        were cut short.
    """
    cut_short: list[Path] = []
    for path in sorted(trial.glob("checkpoint_*"), reverse=True):
        if iteration_of(path) is not None:
            return path, cut_short
        cut_short.append(path)
    return None, cut_short


def iteration_of(checkpoint: Path) -> int | None:
    """Returns the training steps a checkpoint has seen, None if it is not whole."""
    try:
        content: dict[str, Any] = json.loads((checkpoint / MARKER).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return int(content["training_iteration"])


def config_state(path: str, filesystem: FileSystem) -> dict[str, Any]:
    """Returns the state of the configuration that wrote a checkpoint.

    Args:
        path: of its folder.
        filesystem: that holds it.
    """
    with filesystem.open_input_stream(f"{path}/{CONSTRUCTOR_FILE}") as file:
        (state,), _ = pickle.loads(file.read())["ctor_args_and_kwargs"]
    return dict(state)
