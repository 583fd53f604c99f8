"""What surrounds the training step: set-up, weights, evaluation, state, checkpoints."""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from pyarrow.fs import FileSystem, FileType
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import (
    EVALUATION_RESULTS,
)
from ray.tune import Checkpoint
from ray.tune.result import DONE

from rllib_exgrpo.checkpoints import config_state, last_index, mark_complete
from rllib_exgrpo.evaluation.questions import FOLDER
from rllib_exgrpo.evaluation.sets import UNNAMED, EvaluationSet
from rllib_exgrpo.exgrpo_config import ExGRPOConfig
from rllib_exgrpo.exgrpo_env import find_env
from rllib_exgrpo.exgrpo_evaluation import (
    Evaluator,
    check_evaluation_prompts,
    open_prompts,
    warn_of_few_prompts,
)
from rllib_exgrpo.exgrpo_replay import ExGRPOReplayBuffer
from rllib_exgrpo.exgrpo_resources import check_room
from rllib_exgrpo.exgrpo_rollout import RolloutDispatcher
from rllib_exgrpo.exgrpo_weight_sync import WeightSync
from rllib_exgrpo.gpu_memory import check_shared_gpu, learner_memory
from rllib_exgrpo.policy import build_empty, tokenizer_hash
from rllib_exgrpo.prompt_book import PromptBook
from rllib_exgrpo.prompts import PromptCycle
from rllib_exgrpo.replay.audit import AUDIT_FOLDER, Audit
from rllib_exgrpo.replay.finding import BUFFER_FOLDER, find_buffer
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.replay.transfer import warm_start
from rllib_exgrpo.versions import write_versions

logger = logging.getLogger(__name__)

COMPONENT_REPLAY_BUFFER = BUFFER_FOLDER
EXGRPO_STATE = "exgrpo"
EVALUATION_AT_START = "evaluation_at_start"
CHECKPOINT_SCORE = "checkpoint_score"


