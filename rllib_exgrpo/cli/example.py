"""List, show or run the tuned examples that come with this package."""

import argparse
import ast
from importlib.resources import files
from pathlib import Path

from rllib_exgrpo.cli._errors import CommandError
from rllib_exgrpo.cli._options import add_run_arguments, run_with_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rllib example`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="name all examples, with a line on each")
    get = actions.add_parser("get", help="print an example's file, to change a copy")
    run_parser = actions.add_parser("run", help="train an example")
    for action in (get, run_parser):
        action.add_argument("example", metavar="NAME", help="as `list` names it")
    add_run_arguments(run_parser)


def run(args: argparse.Namespace) -> int:
    """Runs `rllib example`."""
    if args.action == "list":
        return _print_list()
    path = find_example(args.example)
    if args.action == "get":
        print(path.read_text(), end="")
        return 0
    from rllib_exgrpo.cli._experiment import Experiment

    return run_with_options(Experiment.from_file(path), args)


def example_files() -> dict[str, Path]:
    """Returns the files of the examples, by name."""
    folder = Path(str(files("rllib_exgrpo.tuned_examples")))
    paths = sorted(folder.glob("[!_]*.py"))
    return {path.stem: path for path in paths}


def find_example(name: str) -> Path:
    """Returns the file of an example.

    Raises:
        CommandError: if there is none of that name.
    """
    examples = example_files()
    path = examples.get(name.removesuffix(".py"))
    if path is None:
        raise CommandError(
            f"there is no example {name!r}; there are {', '.join(examples)}."
        )
    return path


def _print_list() -> int:
    examples = example_files()
    width = max(map(len, examples))
    for name, path in examples.items():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        print(f"{name:{width}}  {text.partition(chr(10))[0]}")
    print("\nRun one with `rllib example run NAME`.")
    return 0
