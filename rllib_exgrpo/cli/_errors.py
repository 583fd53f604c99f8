"""What can go wrong before a run starts, told in one paragraph."""

import re
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_EXPLAINED = (ValueError, OSError, ImportError)
"""Errors whose message this package or RLlib wrote for the user."""

_RLLIBS_ADVICE = "\nTo suppress all validation errors"

_OUT_OF_MEMORY = re.compile(
    r"killed due to the node running low on memory.*?was (.*?) used / (.*?) limit"
)

_ERROR_LINE = re.compile(r"^[\w.]*(?:Error|Exception): .*$", re.MULTILINE)


class CommandError(Exception):
    """Ends the command with a message for the user.

    Args:
        message: what is wrong, where, and the remedy.
        exit_code: of the process.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def paragraph(text: str) -> str:
    """Wraps a text to 88 columns; lines that are indented stay as they are."""
    return "\n".join(
        line if line.startswith(" ") else _wrap(line) for line in text.splitlines()
    )


def _wrap(line: str) -> str:
    return textwrap.fill(line, 88, break_long_words=False, break_on_hyphens=False)


@contextmanager
def as_command_error(what: str) -> Iterator[None]:
    """Turns errors in the user's inputs or code into a `CommandError`.

    Args:
        what: put before the message.
    """
    try:
        yield
    except (CommandError, BrokenPipeError):  # the latter: nobody reads the output
        raise
    except _EXPLAINED as error:
        message = str(error).partition(_RLLIBS_ADVICE)[0]
        raise CommandError(f"{what}: {message}") from error
    except Exception as error:  # any: files and environments are the user's code
        raise CommandError(
            f"{what}: {type(error).__name__}: {error}\n{innermost_frames(error)}"
        ) from error


def innermost_frames(error: BaseException, count: int = 3) -> str:
    """Returns the last frames of an error's traceback, indented."""
    frames = traceback.format_tb(error.__traceback__)[-count:]
    return "".join(frames).rstrip("\n")


def out_of_memory(error: BaseException) -> str:
    """Returns what to do if Ray has ended a process for want of memory, or else ""."""
    found = _OUT_OF_MEMORY.search(str(error))
    if found is None:
        return ""
    return (
        f"the machine's memory was full, {found[1]} of {found[2]}, so Ray ended a "
        "process of the run. Use fewer or smaller ones: lower `num_env_runners`, "
        "`num_learners`, `kv_cache_bytes` or `max_tokens_per_micro_batch`, or set the "
        "buffer's `disk_path`. `rllib doctor FILE` estimates what a run takes."
    )


def error_summary(error: BaseException) -> str:
    """Returns type and message of the error behind one that Ray raised.

    An error in a task or actor comes as its cause. Where a whole process died, Ray's
    text may hold a traceback, whose errors are named.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {cause}"
    text = str(error)
    named = dict.fromkeys(_ERROR_LINE.findall(text))
    first = text.partition("\n")[0]
    return "\n".join([f"{type(error).__name__}: {first}", *named])
