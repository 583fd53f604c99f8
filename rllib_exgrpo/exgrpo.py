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
import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from pyarrow.fs import FileSystem
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_RL_MODULE
from ray.rllib.env.env_context import EnvContext
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

from rllib_exgrpo.batching import Rows, rows_from_candidates, rows_from_groups
from rllib_exgrpo.checkpoints import last_index, mark_complete
from rllib_exgrpo.exgrpo_config import ExGRPOConfig
from rllib_exgrpo.exgrpo_replay import Draw
from rllib_exgrpo.exgrpo_rollout import RolloutDispatcher
from rllib_exgrpo.policy import load_tokenizer
from rllib_exgrpo.prompts import PromptCycle
from rllib_exgrpo.records import Completion, Group, PromptId, RolloutResult
from rllib_exgrpo.rollout_metrics import evaluation_metrics, pass_rate, rollout_metrics
from rllib_exgrpo.samples import SAMPLES, sample_texts
from rllib_exgrpo.text_env import PromptBook

logger = logging.getLogger(__name__)

COMPONENT_REPLAY_BUFFER = "replay_buffer"
EXGRPO_STATE = "exgrpo"
REPLAY_RESULTS = "replay"
EVALUATION_AT_START = "evaluation_at_start"


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
        self._training_prompts = open_prompts(config)
        self._evaluation_prompts: PromptBook | None = None
        self._is_solved = False
        self._never_overwrite_checkpoints()
        self._run_seed = fresh_seed() if config.seed is None else int(config.seed)
        self.prompt_cycle = PromptCycle(
            self._training_prompts.ids, self._run_seed, config.retired_prompts
        )
        self.replay_buffer = config.build_replay_buffer(self._run_seed)
        self.replay_is_active = (
            config.replay_ratio > 0 and config.replay_start_pass_rate is None
        )
        super().setup(config)
        self._push_weights(self.env_runner_group)
        self._rollout = self._build_dispatcher(self.env_runner_group)

    @override(Algorithm)
    def _create_local_replay_buffer_if_necessary(self, config: Any) -> None:
        """Keeps RLlib from building a buffer of its own from our settings."""

    def _build_dispatcher(self, group: EnvRunnerGroup) -> RolloutDispatcher:
        return RolloutDispatcher(
            group,
            revive=lambda: self.restore_env_runners(group),
            seed=self._run_seed,
            timeout_s=self.config.sample_timeout_s,
        )

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
            replayed = self._choose_replayed(draws)
            results = self._rollout.collect()
        groups = _join(results, replayed)
        with self._timed("update"):
            self._update(groups)
        with self._timed("record"):
            self._record(groups)
        with self._timed("sync"):
            self._push_weights(self.env_runner_group)
        self._log_step(groups, results)

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
        )
        return draws, fresh_ids

    def _start_rollout(self, draws: list[Draw], fresh_ids: list[PromptId]) -> None:
        size = self.config.group_size
        self._rollout.start(
            [draw.prompt_id for draw in draws] + fresh_ids,
            [size - 1] * len(draws) + [size] * len(fresh_ids),
            temperature=self.config.temperature,
            iteration=self.iteration,
            weights_version=self._weights_version,
        )

    def _choose_replayed(self, draws: list[Draw]) -> dict[PromptId, Completion]:
        """Chooses the stored completion of each drawn prompt (section 4.1)."""
        buffer = self.replay_buffer
        scores = None
        with self._timed("score"):
            if draws and buffer.needs_scores:
                scores = self._score_candidates(draws)
        chosen = buffer.choose(draws, scores) if draws else []
        return {d.prompt_id: c for d, c in zip(draws, chosen, strict=True)}

    def _score_candidates(self, draws: list[Draw]) -> list[NDArray[np.float32]]:
        rows = rows_from_candidates(
            [
                self._training_prompts.token_ids(draw.prompt_id)
                for draw in draws
                for _ in draw.candidates
            ],
            [candidate for draw in draws for candidate in draw.candidates],
        )
        entropy_B, nll_B = self.learner_group.score(rows)
        wanted_B = entropy_B if self.replay_buffer.needs_scores == "entropy" else nll_B
        ends = np.cumsum([len(draw.candidates) for draw in draws])
        return np.split(wanted_B, ends[:-1])

    def _update(self, groups: list[Group]) -> None:
        """Makes an optimiser update for each mini-batch of whole groups."""
        config = self.config
        results = self.learner_group.train(
            self._mini_batches(groups),
            clip_eps=config.fresh_clip_range(replay_is_active=self.replay_is_active),
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self._num_steps_lifetime},
        )
        self.metrics.aggregate(results, key=LEARNER_RESULTS)

    def _mini_batches(self, groups: list[Group]) -> list[Rows]:
        """Deals groups out at random, so that replayed ones spread over the updates."""
        config = self.config
        generator = np.random.default_rng([self._run_seed, self.iteration])
        order = generator.permutation(len(groups))
        size = config.prompts_per_update
        return [
            rows_from_groups(
                [groups[i] for i in order[start : start + size]],
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
            self.iteration,
        )
        rate = config.replay_start_pass_rate
        if config.replay_ratio > 0 and rate is not None:
            self.replay_is_active |= pass_rate(groups, threshold) > rate

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
        result = super().step()
        result[DONE] = self._is_solved
        if at_start is not None:
            result[EVALUATION_AT_START] = at_start
        if at_start is not None or EVALUATION_RESULTS in result:
            result[SAMPLES] = self._evaluation_samples
        return result

    @override(Algorithm)
    def evaluate(self, parallel_train_future: Any = None) -> dict[str, float]:
        """Samples every evaluation prompt and returns pass@1 and more.

        Nothing of it enters training: no buffer, no prompt cycle, no counters.
        """
        config = self.config
        prompts = self._open_evaluation_prompts().ids[: config.evaluation_max_prompts]
        self._call_back("on_evaluate_start")
        group = self._evaluation_group()
        dispatcher = self._build_dispatcher(group)
        greedy = self.evaluation_config.explore is False
        dispatcher.start(
            prompts,
            [config.evaluation_samples_per_prompt] * len(prompts),
            temperature=0.0 if greedy else config.evaluation_temperature,
            iteration=self.iteration,
            weights_version=self._weights_version,
            evaluation=True,
        )
        groups = [group for r in dispatcher.collect() for group in r.groups]
        self._evaluation_samples = sample_texts(groups, self._tokenizer)
        metrics = evaluation_metrics(groups, success_threshold=config.success_threshold)
        self._call_back("on_evaluate_end", evaluation_metrics=metrics)
        return metrics

    @cached_property
    def _tokenizer(self) -> Any:
        config = self.config
        return load_tokenizer(
            config.model_name_or_path, trust_remote_code=config.trust_remote_code
        )

    def _open_evaluation_prompts(self) -> PromptBook:
        if self._evaluation_prompts is None:
            self._evaluation_prompts = open_prompts(self.evaluation_config)
        return self._evaluation_prompts

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

    def _log_step(self, groups: list[Group], results: list[RolloutResult]) -> None:
        metrics = rollout_metrics(
            groups, results, success_threshold=self.config.success_threshold
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
                "num_prompts_replayed": float(
                    sum(g.replayed is not None for g in groups)
                ),
                "num_passes": float(self.prompt_cycle.num_passes),
                **self.replay_buffer.get_metrics(),
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
        self._push_weights(self.env_runner_group)

    @override(Algorithm)
    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Restores a checkpoint, its weights into the engines too.

        Raises:
            ValueError: if a whole checkpoint comes from another number of learners or
                another ZeRO stage; its optimiser state is cut differently.
        """
        if not kwargs.get("component"):
            self._refuse_other_shards(path, kwargs.get("filesystem"))
        super().restore_from_path(path, *args, **kwargs)
        self._push_weights(self.env_runner_group)

    def _refuse_other_shards(self, path: Any, filesystem: Any) -> None:
        saved = _saved_config(path, filesystem)
        for knob in ("num_learners", "zero_stage"):
            own = getattr(self.config, knob)
            if saved.get(knob, own) != own:
                raise ValueError(
                    f"The checkpoint {path} was written with `{knob}`={saved[knob]} "
                    f"and this algorithm has `{knob}`={own}: the optimiser state "
                    f"does not fit. Build it with `{knob}`={saved[knob]}, or "
                    "restore the weights alone, from "
                    "'CHECKPOINT/learner_group/learner/rl_module' with "
                    "component='learner_group/learner/rl_module'."
                )


def _saved_config(path: Any, filesystem: Any) -> dict[str, Any]:
    """Reads the config of a checkpoint; RLlib pickles it beside the state."""
    if filesystem is None:
        filesystem, path = FileSystem.from_uri(str(path))
    file = Path(path) / Checkpointable.CLASS_AND_CTOR_ARGS_FILE_NAME
    with filesystem.open_input_stream(file.as_posix()) as stream:
        positional, _ = pickle.load(stream)["ctor_args_and_kwargs"]
    return positional[0]


def open_prompts(config: ExGRPOConfig) -> PromptBook:
    """Opens the environment and tokenizer of a config and checks all prompts.

    Raises:
        ValueError: for an environment, model or prompt that cannot be used.
    """
    tokenizer = load_tokenizer(
        config.model_name_or_path, trust_remote_code=config.trust_remote_code
    )
    return PromptBook(
        open_environment(config),
        config.build_prompt_formatter(tokenizer),
        max_prompt_tokens=config.max_prompt_tokens,
        long_prompts=config.long_prompts,
    )


def open_environment(config: ExGRPOConfig) -> Any:
    """Creates the environment of a config."""
    _, create_env = Algorithm._get_env_id_and_creator(config.env, config)
    return create_env(EnvContext(config.env_config, worker_index=0))


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
