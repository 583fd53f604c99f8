"""Look into a replay buffer, keep it, merge it, and ask why something was replayed.

PATH is a run's folder (its latest whole checkpoint counts; the run may be going on), a
checkpoint, or the folder of a saved buffer. Prompt ids are written as `list` shows
them.
"""

import argparse

from rllib_exgrpo.cli._errors import as_command_error

SORT_KEYS = (
    "bucket",
    "entropy",
    "age",
    "replayed",
    "completions",
    "length",
    "iteration",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rllib replay`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, text: str, *paths: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        for path in paths or ("path",):
            added.add_argument(path, metavar=path.upper())
        return added

    action("stats", "buckets, ages, lengths, replays and sources in numbers")
    _add_list_arguments(action("list", "one line a prompt, the hardest first"))
    show = action("show", "one prompt with its completions as text")
    show.add_argument("prompt", metavar="PROMPT_ID")
    export = action("export", "write all completions as JSON lines")
    export.add_argument("--output", metavar="FILE.jsonl", help="default: the terminal")
    merge = action(
        "merge", "write the experience of two runs into one", "path", "other"
    )
    merge.add_argument("--output", metavar="FOLDER", required=True, help="a new folder")
    diff = action("diff", "what changed from one buffer to another", "path", "other")
    diff.add_argument("--limit", type=_count, default=20, metavar="N")
    audit = action("audit", "what was replayed in a run, and why")
    audit.add_argument("--iteration", type=int, metavar="N", help="only that step")
    audit.add_argument("--prompt", metavar="PROMPT_ID", help="only that prompt")


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bucket", type=int, nargs="+", metavar="K")
    parser.add_argument("--source", metavar="NAME", help="of the data set")
    for name, what in (("age", int), ("entropy", float)):
        for end in ("min", "max"):
            parser.add_argument(f"--{end}-{name}", type=what, metavar="X")
    parser.add_argument("--sort", choices=SORT_KEYS, default="bucket")
    parser.add_argument("--descending", action="store_true")
    parser.add_argument("--limit", type=_count, default=20, metavar="N", help="0: all")


def _count(text: str) -> int:
    """Reads a number of lines."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of lines, 0 or more")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Runs `rllib replay`."""
    from rllib_exgrpo.cli import _replay_audit, _replay_files, _replay_views

    actions = {
        "stats": _replay_views.print_stats,
        "list": _replay_views.print_list,
        "show": _replay_views.print_prompt,
        "diff": _replay_views.print_diff,
        "export": _replay_files.export,
        "merge": _replay_files.merge,
        "audit": _replay_audit.print_audit,
    }
    with as_command_error(f"`replay {args.action}` failed"):
        actions[args.action](args)
    return 0
