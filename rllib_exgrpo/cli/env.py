"""List environments, check one, or start a new one.

Examples:
    rllib env list
    rllib env new letter_count
    rllib env check letter_count:LetterCountEnv --env-config '{"split": "train"}'
"""

import argparse
import keyword
import re
from importlib.resources import files
from pathlib import Path

from rllib_exgrpo.cli._errors import CommandError, as_command_error, paragraph
from rllib_exgrpo.cli._options import json_object


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rllib env`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="name the environments that need no import path")

    check = actions.add_parser("check", help="check what training relies on")
    check.add_argument("env", metavar="ENV", help="MODULE:CLASS, or a name from `list`")
    check.add_argument(
        "--env-config", type=json_object, default={}, metavar="JSON", help="settings"
    )
    check.add_argument(
        "--heldout-config",
        type=json_object,
        metavar="JSON",
        help="what evaluation changes of them, to look for shared problems (default: "
        """'{"split": "heldout"}' for the split "train")""",
    )
    check.add_argument(
        "--max-problems",
        type=int,
        default=1000,
        metavar="N",
        help="most gold answers that are judged (default: %(default)s)",
    )

    new = actions.add_parser("new", help="write a working environment and its test")
    new.add_argument("name", metavar="NAME", help="of the module, such as letter_count")
    new.add_argument(
        "--folder", default=".", metavar="DIR", help="where to (default: here)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs `rllib env`."""
    actions = {"list": _list, "check": _check, "new": _new}
    return actions[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from rllib_exgrpo.exgrpo_env import known_envs

    envs = list(known_envs())
    width = max(len(env.name) for env in envs)
    for env in envs:
        print(f"{env.name:{width}}  {env.summary or env.origin}")
    print("\nNames registered with Gymnasium, and MODULE:CLASS, work as well.")
    return 0


def _check(args: argparse.Namespace) -> int:
    from rllib_exgrpo.cli._experiment import open_env
    from rllib_exgrpo.envs.conformance import Level, check_env

    create = open_env(args.env)
    findings = check_env(
        create,
        args.env_config,
        heldout_config=args.heldout_config,
        max_problems=args.max_problems,
    )
    for finding in findings:
        print(paragraph(str(finding)))
    num_errors = sum(f.level is Level.ERROR for f in findings)
    print(f"\n{args.env}: {num_errors} of {len(findings)} checks failed.")
    return int(num_errors > 0)


def _new(args: argparse.Namespace) -> int:
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-\s]", "_", args.name).lower()
    module = module.removesuffix(".py").removesuffix("_env")
    if not module.isidentifier() or keyword.iskeyword(module):
        why = "is a word of Python" if keyword.iskeyword(module) else "is no name in it"
        raise CommandError(
            f"{args.name!r} cannot name a Python module, as {module!r} {why}: take "
            "letters, digits and underscores, such as letter_count."
        )
    class_name = "".join(part.capitalize() for part in module.split("_")) + "Env"
    folder = Path(args.folder)
    paths = [folder / f"{module}.py", folder / f"test_{module}.py"]
    for path in paths:
        if path.exists():
            raise CommandError(f"{path} exists already; take another name or --folder.")
    with as_command_error("the files cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, template(module, class_name), strict=True):
            path.write_text(text)
    where = "this folder" if folder.samefile(".") else str(folder)
    print(f"Wrote {paths[0]} and {paths[1]}. From {where}:\n")
    print(f"    rllib env check {module}:{class_name}")
    print(f"    python -m pytest test_{module}.py")
    print(
        f"    rllib train --algo ExGRPO --env {module}:{class_name} "
        """--stop '{"training_iteration": 2}'"""
    )
    return 0


def template(module: str, class_name: str) -> tuple[str, str]:
    """Returns the text of a new environment's module and of its test."""
    folder = files("rllib_exgrpo.env_template")
    env, test = (
        (folder / name).read_text().replace("MyEnv", class_name)
        for name in ("my_env.py", "test_my_env.py")
    )
    return env, test.replace("my_env", module)
