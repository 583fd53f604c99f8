"""`rllib replay export` and `merge`: buffers to files."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rllib_exgrpo.cli._errors import CommandError
from rllib_exgrpo.records import PromptId
from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.files import ReplayFiles
from rllib_exgrpo.replay.finding import find_buffer
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.replay.ids import decode_id
from rllib_exgrpo.replay.summary import export_rows
from rllib_exgrpo.replay.transfer import merge as merged
from rllib_exgrpo.replay.transfer import open_buffer


def load(path: str) -> ReplayBuffer:
    """Returns the buffer that is saved at a path of the command line."""
    return open_buffer(find_buffer(path))


def find_prompt(buffer: ReplayBuffer, text: str) -> tuple[PromptId, int]:
    """Returns id and row of a prompt that a user names: by JSON, or by bare text.

    Raises:
        CommandError: if the buffer does not know it.
    """
    for read in (decode_id, str):
        try:
            prompt_id = read(text)
        except (ValueError, KeyError, AttributeError):  # not JSON, or not of an id
            continue
        row = buffer.prompts.row(prompt_id)
        if row is not None:
            return prompt_id, row
    raise CommandError(
        f"the buffer does not know the prompt {text!r}: take an id as `rllib replay "
        "list` shows it, in quotes for the shell."
    )


def export(args: argparse.Namespace) -> None:
    """Writes every completion as a line of JSON."""
    buffer = load(args.path)
    with _output(args.output) as file:
        for row in export_rows(buffer):
            file.write(json.dumps(row) + "\n")
    if args.output:
        print(f"{buffer.num_completions:,} completions written to {args.output}.")


@contextmanager
def _output(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    temporary = Path(f"{path}.tmp")
    with temporary.open("w") as file:
        yield file
    temporary.rename(path)


def merge(args: argparse.Namespace) -> None:
    """Writes a buffer with the experience of two."""
    output = Path(args.output)
    if output.exists():
        raise CommandError(f"--output {output} exists; name a new folder.")
    buffer = merged(load(args.path), load(args.other))
    ReplayFiles().save(buffer, Folder.at(output))
    print(
        f"{len(buffer):,} prompts with {buffer.num_completions:,} completions, and "
        f"{buffer.num_retired:,} retired prompts. Start a run from them with\n\n"
        f'    replay_buffer_config={{"warm_start": "{output}"}}'
    )
