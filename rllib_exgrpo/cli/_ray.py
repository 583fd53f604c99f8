"""Starts Ray for one command, quietly and with room for what the command needs."""

import logging
import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from rllib_exgrpo.cli._errors import CommandError
from rllib_exgrpo.cli._logs import keep_logs, link_logs
from rllib_exgrpo.exgrpo import ExGRPO
from rllib_exgrpo.exgrpo_config import ExGRPOConfig
from rllib_exgrpo.exgrpo_resources import lacking


@contextmanager
def ray_started(
    config: ExGRPOConfig, run_folder: Path | None = None
) -> Iterator[Mapping[str, float]]:
    """Starts Ray on this machine, or joins the cluster named by `RAY_ADDRESS`.

    Args:
        config: of the algorithm.
        run_folder: where the logs of all processes are kept, if they are wanted.

    Yields:
        The resources that the algorithm needs, by name.

    Raises:
        CommandError: if there are not as many.
    """
    quieten()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    needs = ExGRPO.default_resource_request(config).required_resources
    context = _start_ray(int(needs.get("CPU", 1)))
    session = Path(context.address_info["session_dir"])
    logs = link_logs(session, run_folder) if run_folder else None
    try:
        _check_room(needs)
        yield needs
    finally:
        ray.shutdown()
        if logs is not None:
            keep_logs(logs)


def _start_ray(num_cpus: int) -> Any:
    local = {
        "address": "local",
        # Processes may outnumber cores: they wait for each other in turns.
        "num_cpus": max(os.cpu_count() or 1, num_cpus),
        "include_dashboard": False,
    }
    place = {} if "RAY_ADDRESS" in os.environ else local
    try:
        with _sigterm_blocked():
            return ray.init(log_to_driver=False, logging_level="critical", **place)
    except Exception as error:  # any: Ray raises its bare class too
        raise CommandError(
            f"Ray did not start: {error} On a very busy machine, try again later.",
            1,
        ) from error


@contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Has processes that are started meanwhile never end by SIGTERM.

    `timeout`, job schedulers and service managers send it to all processes of a job.
    Ray would be gone before the run has saved its checkpoint.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def quieten() -> None:
    """Silences the libraries; what goes wrong is told by this command."""
    warnings.filterwarnings("ignore")
    for name in ("ray", "ray.rllib", "ray.tune", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"  # not every step evaluates
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # _signals has its own
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # Tune's new output ignores `verbose=0`


def _check_room(needs: Mapping[str, float]) -> None:
    if too_little := lacking(needs, ray.cluster_resources()):
        raise CommandError(too_little)
