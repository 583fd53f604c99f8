"""Which files a `data` setting names: files, folders, patterns, Hugging Face data."""

import json
from collections.abc import Iterable, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any, NamedTuple

from .rows import SUFFIXES

HUB_PREFIX = "hf:"


class Source(NamedTuple):
    """Where the rows are.

    Attributes:
        paths: of the files, in order.
        split_is_chosen: whether these files are one split already.
    """

    paths: list[Path]
    split_is_chosen: bool = False


def find_source(
    data: Any, split: str | None = None, subset: str | None = None
) -> Source:
    """Finds the files that `data` names.

    Args:
        data: a path or a list of paths: files, patterns such as `part-*.parquet`,
            folders of such files, folders that `save_to_disk` of the package `datasets`
            wrote; or `hf:NAME`, a data set of the Hugging Face hub.
        split: which split of a Hugging Face data set.
        subset: which subset ("configuration") of a data set of the hub.

    Raises:
        FileNotFoundError: if nothing is there.
        ValueError: if a Hugging Face data set has several splits and none is chosen.
    """
    if isinstance(data, str) and data.startswith(HUB_PREFIX):
        return Source(_hub_files(data.removeprefix(HUB_PREFIX), subset, split), True)
    names: Sequence[str | Path] = [data] if isinstance(data, str | Path) else data
    sources = [_find(str(name), split) for name in names]
    return Source(
        [path for source in sources for path in source.paths],
        any(source.split_is_chosen for source in sources),
    )


def _find(name: str, split: str | None) -> Source:
    path = Path(name).expanduser()
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        return Source(_saved_files(path / _chosen(split, splits, name)), True)
    if (path / "state.json").is_file():
        return Source(_saved_files(path))
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()]
    elif has_magic(name) and not path.exists():
        found = [Path(p) for p in glob(str(path), recursive=True) if Path(p).is_file()]
    else:
        found = [path] if path.is_file() else []
    if not found:
        raise FileNotFoundError(
            f"The setting `data` names {name}, where there is no file of rows. Give a "
            f"{', '.join(SUFFIXES)} file, a folder or a pattern of such files, a "
            f"folder that `save_to_disk` wrote, or '{HUB_PREFIX}NAME' for a data set "
            "of the Hugging Face hub."
        )
    return Source(sorted(found))


def _saved_files(folder: Path) -> list[Path]:
    """Returns the Arrow files of a data set that `datasets` saved."""
    state = json.loads((folder / "state.json").read_text())
    return [folder / entry["filename"] for entry in state["_data_files"]]


def _hub_files(name: str, subset: str | None, split: str | None) -> list[Path]:
    """Returns the Arrow files that `datasets` keeps of a data set, loading it first."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"`data`='{HUB_PREFIX}{name}' needs the package `datasets`: install it by "
            "`pip install 'rllib_exgrpo[datasets]'`."
        ) from error
    try:
        loaded = datasets.load_dataset(name, subset)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise FileNotFoundError(
            f"`data`='{HUB_PREFIX}{name}' cannot be loaded: {reason} "
            "Without a network, load it once where there is one and take its cache "
            "along, or write it by `save_to_disk` and give that folder."
        ) from error
    chosen = loaded[_chosen(split, loaded, HUB_PREFIX + name)]
    return [Path(file["filename"]) for file in chosen.cache_files]


def _chosen(split: str | None, splits: Iterable[str], name: str) -> str:
    splits = list(splits)
    if split is None and len(splits) == 1:
        return splits[0]
    if split not in splits:
        raise ValueError(
            f"`split` is {split!r}, but {name} has the splits {splits}: set `split` to "
            "one of them."
        )
    return str(split)
