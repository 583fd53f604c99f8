"""ExGRPO: group-relative policy optimisation that learns from its own past successes.

The paper is arXiv 2510.02245 (v2). Departures from it, all switchable:

- The spread of the bucket draw is sigma = 1 / G in pass-rate units, as in the authors'
  code (1 in counts); the paper's text has 1 (`replay_buffer_config`).
- Fresh tokens are not clipped once replay is active, as in the paper's table 4 and the
  code; its equation 4 clips them (`clip_when_mixed`).
- All completions of a mini-batch weigh the same; equation 4 weighs fresh and replayed
  groups by 1 - rho and rho, which is the same when rho of the prompts are replayed.
- The candidates' entropy is that of the full vocabulary at each token, averaged over
  the completion; the paper writes the negative log-prob of the sampled tokens
  (`completion_selection`).
- A prompt whose latest group has no correct completion moves to bucket 0; the code
  leaves it where it was (`mark_failed`).
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import (
    COMPONENT_LEARNER,
    COMPONENT_RL_MODULE,
    DEFAULT_MODULE_ID,
)
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_LEN_MEAN,
    EPISODE_RETURN_MEAN,
    EVALUATION_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
    NUM_EPISODES_LIFETIME,
    TIMERS,
    WEIGHTS_SEQ_NO,
)
from ray.tune.result import DONE

from rllib_exgrpo.batching import (
    Rows,
    rows_from_candidates,
    rows_from_groups,
    trained_rows,
)
from rllib_exgrpo.checkpoints import last_index, mark_complete
from rllib_exgrpo.evaluation.questions import FOLDER
from rllib_exgrpo.evaluation.sets import UNNAMED, EvaluationSet
from rllib_exgrpo.exgrpo_config import ExGRPOConfig
from rllib_exgrpo.exgrpo_env import find_env
from rllib_exgrpo.exgrpo_evaluation import (
    Evaluator,
    check_evaluation_prompts,
    open_prompts,
)
from rllib_exgrpo.exgrpo_replay import Choice, Draw, ExGRPOReplayBuffer
from rllib_exgrpo.exgrpo_rollout import RolloutDispatcher
from rllib_exgrpo.gpu_memory import check_shared_gpu, learner_memory
from rllib_exgrpo.policy import build_empty, tokenizer_hash
from rllib_exgrpo.prompt_book import PromptBook
from rllib_exgrpo.prompts import PromptCycle
from rllib_exgrpo.records import Completion, Group, PromptId, RolloutResult
from rllib_exgrpo.replay.audit import AUDIT_FOLDER, Audit, audit_table
from rllib_exgrpo.replay.finding import BUFFER_FOLDER, find_buffer
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.replay.transfer import warm_start
from rllib_exgrpo.replay_metrics import replay_metrics
from rllib_exgrpo.resampling import Resampled, resample
from rllib_exgrpo.rollout_correction import rebase
from rllib_exgrpo.rollout_metrics import pass_rate, rollout_metrics
from rllib_exgrpo.versions import write_versions

logger = logging.getLogger(__name__)

COMPONENT_REPLAY_BUFFER = BUFFER_FOLDER
EXGRPO_STATE = "exgrpo"
REPLAY_RESULTS = "replay"
EVALUATION_AT_START = "evaluation_at_start"
CHECKPOINT_SCORE = "checkpoint_score"


class ExGRPO(Algorithm):
    """The algorithm; see `ExGRPOConfig` for its settings."""

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
        self._warn_of_few_prompts()
        if config.evaluation_interval:
            check_evaluation_prompts(config, self._training_prompts)
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
        self._push_weights(self.env_runner_group)
        self._rollout = self._build_dispatcher(self.env_runner_group)
        self._audit = Audit(self._folder(AUDIT_FOLDER))

    def _warn_of_few_prompts(self) -> None:
        there, wanted = len(self._training_prompts.ids), self.config.prompts_per_step
        if there < wanted:
            logger.warning(
                "`prompts_per_step` is %d and the environment has %d prompts: no step "
                "draws a prompt twice, so steps are smaller than asked.",
                wanted,
                there,
            )

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

    # --- the step

    @override(Algorithm)
    def training_step(self) -> None:
        """Makes one step of ExGRPO (algorithm 1 of the paper)."""
        with self._timed("plan"):
            draws, fresh_ids = self._plan()
        if not draws and not fresh_ids:
            self._end_solved()
            return
        with self._timed("rollout"):
            self._start_rollout(draws, fresh_ids)
            # The learners score candidates while remote engines sample.
            choices = self._choose_replayed(draws)
            results = self._rollout.collect()
            replayed = {c.prompt_id: c.completion for c in choices}
            trained, replaced, more = self._resample(_join(results, replayed))
        with self._timed("update"):
            self._update(trained)
        groups = trained + replaced
        with self._timed("record"):
            self._record(groups)
            self._write_audit(groups, choices)
        with self._timed("sync"):
            self._push_weights(self.env_runner_group)
        self._log_step(groups, [results, *more], choices)

    def _end_solved(self) -> None:
        """Ends the run: no prompt is left to learn from."""
        logger.warning(
            "All %d prompts of the training environment are solved (`retired_prompts`="
            "'drop'), so training ends here. Give it more or harder problems to go on.",
            len(self._training_prompts.ids),
        )
        self._is_solved = True

    def _plan(self) -> tuple[list[Draw], list[PromptId]]:
        """Chooses the prompts to replay and the fresh ones."""
        config, buffer = self.config, self.replay_buffer
        draws: list[Draw] = []
        if self.replay_is_active:
            count = min(config.max_replayed_prompts, len(buffer))
            draws = buffer.draw(count, self._weights_version)
        fresh_ids = self.prompt_cycle.draw(
            config.prompts_per_step - len(draws),
            exclude=[draw.prompt_id for draw in draws],
            is_retired=buffer.is_retired,
            is_usable=self._training_prompts.is_usable,
        )
        return draws, fresh_ids

    def _start_rollout(
        self, draws: list[Draw], fresh_ids: list[PromptId], sampling_round: int = 0
    ) -> None:
        size = self.config.group_size
        self._rollout.start(
            [draw.prompt_id for draw in draws] + fresh_ids,
            [size - 1] * len(draws) + [size] * len(fresh_ids),
            temperature=self.config.temperature,
            steps_done=self.iteration,
            stream=2 * sampling_round,  # the odd ones are for evaluation
        )

    def _resample(self, groups: list[Group]) -> Resampled:
        """Replaces fresh groups that teach nothing by new prompts, if asked to."""

        def draw(count: int, exclude: Collection[PromptId]) -> list[PromptId]:
            return self.prompt_cycle.draw(
                count,
                exclude=exclude,
                is_retired=self.replay_buffer.is_retired,
                is_usable=self._training_prompts.is_usable,
            )

        def sample(ids: list[PromptId], sampling_round: int) -> list[RolloutResult]:
            self._start_rollout([], ids, sampling_round)
            return self._rollout.collect()

        cap = self.config.max_resampled_prompts
        return resample(groups, cap, draw=draw, sample=sample)

    def _choose_replayed(self, draws: list[Draw]) -> list[Choice]:
        """Chooses the stored completion of each drawn prompt (section 4.1)."""
        buffer = self.replay_buffer
        scores = None
        with self._timed("score"):
            if draws and buffer.needs_scores:
                scores = self._score_candidates(draws)
        return buffer.choose(draws, scores) if draws else []

    def _score_candidates(self, draws: list[Draw]) -> list[NDArray[np.float32]]:
        """Scores the candidates that the current weights have not scored yet."""
        pairs = [(d.prompt_id, candidate) for d in draws for candidate in d.candidates]
        scores_B = np.concatenate([draw.scores for draw in draws])
        unscored = np.flatnonzero(np.isnan(scores_B))
        if len(unscored):
            prompt_ids, candidates = zip(*(pairs[i] for i in unscored), strict=True)
            prompts = [self._training_prompts.token_ids(i) for i in prompt_ids]
            rows = rows_from_candidates(prompts, candidates)
            entropy_B, nll_B = self.learner_group.score(rows)
            wants_entropy = self.replay_buffer.needs_scores == "entropy"
            scores_B[unscored] = entropy_B if wants_entropy else nll_B
        ends = np.cumsum([len(draw.candidates) for draw in draws])
        return np.split(scores_B, ends[:-1])

    def _update(self, groups: list[Group]) -> None:
        """Makes an optimiser update for each mini-batch of whole groups."""
        config = self.config
        if config.engine_sleeps:  # until the new weights come
            self.env_runner_group.local_env_runner.sampler.sleep()
        mini_batches = self._mini_batches(groups)
        if config.behavior_logp_source == "learner":
            mini_batches = [self._rebase(rows) for rows in mini_batches]
        results = self.learner_group.train(
            mini_batches,
            clip_eps=config.fresh_clip_range(replay_is_active=self.replay_is_active),
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self._num_steps_lifetime},
        )
        self.metrics.aggregate(results, key=LEARNER_RESULTS)
        self._check_rollout_logp_diff()

    def _rebase(self, rows: Rows) -> Rows:
        """Has the learners compute the log-probs of fresh rows, before any update."""
        config = self.config
        index = trained_rows(rows, config.skips_zero_advantages)
        index = index[~rows.replayed_B[index]]
        learner_logp = self.learner_group.token_logp(rows.take(index))
        return rebase(rows, index, learner_logp, config.rollout_correction)

    def _check_rollout_logp_diff(self) -> None:
        """Warns, once in a run, if engine and learner disagree about fresh tokens."""
        bound = self.config.max_rollout_logp_diff
        diff = self.metrics.peek(
            (LEARNER_RESULTS, DEFAULT_MODULE_ID, "rollout_logp_diff_mean")
        )
        exceeds = bound is not None and diff > bound
        if not exceeds or self._has_warned_of_logp_diff:
            return
        self._has_warned_of_logp_diff = True
        logger.warning(
            "Engine and learner disagree by %.3g nats a fresh token, more than "
            "`max_rollout_logp_diff`=%g. Importance ratios are biased by it. With "
            "`model_dtype`='bfloat16' set `behavior_logp_source`='learner' and "
            "`rollout_correction_cap`=2.0, or train in float32; in float32 look for "
            "`engine_kwargs` that change the model (quantisation).",
            diff,
            bound,
        )

    def _mini_batches(self, groups: list[Group]) -> list[Rows]:
        """Deals groups out at random, so that replayed ones spread over the updates."""
        config = self.config
        generator = np.random.default_rng([self._run_seed, self.iteration])
        order = generator.permutation(len(groups))
        size = config.prompts_per_update
        return [
            rows_from_groups(
                [groups[i] for i in order[start : start + size]],
                order[start : start + size],
                normalize_by_std=config.normalize_advantages_by_std,
            )
            for start in range(0, len(groups), size)
        ]

    def _record(self, groups: list[Group]) -> None:
        """Applies the buffer rule, then checks whether replay starts."""
        config = self.config
        collects = config.replay_ratio > 0 and (
            config.collect_before_start or self.replay_is_active
        )
        threshold = config.success_threshold
        self.replay_buffer.record(
            # Prompts retire from the first step on, whatever is collected.
            groups if collects else [g for g in groups if _all_correct(g, threshold)],
            self.iteration + 1,
        )
        rate = config.replay_start_pass_rate
        if config.replay_ratio > 0 and rate is not None:
            self.replay_is_active |= pass_rate(groups, threshold) > rate

    def _write_audit(self, groups: list[Group], choices: list[Choice]) -> None:
        """Writes down what was replayed, and why."""
        if not choices:
            return
        rows = self.learner_group.replayed_rows()
        sums = {groups[int(row[0])].prompt_id: row[1:] for row in rows}
        threshold = self.config.success_threshold
        correct = {g.prompt_id: int((g.rewards_G >= threshold).sum()) for g in groups}
        rule = self.replay_buffer.completion_selection
        self._audit.write(audit_table(self.iteration + 1, rule, choices, sums, correct))

    # --- weights

    def _push_weights(
        self, group: EnvRunnerGroup, runner_ids: list[int] | None = None
    ) -> None:
        """Brings the learners' weights to env runners and waits until they are there.

        RLlib's own `sync_weights` drops a push while another is under way and only
        logs errors; a rollout with old weights would then go unnoticed.
        """
        state = self.learner_group.get_state(
            components=COMPONENT_LEARNER + "/" + COMPONENT_RL_MODULE,
            inference_only=True,
        )[COMPONENT_LEARNER]
        self._weights_version = state[WEIGHTS_SEQ_NO]
        if group.local_env_runner is not None:
            group.local_env_runner.set_state(state)
        if group.num_remote_env_runners() > 0:
            group.foreach_env_runner(
                "set_state",
                kwargs={"state": ray.put(state)},
                local_env_runner=False,
                remote_worker_ids=runner_ids,
            )

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

    # --- metrics

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Logs how long a part of the step took, in seconds."""
        started = perf_counter()
        yield
        self._log((TIMERS,), {f"{part}_s": perf_counter() - started})

    def _log(self, prefix: tuple[str, ...], values: dict[str, float]) -> None:
        for name, value in values.items():
            self.metrics.log_value((*prefix, name), value, window=1)

    @property
    def _num_steps_lifetime(self) -> int:
        key = (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME)
        return int(self.metrics.peek(key, default=0))

    def _log_step(
        self,
        groups: list[Group],
        rounds: list[list[RolloutResult]],
        choices: list[Choice],
    ) -> None:
        metrics = rollout_metrics(
            groups, rounds, success_threshold=self.config.success_threshold
        )
        self._log((ENV_RUNNER_RESULTS,), metrics)
        self._log(
            (ENV_RUNNER_RESULTS,),
            {EPISODE_RETURN_MEAN: metrics["reward_mean"], EPISODE_LEN_MEAN: 1.0},
        )
        count = int(metrics["num_completions"])
        for name, reduce in (
            (NUM_ENV_STEPS_SAMPLED, "sum"),
            (NUM_EPISODES, "sum"),
            (NUM_ENV_STEPS_SAMPLED_LIFETIME, "lifetime_sum"),
            (NUM_EPISODES_LIFETIME, "lifetime_sum"),
        ):
            self.metrics.log_value((ENV_RUNNER_RESULTS, name), count, reduce=reduce)
        self._log(
            (REPLAY_RESULTS,),
            {
                "is_active": float(self.replay_is_active),
                "num_prompts_replayed": float(len(choices)),
                "num_passes": float(self.prompt_cycle.num_passes),
                **self.replay_buffer.get_metrics(),
                **replay_metrics(
                    choices,
                    self._training_prompts.tokenizer.batch_decode(
                        [choice.completion.token_ids for choice in choices]
                    ),
                    self.replay_buffer.needs_scores,
                ),
            },
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

    @override(Algorithm)
    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Restores a checkpoint, its weights into the engines too."""
        super().restore_from_path(path, *args, **kwargs)
        self._push_weights(self.env_runner_group)


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


def _join(
    results: list[RolloutResult], replayed: dict[PromptId, Completion]
) -> list[Group]:
    """Adds the replayed completions to the groups of their prompts."""
    return [
        replace(group, replayed=replayed.get(group.prompt_id))
        for result in results
        for group in result.groups
    ]


def _all_correct(group: Group, success_threshold: float) -> bool:
    return bool((group.rewards_G >= success_threshold).all())
