"""Experience from one run to another: warm starts and merged buffers."""

from collections.abc import Collection

import numpy as np

from rllib_exgrpo.records import PromptId
from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.files import ReplayFiles, check_tokenizer
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.replay.loading import Load
from rllib_exgrpo.replay.states import carried_over, keep_prompts, merged


def open_buffer(folder: Folder) -> ReplayBuffer:
    """Returns a saved buffer with the knobs that it was saved with, in memory.

    Raises:
        ReplayFileError: if a file is missing, damaged or of another format.
    """
    knobs = {**folder.read_manifest()["knobs"], "disk_path": None}
    buffer = ReplayBuffer(**knobs)
    ReplayFiles().load(buffer, folder)
    return buffer


def warm_start(
    buffer: ReplayBuffer, folder: Folder, prompt_ids: Collection[PromptId]
) -> None:
    """Fills an empty buffer with the experience of another run.

    Knobs and random generator stay the buffer's own; `states.carried_over` tells what
    becomes of the rest. Prompts that are not in `prompt_ids` stay behind.

    Args:
        buffer: to fill.
        folder: of the saved buffer.
        prompt_ids: of the environment.

    Raises:
        ReplayFileError: if a file is missing, damaged or of another format.
        ValueError: if the saved buffer is of another tokenizer or environment, or none
            of its prompts is in `prompt_ids`.
    """
    manifest = folder.read_manifest()
    check_tokenizer(manifest, buffer, folder)
    theirs = manifest["knobs"]["metadata"].get("environment")
    ours = buffer.metadata.get("environment")
    if theirs and ours and theirs != ours:
        raise ValueError(
            f"`warm_start` names {folder.path}, whose prompts are those of {theirs}, "
            f"but this run's environment is {ours}: its ids name other problems. Give "
            "the buffer of a run on this environment."
        )
    state = carried_over(Load(folder, manifest).state, buffer.group_size)
    known = set(prompt_ids)
    wanted = np.array([i in known for i in state["prompts"]["ids"]], bool)
    if not wanted.any():
        raise ValueError(
            f"`warm_start` names {folder.path}, but none of its {len(wanted)} unsolved "
            "prompts is in this run's environment. Give the buffer of a run on the "
            "same problems, or leave `warm_start` out."
        )
    state = keep_prompts(state, wanted)
    own = {**buffer.get_counters(), "sources": state["counters"]["sources"]}
    own["next_id"] = state["counters"]["next_id"]
    buffer.set_state({**state, "counters": own})


def merge(first: ReplayBuffer, second: ReplayBuffer) -> ReplayBuffer:
    """Returns a buffer with the experience of both and the knobs of the first.

    `states.merged` tells how conflicts end.

    Raises:
        ValueError: if they differ in group size, tokenizer or environment.
    """
    for what, values in {
        "group size": (first.group_size, second.group_size),
        **{
            name: (first.metadata.get(name), second.metadata.get(name))
            for name in ("tokenizer", "environment")
        },
    }.items():
        if values[0] != values[1]:
            raise ValueError(
                f"The buffers cannot be merged: the {what} of the first is "
                f"{values[0]!r}, that of the second {values[1]!r}."
            )
    buffer = ReplayBuffer(**first.knobs)
    buffer.set_state(merged(first.get_state(), second.get_state()))
    return buffer
