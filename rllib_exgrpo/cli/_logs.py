"""Keeps what Ray, vLLM and DeepSpeed print: in files of the run's folder.

While Ray runs, `logs/SESSION` is a link to where it writes them; afterwards it is a
folder that holds them. A run that is killed leaves the link.
"""

import shutil
from pathlib import Path

FOLDER = "logs"


def link_logs(session: Path, run_folder: Path) -> Path | None:
    """Makes the link; None if the session is on another machine.

    Args:
        session: folder of a Ray session.
        run_folder: of the run.
    """
    logs = session / "logs"
    if not logs.is_dir():
        return None
    link = run_folder / FOLDER / session.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(logs, target_is_directory=True)
    return link


def keep_logs(link: Path) -> None:
    """Copies the files that are linked, without empty ones, to where the link is."""
    copy = link.with_name(f"{link.name}.tmp")
    shutil.copytree(link, copy, ignore=_without_text)
    link.unlink()
    copy.replace(link)


def _without_text(folder: str, names: list[str]) -> list[str]:
    """Names what is no log: empty files, sockets, links to elsewhere."""
    paths = (Path(folder) / name for name in names)
    return [p.name for p in paths if not (p.is_dir() or _has_text(p))]


def _has_text(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size > 0
