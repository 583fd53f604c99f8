"""Evaluations of an algorithm: samples the sets and keeps the results on disk."""

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

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
from rllib_exgrpo.exgrpo_env import find_env
from rllib_exgrpo.exgrpo_rollout import RolloutDispatcher
from rllib_exgrpo.policy import (
    check_model_length,
    load_model_config,
    load_tokenizer,
)
from rllib_exgrpo.prompt_book import PromptBook, overlapping_questions
from rllib_exgrpo.records import Group, PromptId, groups_of
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.text_env import prompt_ids

logger = logging.getLogger(__name__)


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
            self._prompt_ids[chosen.name] = book.usable_ids(chosen.max_prompts)
        prompt_ids = self._prompt_ids[chosen.name]
        dispatcher.start(
            prompt_ids,
            [chosen.samples] * len(prompt_ids),
            temperature=chosen.temperature,
            steps_done=iteration,
            evaluation_set=chosen,
            stream=stream,
        )
        return groups_of(dispatcher.collect())

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
    return find_env(place.env)(EnvContext(place.env_config, worker_index=0))


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
    try:
        return _open_prompts(config, evaluation_set)
    except (ValueError, OSError, ImportError) as error:
        if evaluation_set is None:
            raise
        raise ValueError(f"In {_described(evaluation_set)}: {error}") from error


def _open_prompts(
    config: ExGRPOConfig, evaluation_set: EvaluationSet | None
) -> PromptBook:
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
    return config.build_prompt_book(env, tokenizer)


def warn_of_few_prompts(config: ExGRPOConfig, training: PromptBook) -> None:
    """Warns of steps that cannot be as large as asked for."""
    there, wanted = len(training.ids), config.prompts_per_step
    if there < wanted:
        logger.warning(
            "`prompts_per_step` is %d and the environment has %d prompts: no step "
            "draws a prompt twice, so steps are smaller than asked.",
            wanted,
            there,
        )


def check_evaluation_prompts(config: ExGRPOConfig, training: PromptBook) -> None:
    """Checks the prompts of all evaluation sets, and that training does not have them.

    Raises:
        ValueError: for a set that cannot be used, or that shares questions with
            training if `prompt_overlap` is "error".
    """
    for evaluation_set in config.build_evaluation_sets().values():
        book = open_prompts(config, evaluation_set)
        if config.prompt_overlap == "ignore":
            continue
        shared, count = overlapping_questions(training.env, book.env)
        if not shared:
            continue
        numbers = ", ".join(map(str, shared[:10])) + ", ..." * (len(shared) > 10)
        found = (
            f"{len(shared)} of {count} questions of {_described(evaluation_set)} are "
            f"training questions too, case and white space aside (numbers {numbers}, "
            "counted from 0): scores on them do not measure what is learnt for others."
        )
        if config.prompt_overlap == "error":
            raise ValueError(
                f"{found} Take them out of one of the two, or set `prompt_overlap` to "
                "'warn'."
            )
        logger.warning("%s", found)


def _described(evaluation_set: EvaluationSet) -> str:
    name = evaluation_set.name
    return "`evaluation_config`" if name == UNNAMED else f"the evaluation set {name!r}"
