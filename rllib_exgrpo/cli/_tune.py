"""What all trials of a run have in common: results, checkpoints, failures."""

from pathlib import Path
from typing import Any

from ray import tune

from rllib_exgrpo.cli._callbacks import ResultFile, ResultTable
from rllib_exgrpo.cli._options import RunOptions
from rllib_exgrpo.exgrpo_config import ExGRPOConfig
from rllib_exgrpo.exgrpo_lifecycle import CHECKPOINT_SCORE
from rllib_exgrpo.exgrpo_wandb import WandbTracker

_CHECKPOINT_EVERY = 10


def run_config(
    config: ExGRPOConfig,
    options: RunOptions,
    folder: Path,
    callbacks: list[tune.Callback],
    stop: Any,
) -> tune.RunConfig:
    """Returns how Tune runs the trials.

    Args:
        config: of the algorithm, in a sweep with its search spaces.
        options: of the command line.
        folder: for everything that the run writes.
        callbacks: what talks to the user.
        stop: criteria, or a stopper.
    """
    if options.wandb:
        tracker = WandbTracker(
            options.wandb, group=folder.name, tags=options.wandb_tags
        )
        callbacks = [*callbacks, tracker]
    return tune.RunConfig(
        name=folder.name,
        storage_path=str(folder.parent.resolve()),
        stop=stop,
        callbacks=[ResultFile(), ResultTable(), *callbacks],
        verbose=0,
        checkpoint_config=checkpoint_config(config, options),
        failure_config=tune.FailureConfig(max_failures=options.max_failures),
    )


def checkpoint_config(
    config: ExGRPOConfig, options: RunOptions
) -> tune.CheckpointConfig:
    """Keeps the latest checkpoints or, with a set to choose by, the last and the best.

    `RunOptions.check` has refused options that contradict the set.
    """
    if config.best_checkpoint_set is None:
        given = options.checkpoint_freq
        return tune.CheckpointConfig(
            checkpoint_at_end=True,
            checkpoint_frequency=_CHECKPOINT_EVERY if given is None else given,
            num_to_keep=options.keep_checkpoints,
        )
    return tune.CheckpointConfig(
        checkpoint_at_end=True,
        # Only what was evaluated can be chosen.
        checkpoint_frequency=config.evaluation_interval,
        num_to_keep=1,
        checkpoint_score_attribute=CHECKPOINT_SCORE,
        checkpoint_score_order="max",
    )
