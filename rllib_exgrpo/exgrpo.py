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
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_LEN_MEAN,
    EPISODE_RETURN_MEAN,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
    NUM_EPISODES_LIFETIME,
    TIMERS,
)

from rllib_exgrpo.batching import (
    Rows,
    rows_from_candidates,
    rows_from_groups,
    trained_rows,
)
from rllib_exgrpo.exgrpo_lifecycle import ExGRPOLifecycle
from rllib_exgrpo.exgrpo_replay import Choice, Draw
from rllib_exgrpo.records import (
    Completion,
    Group,
    PromptId,
    RolloutResult,
    groups_of,
)
from rllib_exgrpo.replay.audit import audit_table
from rllib_exgrpo.replay_metrics import replay_metrics
from rllib_exgrpo.resampling import Resampled, resample
from rllib_exgrpo.rollout_correction import rebase
from rllib_exgrpo.rollout_metrics import pass_rate, rollout_metrics

logger = logging.getLogger(__name__)

REPLAY_RESULTS = "replay"


class ExGRPO(ExGRPOLifecycle):
    """The algorithm; see `ExGRPOConfig` for its settings.

    Here is the training step; what surrounds it is in `ExGRPOLifecycle`.
    """

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


def _join(
    results: list[RolloutResult], replayed: dict[PromptId, Completion]
) -> list[Group]:
    """Adds the replayed completions to the groups of their prompts."""
    return [
        replace(group, replayed=replayed.get(group.prompt_id))
        for group in groups_of(results)
    ]


def _all_correct(group: Group, success_threshold: float) -> bool:
    return bool((group.rewards_G >= success_threshold).all())
