"""Shared fixtures. The environment is set before torch or ray are imported."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
# Ray runs its workers at 15, where the other test process starves them.
os.environ.setdefault("RAY_worker_niceness", "0")
# Ray's workers import the environments that test files define.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)

import pytest

# The longest files, which start Ray or DeepSpeed: begun last, they would run alone.
_FIRST = ("test_training", "test_training_engine", "test_cli", "test_faults")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first, for processes that take file after file."""
    items.sort(key=lambda item: item.path.stem not in _FIRST)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray with more logical CPUs than the machine may have."""
    import ray

    # Its own cluster, as pytest-xdist runs several test processes beside each other.
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with the real inputs; tests that need it skip where it is absent."""
    path = Path(os.environ.get("EXGRPO_SHARED", Path(__file__).parents[2] / "shared"))
    if not path.is_dir():
        pytest.skip(f"no shared inputs at {path}")
    return path
