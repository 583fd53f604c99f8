"""The env runner: hosts vLLM and a text environment, samples and verifies."""

import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import ray
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import (
    EPISODE_LEN_MEAN,
    EPISODE_RETURN_MEAN,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
    WEIGHTS_SEQ_NO,
)

from rllib_exgrpo import text_env
from rllib_exgrpo.evaluation.sets import EvaluationSet
from rllib_exgrpo.exgrpo_env import find_env
from rllib_exgrpo.exgrpo_episodes import episodes_from_group
from rllib_exgrpo.judging import Judging
from rllib_exgrpo.policy import load_tokenizer
from rllib_exgrpo.prompt_book import PromptBook
from rllib_exgrpo.prompts import PromptCycle
from rllib_exgrpo.records import (
    Completion,
    Group,
    RolloutRequest,
    RolloutResult,
)
from rllib_exgrpo.sampler import Sample, VLLMSampler, check_log_probs


class ExGRPOEnvRunner(EnvRunner, Checkpointable):
    """Samples completions with vLLM and has the environment verify them.

    The algorithm calls `rollout`, which returns groups. `sample` is RLlib's interface
    to the same and returns single-step episodes.
    """

    env: Any

    @override(EnvRunner)
    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self._env_creator = kwargs.get("env_creator")
        self._weights_version = 0
        self._pending_weights: dict[str, Any] | None = None
        self._num_sample_calls = 0
        self._evaluation_envs: dict[str, Any] = {}
        self.make_env()
        if self.hosts_engine and not self.config.in_evaluation:
            self.sampler  # noqa: B018 (starts the engine while the others start theirs)

    @property
    def hosts_engine(self) -> bool:
        """Whether this runner samples; the local one does not if others are there."""
        return bool(self.worker_index) or self.num_workers == 0

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        config = self.config
        return load_tokenizer(
            config.model_name_or_path, trust_remote_code=config.trust_remote_code
        )

    @cached_property
    def formatter(self) -> Any:
        """Turns messages into prompt token ids."""
        return self.config.build_prompt_formatter(self.tokenizer)

    @cached_property
    def sampler(self) -> VLLMSampler:
        """The engine, started when first needed."""
        config = self.config
        return VLLMSampler(
            model_name_or_path=config.model_name_or_path,
            tokenizer=self.tokenizer,
            dtype=config.model_dtype,
            max_prompt_tokens=config.max_prompt_tokens,
            max_completion_tokens=config.max_completion_tokens,
            trust_remote_code=config.trust_remote_code,
            config_overrides=config.model_config_overrides,
            engine_kwargs=config.resolved_engine_kwargs(),
        )

    # --- rollouts

    def rollout(self, request: RolloutRequest) -> RolloutResult:
        """Samples and verifies the completions that are asked for.

        Errors come back in the result: an exception that left an actor would make
        RLlib restart it, wait, and hide the cause.
        """
        try:
            return self._rollout(request)
        except Exception:  # any: the environment is the user's code
            if not self.worker_index:
                raise
            return RolloutResult(
                [], self._weights_version, error=traceback.format_exc()
            )

    def _rollout(self, request: RolloutRequest) -> RolloutResult:
        env = self._env_of(request.evaluation_set)
        prompts = [text_env.read_prompt(env, i) for i in request.prompt_ids]
        token_ids = [self.formatter.token_ids(messages) for messages, _ in prompts]
        self._load_pending_weights()

        judging = Judging(env, request, self._decode)
        started = time.perf_counter()
        samples_PG = self.sampler.sample(
            token_ids,
            request.counts,
            temperature=request.temperature,
            seed=request.seed,
            on_finished=judging.on_finished,
        )
        check_log_probs(samples_PG, request.prompt_ids, request.iteration)
        generated = time.perf_counter()
        judged_PG, answers_PG = judging.finish(samples_PG)
        verified = time.perf_counter()

        groups = [
            Group(
                prompt_id=prompt_id,
                prompt_token_ids=ids,
                completions=[
                    self._completion(sample, judgement.reward, request.iteration)
                    for sample, judgement in zip(samples_G, judged_G, strict=True)
                ],
                source=source,
                reasons=[judgement.reason for judgement in judged_G],
                verify_seconds=[judgement.seconds for judgement in judged_G],
                answers=answers_G,
            )
            for prompt_id, ids, (_, source), samples_G, judged_G, answers_G in zip(
                request.prompt_ids,
                token_ids,
                prompts,
                samples_PG,
                judged_PG,
                answers_PG,
                strict=True,
            )
        ]
        return RolloutResult(
            groups=groups,
            weights_version=self._weights_version,
            seconds={"generate": generated - started, "verify": verified - generated},
        )

    def _decode(self, samples: Sequence[Sample]) -> list[str]:
        """Decodes completions, each with the prefix that it goes on from."""
        texts = self.tokenizer.batch_decode(
            [sample.token_ids for sample in samples],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return [self.formatter.assistant_prefix + text for text in texts]

    def _completion(self, sample: Sample, reward: float, iteration: int) -> Completion:
        return Completion(
            token_ids=sample.token_ids,
            behavior_logp=sample.logp,
            reward=reward,
            weights_version=self._weights_version,
            truncated=sample.truncated,
            iteration=iteration,
        )

    @override(EnvRunner)
    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
        **kwargs: Any,
    ) -> list[SingleAgentEpisode]:
        """Samples episodes of one step each, on the next prompts of the environment.

        Args:
            num_timesteps: how many; the same as `num_episodes`.
            num_episodes: how many; by default one group.
            explore: False samples greedily.
            random_actions: not supported; completions come from the model.
            force_reset: of RLlib; every episode starts anew.
            kwargs: of RLlib, unused.
        """
        count = num_episodes or num_timesteps or self.config.group_size
        explore = self.config.explore if explore is None else explore
        group_size = min(count, self.config.group_size)
        num_prompts = -(-count // group_size)
        self._num_sample_calls += 1
        request = RolloutRequest(
            prompt_ids=self._cycle.draw(num_prompts, is_usable=self._book.is_usable),
            counts=[group_size] * num_prompts,
            temperature=self.config.temperature if explore else 0.0,
            seed=(self._seed or 0) + self._num_sample_calls,
        )
        episodes = [
            episode
            for group in self._rollout(request).groups
            for episode in episodes_from_group(group, self.tokenizer)
        ]
        self._done_episodes = list(islice(episodes, count))
        return self._done_episodes

    @cached_property
    def _cycle(self) -> PromptCycle:
        return PromptCycle(self._book.ids, seed=self._seed)

    @cached_property
    def _book(self) -> PromptBook:
        return self.config.build_prompt_book(self.env, self.tokenizer)

    @override(EnvRunner)
    def get_metrics(self) -> Any:
        """Returns RLlib's standard metrics of the episodes of the last `sample`."""
        episodes, self._done_episodes = getattr(self, "_done_episodes", []), []
        count = len(episodes)
        self.metrics.log_value(NUM_ENV_STEPS_SAMPLED, count, reduce="sum")
        self.metrics.log_value(
            NUM_ENV_STEPS_SAMPLED_LIFETIME, count, reduce="lifetime_sum"
        )
        self.metrics.log_value(NUM_EPISODES, count, reduce="sum")
        for episode in episodes:
            self.metrics.log_value(
                EPISODE_RETURN_MEAN, episode.get_return(), window=count
            )
            self.metrics.log_value(EPISODE_LEN_MEAN, len(episode), window=count)
        return self.metrics.reduce()

    # --- environments

    @override(EnvRunner)
    def make_env(self) -> None:
        """Creates the environment anew."""
        if self.env is not None:
            self.env.close()
        self.env = self._create_env(self._env_creator, self.config.env_config)

    def _env_of(self, evaluation_set: EvaluationSet | None) -> Any:
        """Returns the environment of an evaluation set, made when first needed."""
        if evaluation_set is None:
            return self.env
        name, env = evaluation_set.name, evaluation_set.env
        if name not in self._evaluation_envs:
            # A name may be registered in the driver's process alone.
            is_same = env == self.config.env
            self._evaluation_envs[name] = self._create_env(
                self._env_creator if is_same else find_env(env),
                evaluation_set.env_config,
            )
        return self._evaluation_envs[name]

    def _create_env(self, creator: Any, env_config: Mapping[str, Any]) -> Any:
        context = EnvContext(
            env_config,
            worker_index=self.worker_index or 0,
            num_workers=self.num_workers,
        )
        return creator(context)

    @override(EnvRunner)
    def get_spaces(self) -> dict[str, Any]:
        """Returns the text spaces of the environment."""
        spaces = (self.env.observation_space, self.env.action_space)
        return {
            INPUT_ENV_SPACES: spaces,
            INPUT_ENV_SINGLE_SPACES: spaces,
            DEFAULT_MODULE_ID: spaces,
        }

    # --- state

    @override(Checkpointable)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns counters; the weights are the learners' to save."""
        return {WEIGHTS_SEQ_NO: self._weights_version}

    @override(Checkpointable)
    def set_state(self, state: dict[str, Any]) -> None:
        """Takes new weights, of whatever version, and loads them into the engine."""
        if COMPONENT_RL_MODULE not in state or not self.hosts_engine:
            return
        weights = state[COMPONENT_RL_MODULE]
        weights = ray.get(weights) if isinstance(weights, ray.ObjectRef) else weights
        self._pending_weights = weights[DEFAULT_MODULE_ID]
        self._weights_version = state.get(WEIGHTS_SEQ_NO, self._weights_version)
        if "sampler" in vars(self):
            self._load_pending_weights()

    def _load_pending_weights(self) -> None:
        sampler = self.sampler
        if self._pending_weights is not None:
            sampler.load_weights(self._pending_weights)
            self._pending_weights = None

    def transfer(self, step: str, *arguments: Any) -> None:
        """Has the engine take a step of vLLM's own weight transfer."""
        self.sampler.transfer(step, *arguments)

    def set_weights_version(self, version: int) -> None:
        """Notes which weights the engine has got by its own transfer."""
        self._weights_version = version

    @override(Checkpointable)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns what rebuilds this runner."""
        return (), {"config": self.config}

    @override(EnvRunner)
    def assert_healthy(self) -> None:
        """Raises if there is no environment."""
        if self.env is None:
            raise AssertionError("The env runner has no environment.")

    @override(EnvRunner)
    def stop(self) -> None:
        """Shuts the engine and the environments down."""
        if "sampler" in vars(self):
            self.sampler.close()
            del self.sampler
        for env in (self.env, *self._evaluation_envs.values()):
            env.close()
