"""Evaluations of an algorithm: samples the sets and keeps the results on disk."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.env.env_context import EnvContext

from rllib_exgrpo.evaluation.examples import Example, choose_examples, write_examples
from rllib_exgrpo.evaluation.metrics import evaluation_metrics
from rllib_exgrpo.evaluation.questions import (
    Question,
    question_from_group,
    write_questions,
)
from rllib_exgrpo.evaluation.sets import UNNAMED, EvaluationSet
from rllib_exgrpo.exgrpo_config import ExGRPOConfig
from rllib_exgrpo.exgrpo_rollout import RolloutDispatcher
from rllib_exgrpo.policy import (
    check_model_length,
    load_model_config,
    load_tokenizer,
)
from rllib_exgrpo.records import Group, PromptId
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.text_env import PromptBook, prompt_ids


class Evaluator:
    """Samples the evaluation sets of a run.

    Args:
        config: of the algorithm.
        folder: where the results of each evaluation are kept.

    Attributes:
        questions: the results of the latest evaluation.
        examples: some of its completions as text.
    """

    def __init__(self, config: ExGRPOConfig, folder: Folder) -> None:
        self._config = config
        self._folder = folder
        self._prompt_ids: dict[str, list[PromptId]] = {}
        self.questions: list[Question] = []
        self.examples: list[Example] = []

    def run(
        self,
        sets: Mapping[str, EvaluationSet],
        dispatcher: RolloutDispatcher,
        iteration: int,
    ) -> dict[str, Any]:
        """Evaluates sets, each problem of them once.

        Args:
            sets: by name.
            dispatcher: of the env runners, which have the weights to evaluate.
            iteration: training steps so far.

        Returns:
            Metric name to value; those of a named set in a dict under its name.
        """
        metrics: dict[str, Any] = {}
        self.questions, self.examples = [], []
        for index, chosen in enumerate(sets.values()):
            # The even ones are for training.
            groups = self._sample(chosen, dispatcher, iteration, stream=2 * index + 1)
            questions = [
                question_from_group(
                    group,
                    evaluation_set=chosen.name,
                    iteration=iteration,
                    success_threshold=self._config.success_threshold,
                )
                for group in groups
            ]
            found = evaluation_metrics(questions)
            metrics |= found if chosen.name == UNNAMED else {chosen.name: found}
            self.examples += choose_examples(questions, groups, self._decode)
            self.questions += questions
        write_questions(self._folder, iteration, self.questions)
        write_examples(self._folder, iteration, self.examples)
        return metrics

    def _sample(
        self,
        chosen: EvaluationSet,
        dispatcher: RolloutDispatcher,
        iteration: int,
        stream: int,
    ) -> list[Group]:
        if chosen.name not in self._prompt_ids:
            book = open_prompts(self._config, chosen)
            self._prompt_ids[chosen.name] = book.ids[: chosen.max_prompts]
        prompt_ids = self._prompt_ids[chosen.name]
        dispatcher.start(
            prompt_ids,
            [chosen.samples] * len(prompt_ids),
            temperature=chosen.temperature,
            steps_done=iteration,
            evaluation_set=chosen,
            stream=stream,
        )
        return [group for result in dispatcher.collect() for group in result.groups]

    def _decode(self, token_ids: Any) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(
            self._config.model_name_or_path,
            trust_remote_code=self._config.trust_remote_code,
        )


def create_env(
    config: ExGRPOConfig, evaluation_set: EvaluationSet | None = None
) -> Any:
    """Creates the environment of an evaluation set; None means that of training."""
    place: Any = config if evaluation_set is None else evaluation_set
    _, creator = Algorithm._get_env_id_and_creator(place.env, config)
    return creator(EnvContext(place.env_config, worker_index=0))


def open_prompts(
    config: ExGRPOConfig, evaluation_set: EvaluationSet | None = None
) -> PromptBook:
    """Opens the tokenizer and an environment of a config and checks all prompts.

    Args:
        config: of the algorithm.
        evaluation_set: whose environment to open; None means that of training.

    Raises:
        ValueError: for an environment, model or prompt that cannot be used.
    """
    env = create_env(config, evaluation_set)
    prompt_ids(env)  # reads the problems, before a model is looked for
    tokenizer = load_tokenizer(
        config.model_name_or_path, trust_remote_code=config.trust_remote_code
    )
    check_model_length(
        load_model_config(
            config.model_name_or_path,
            trust_remote_code=config.trust_remote_code,
            overrides=config.model_config_overrides,
        ),
        config.max_prompt_tokens,
        config.max_completion_tokens,
    )
    return PromptBook(
        env,
        config.build_prompt_formatter(tokenizer),
        max_prompt_tokens=config.max_prompt_tokens,
        long_prompts=config.long_prompts,
    )
