"""Whether Ray has room for a run: what is too little is told instead of waited for."""

import logging
from collections.abc import Mapping, Sequence

import ray
from ray.tune import PlacementGroupFactory
from ray.util import get_current_placement_group

logger = logging.getLogger(__name__)


def check_room(bundles: Sequence[Mapping[str, float]]) -> None:
    """Looks for room for the processes of an algorithm, starting Ray if need be.

    A trial of Tune is not looked at: it starts only once it has its room.

    Args:
        bundles: resources of each process, by name.

    Raises:
        ValueError: if Ray has a single machine and it is too small. A cluster may grow,
            so there it is a warning.
    """
    if not bundles:
        return
    if not ray.is_initialized():
        ray.init()
    if get_current_placement_group() is not None:
        return
    needs = PlacementGroupFactory(list(map(dict, bundles))).required_resources
    if too_little := lacking(needs, ray.cluster_resources()):
        if len(ray.nodes()) == 1:
            raise ValueError(
                f"{too_little} Processes may outnumber cores: `ray.init(num_cpus=...)`."
            )
        logger.warning("Waiting for the cluster to grow: %s", too_little)
    elif too_little := lacking(needs, ray.available_resources(), "free"):
        logger.warning("Waiting until other jobs end: %s", too_little)


def lacking(
    needs: Mapping[str, float], there: Mapping[str, float], state: str = "there"
) -> str:
    """Says which resources are too few and what to do, "" if none is.

    Args:
        needs: amount by name.
        there: amount by name.
        state: what `there` counts.
    """
    short = [
        f"{amount:g} {name}s and {there.get(name, 0):g} are {state}"
        for name, amount in needs.items()
        if amount > there.get(name, 0)
    ]
    if not short:
        return ""
    return (
        f"The run needs {', '.join(short)}. Lower `num_env_runners`, `num_learners` or "
        "their `num_gpus_per_env_runner` and `num_gpus_per_learner`, or set "
        "RAY_ADDRESS to a cluster that is large enough."
    )