class ExGRPOLifecycle(Algorithm):
    """The life of the algorithm around its training step, which `ExGRPO` adds."""

    config: ExGRPOConfig

    @classmethod
    @override(Algorithm)
    def get_default_config(cls) -> ExGRPOConfig:
        """Returns the paper's settings."""
        return ExGRPOConfig()

    @override(Algorithm)
    def setup(self, config: ExGRPOConfig) -> None:
        """Checks the inputs, then starts env runners and learners."""
        # First what can be wrong, before anything heavy starts.
        if config.engine_sleeps:
            check_shared_gpu(
                learner_memory(build_empty(**config._model_config_auto_includes)),
                gpu_bytes=torch.cuda.get_device_properties(0).total_memory,
                gpu_memory_utilization=config.gpu_memory_utilization,
            )
        self._training_prompts = open_prompts(config)
        warn_of_few_prompts(config, self._training_prompts)
        if config.evaluation_interval:
            check_evaluation_prompts(config, self._training_prompts)
        # The first bundle is for this process, which is there already.
        check_room(self.default_resource_request(config).bundles[1:])
        self._is_solved = False
        self._never_overwrite_checkpoints()
        self._has_warned_of_logp_diff = False
        self._is_in_step = False
        self._run_seed = fresh_seed() if config.seed is None else int(config.seed)
        self.prompt_cycle = PromptCycle(
            self._training_prompts.ids, self._run_seed, config.retired_prompts
        )
        self.replay_buffer = build_replay_buffer(
            config, self._run_seed, self._training_prompts
        )
        self.replay_is_active = (
            config.replay_ratio > 0 and config.replay_start_pass_rate is None
        )
        super().setup(config)
        self.evaluator = Evaluator(config, self._folder(FOLDER))
        write_versions(self._folder())
        self._weight_sync = WeightSync(
            self.learner_group, self.env_runner_group, config
        )
        self._push_weights(self.env_runner_group)
        self._rollout = self._build_dispatcher(self.env_runner_group)
        self._audit = Audit(self._folder(AUDIT_FOLDER))

    @staticmethod
    @override(Algorithm)
    def _get_env_id_and_creator(env_specifier: Any, config: Any) -> tuple[Any, Any]:
        return env_specifier, find_env(env_specifier)

    @override(Algorithm)
    def _create_local_replay_buffer_if_necessary(self, config: Any) -> None:
        """Keeps RLlib from building a buffer of its own from our settings."""

    def _build_dispatcher(self, group: EnvRunnerGroup) -> RolloutDispatcher:
        return RolloutDispatcher(
            group,
            revive=lambda: self.restore_env_runners(group),
            seed=self._run_seed,
            weights_version=lambda: self._weights_version,
            timeout_s=self.config.sample_timeout_s,
        )

    def _folder(self, name: str = "") -> Folder:
        """Returns a folder in that of the trial or, without Tune, of RLlib's logs."""
        if self._storage is None:
            return Folder.at(Path(self.logdir) / name)
        path = Path(self._storage.trial_fs_path) / name
        return Folder.at(path, self._storage.storage_filesystem)

    # --- weights

    def _push_weights(
        self, group: EnvRunnerGroup, runner_ids: list[int] | None = None
    ) -> None:
        """Brings the learners' weights to env runners, see `WeightSync`."""
        self._weights_version = self._weight_sync.push(group, runner_ids)

    @override(Algorithm)
    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Brings restarted env runners back, with the present weights."""
        restored = super().restore_env_runners(env_runner_group)
        if restored:
            self._push_weights(env_runner_group, restored)
        return restored

    # --- evaluation

    @override(Algorithm)
    def step(self) -> dict[str, Any]:
        """Makes one iteration; before the very first one it may evaluate too."""
        config = self.config
        at_start = (
            self.evaluate()
            if self.iteration == 0
            and config.evaluation_interval
            and config.evaluation_at_start
            else None
        )
        self._is_in_step = True
        result = super().step()
        self._is_in_step = False
        result[DONE] = self._is_solved
        result[CHECKPOINT_SCORE] = self._checkpoint_score(result)
        if at_start is not None:
            result[EVALUATION_AT_START] = at_start
        return result

    def _checkpoint_score(self, result: dict[str, Any]) -> float:
        """Returns pass@1 of the set that chooses checkpoints, NaN if not evaluated.

        Tune finds a score on the top level of a result only, and takes a checkpoint
        without the key, but not one with NaN, for the best.
        """
        evaluation, name = (
            result.get(EVALUATION_RESULTS, {}),
            self.config.best_checkpoint_set,
        )
        metrics = evaluation if name == UNNAMED else evaluation.get(name, {})
        return float(metrics.get("pass_at_1", np.nan))

    @override(Algorithm)
    def evaluate(
        self,
        parallel_train_future: Any = None,
        *,
        sets: Mapping[str, EvaluationSet] | None = None,
    ) -> dict[str, Any]:
        """Samples every prompt of the evaluation sets and returns pass@1 and more.

        Nothing of it enters training: no buffer, no prompt cycle, no counters. The
        result of each question is in `evaluator.questions` and in the run's folder.

        Args:
            parallel_train_future: of RLlib, unused.
            sets: what to evaluate; None means the sets of the config.
        """
        self._call_back("on_evaluate_start")
        dispatcher = self._build_dispatcher(self._evaluation_group())
        sets = self.config.build_evaluation_sets() if sets is None else sets
        # RLlib counts the step, after which it evaluates, only once that is over.
        steps_made = self.iteration + self._is_in_step
        metrics = self.evaluator.run(sets, dispatcher, steps_made)
        self._call_back("on_evaluate_end", evaluation_metrics=metrics)
        return metrics

    def _evaluation_group(self) -> EnvRunnerGroup:
        """Returns the evaluation's own remote env runners, or else those of training.

        A second engine beside the training one would only take its memory.
        """
        group = self.eval_env_runner_group
        if group is None or group.num_remote_env_runners() == 0:
            return self.env_runner_group
        self._push_weights(group)
        return group

    def _call_back(self, event: str, **kwargs: Any) -> None:
        make_callback(
            event,
            callbacks_objects=self.callbacks,
            callbacks_functions=getattr(self.config, f"callbacks_{event}"),
            kwargs={"algorithm": self, "metrics_logger": self.metrics, **kwargs},
        )

    # --- state

    def _never_overwrite_checkpoints(self) -> None:
        """Counts on from the checkpoints that an earlier part of the run has left.

        Tune's own count is behind them after a kill.
        """
        if (storage := self._storage) is not None:
            last = last_index(storage.trial_fs_path, storage.storage_filesystem)
            storage.current_checkpoint_index = max(
                storage.current_checkpoint_index, last
            )

    @override(Algorithm)
    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Saves a checkpoint as Tune wants it, and marks it once it is whole."""
        with TemporaryDirectory() as passing:  # Tune leaves its own after an error
            own = passing if checkpoint_dir is None and self._storage else None
            result = super().save(own or checkpoint_dir)
        checkpoint = result.checkpoint
        mark_complete(checkpoint.path, checkpoint.filesystem, self.iteration)
        return result

    @override(Algorithm)
    def get_checkpointable_components(self) -> list[tuple[str, Checkpointable]]:
        """Adds the replay buffer to RLlib's components."""
        components = super().get_checkpointable_components()
        return [*components, (COMPONENT_REPLAY_BUFFER, self.replay_buffer)]

    @override(Algorithm)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns everything that the next step depends on."""
        state = super().get_state(components, not_components=not_components, **kwargs)
        if self._check_component(COMPONENT_REPLAY_BUFFER, components, not_components):
            state[COMPONENT_REPLAY_BUFFER] = self.replay_buffer.get_state()
        if self._check_component(EXGRPO_STATE, components, not_components):
            state[EXGRPO_STATE] = {
                "run_seed": self._run_seed,
                "time_total_s": self._time_total,
                "replay_is_active": self.replay_is_active,
                "prompt_cycle": self.prompt_cycle.get_state(),
            }
        return state

    @override(Algorithm)
    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state of `get_state`."""
        super().set_state(state)
        if COMPONENT_REPLAY_BUFFER in state:
            self.replay_buffer.set_state(state[COMPONENT_REPLAY_BUFFER])
        if EXGRPO_STATE in state:
            own = state[EXGRPO_STATE]
            self._run_seed = own["run_seed"]
            self._time_total = own["time_total_s"]
            self.replay_is_active = own["replay_is_active"]
            self.prompt_cycle.set_state(own["prompt_cycle"])
            self._rollout = self._build_dispatcher(self.env_runner_group)
            self._audit.forget_after(self.iteration)
        self._push_weights(self.env_runner_group)

    @override(Algorithm)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        """Returns what rebuilds this algorithm; its experience is in its own buffer."""
        config = self.config.copy(copy_frozen=False)
        knobs = dict(config.replay_buffer_config)
        knobs.pop("warm_start", None)
        config.replay_buffer_config = knobs
        return (config.get_state(),), {}

    @classmethod
    @override(Algorithm)
    def from_checkpoint(
        cls,
        path: Any,
        filesystem: FileSystem | None = None,
        *,
        config: ExGRPOConfig | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns an algorithm that goes on from a checkpoint.

        Args:
            path: of its folder.
            filesystem: that holds it, where the path does not say so.
            config: settings in place of the stored ones, such as
                `{"num_env_runners": 0}`; or a whole config.
            kwargs: RLlib's own.
        """
        if isinstance(config, Mapping):
            is_tunes = isinstance(path, Checkpoint)
            place = (path.path, path.filesystem) if is_tunes else (path, filesystem)
            checkpoint = Folder.at(*place)
            state = config_state(checkpoint.path, checkpoint.filesystem)
            config = ExGRPOConfig.from_state(state).update_from_dict(dict(config))
        if config is not None:
            kwargs["config"] = config
        return super().from_checkpoint(path, filesystem, **kwargs)

    @override(Algorithm)
    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Restores a checkpoint, its weights into the engines too."""
        super().restore_from_path(path, *args, **kwargs)
        self._push_weights(self.env_runner_group)
        if kwargs.get("component") is None and self.config.replay_ratio > 0:
            self._warn_of_lost_experience(Folder.at(path, kwargs.get("filesystem")))

    def _warn_of_lost_experience(self, checkpoint: Folder) -> None:
        """Warns of a checkpoint without a buffer; RLlib passes it over in silence."""
        buffer = checkpoint.file(COMPONENT_REPLAY_BUFFER)
        if checkpoint.filesystem.get_file_info(buffer).type == FileType.NotFound:
            logger.warning(
                "%s holds no replay buffer: the run goes on with the experience it has "
                "itself, %d completions.",
                checkpoint.path,
                self.replay_buffer.num_completions,
            )


def build_replay_buffer(
    config: ExGRPOConfig, seed: int, prompts: PromptBook
) -> ExGRPOReplayBuffer:
    """Builds the replay buffer, with another run's experience if that is asked for.

    Raises:
        ValueError: if that experience does not fit this run.
    """
    metadata = {
        "model": config.model_name_or_path,
        "tokenizer": tokenizer_hash(prompts.tokenizer),
        "environment": getattr(config.env, "__name__", str(config.env)),
    }
    buffer = config.build_replay_buffer(seed, metadata)
    path = config.replay_buffer_config.get("warm_start")
    if path is not None:
        warm_start(buffer, find_buffer(path), prompts.ids)
    return buffer


def fresh_seed() -> int:
    """Returns a seed from the system's entropy, for runs without one."""
    return int(np.random.SeedSequence().generate_state(1)[0])
