"""The prompts of an environment as token ids, checked at start and when drawn."""

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.prompt_format import Message, PromptFormatter
from rllib_exgrpo.records import PromptId
from rllib_exgrpo.text_env import prompt_ids, questions, read_prompt

logger = logging.getLogger(__name__)

MAX_CHECKED_AT_START = 20_000
"""Of more prompts, so many are checked at start and the others when they are drawn."""

_BATCH_SIZE = 1000
_MAX_LISTED = 5


class PromptBook:
    """The prompts of an environment as token ids, checked against two policies.

    Args:
        env: the environment.
        formatter: turns messages into token ids; it truncates if `long_prompts` is
            "truncate_left", and reads special tokens' text by `special_token_text`.
        max_prompt_tokens: longest prompt.
        long_prompts: "error" refuses longer prompts, "drop" leaves them out,
            "truncate_left" keeps their last tokens.
        special_token_text: what to do with prompts that hold the text of a special
            token: "split" reads it as ordinary text, "keep" as the token, "drop" and
            "error" as above.

    Attributes:
        env: as given.
        tokenizer: that of the formatter.
        ids: the prompt ids, in the environment's order. Of an environment with at most
            `MAX_CHECKED_AT_START` prompts, only the usable ones.

    Raises:
        ValueError: for a prompt that its policy refuses, or if none is left.
    """

    def __init__(
        self,
        env: Any,
        formatter: PromptFormatter,
        *,
        max_prompt_tokens: int,
        long_prompts: str = "error",
        special_token_text: str = "split",
    ) -> None:
        self.env = env
        self.tokenizer = formatter.tokenizer
        self._formatter = formatter
        self._limit = max_prompt_tokens
        self._long_prompts = long_prompts
        self._special_token_text = special_token_text
        self._num_left_out = 0
        self.ids: Sequence[PromptId] = prompt_ids(env)
        self._is_checked = len(self.ids) <= MAX_CHECKED_AT_START
        left_out, lines = self._check(self.ids[:MAX_CHECKED_AT_START])
        for line in lines:
            logger.warning("%s", line)
        if self._is_checked:
            self.ids = [i for i in self.ids if i not in left_out]
        else:
            self._announce_later_checks()
        if not len(self.ids):
            raise ValueError(" ".join([*lines, "No prompt is left."]))

    def token_ids(self, prompt_id: PromptId) -> NDArray[np.int32]:
        """Returns the (T,) int32 token ids of a prompt."""
        messages, _ = read_prompt(self.env, prompt_id)
        return self._formatter.token_ids(messages)

    def is_usable(self, prompt_id: PromptId) -> bool:
        """Whether a prompt may be drawn; checks it if that was left for later.

        Raises:
            ValueError: for a prompt that its policy refuses.
        """
        if self._is_checked:
            return True
        left_out, lines = self._check([prompt_id])
        self._num_left_out += len(left_out)
        # At 1, 2, 4, 8, ... prompts, so that the log stays short.
        if left_out and self._num_left_out.bit_count() == 1:
            logger.warning(
                "When drawn: %s (%d prompts so far)", lines[0], self._num_left_out
            )
        return not left_out

    def usable_ids(self, limit: int | None = None) -> list[PromptId]:
        """Returns the first usable ids, all of them without a limit."""
        return list(islice(filter(self.is_usable, self.ids), limit))

    def _announce_later_checks(self) -> None:
        logger.warning(
            "%s: the first %d of %d prompts were checked for length and special "
            "tokens, the others are checked when drawn.%s",
            type(self.env.unwrapped).__name__,
            MAX_CHECKED_AT_START,
            len(self.ids),
            " One that is too long will stop the run then; `long_prompts`='drop' "
            "leaves it out."
            if self._long_prompts == "error"
            else "",
        )

    def _check(self, ids: Sequence[PromptId]) -> tuple[set[PromptId], list[str]]:
        """Checks prompts by the policies.

        Returns:
            The ids that are left out, and one line for each kind of finding.
        """
        unreadable: dict[PromptId, str] = {}
        lengths: dict[PromptId, int] = {}
        special: list[PromptId] = []
        for start in range(0, len(ids), _BATCH_SIZE):
            prompts = self._read(ids[start : start + _BATCH_SIZE], unreadable)
            token_ids = self._formatter.whole_token_ids([*prompts.values()])
            lengths |= {i: len(t) for i, t in zip(prompts, token_ids, strict=True)}
            has_text = self._formatter.has_special_token_text
            special += [i for i, messages in prompts.items() if has_text(messages)]
        long = {i: n for i, n in lengths.items() if n > self._limit}
        lines = (
            [f"{len(unreadable)} rows: {_listed(unreadable.values())}"]
            if unreadable
            else []
        )
        name = f"{len(ids)} prompts of {type(self.env.unwrapped).__name__}"
        if long:
            lines.append(self._judge_long(name, long))
        if special:
            lines.append(self._judge_special(name, special))
        left_out = set(unreadable)
        left_out |= set(long) if self._long_prompts == "drop" else set()
        left_out |= set(special) if self._special_token_text == "drop" else set()
        return left_out, lines

    def _read(
        self, ids: Sequence[PromptId], unreadable: dict[PromptId, str]
    ) -> dict[PromptId, list[Message]]:
        """Reads prompts; those that the environment refuses go into `unreadable`."""
        prompts: dict[PromptId, list[Message]] = {}
        for prompt_id in ids:
            try:
                prompts[prompt_id], _ = read_prompt(self.env, prompt_id)
            except KeyError as error:  # it reads rows when asked, and may find bad ones
                unreadable[prompt_id] = str(error)
        return prompts

    def _judge_long(self, name: str, long: dict[PromptId, int]) -> str:
        found = (
            f"{len(long)} of {name} have more than `max_prompt_tokens`={self._limit} "
            "tokens after formatting: "
            f"{_listed([f'{i!r} ({n})' for i, n in long.items()])}."
        )
        if self._long_prompts == "error":
            raise ValueError(
                f"{found} Raise `max_prompt_tokens` to {max(long.values())}, or set "
                "`long_prompts` to 'drop', which leaves them out, or to "
                "'truncate_left', which keeps their last tokens."
            )
        what = "left out" if self._long_prompts == "drop" else "cut on the left"
        return f"{found} They are {what}."

    def _judge_special(self, name: str, special: list[PromptId]) -> str:
        found = (
            f"{len(special)} of {name} hold the text of a special token: "
            f"{_listed(map(repr, special))}."
        )
        if self._special_token_text == "error":
            raise ValueError(
                f"{found} Set `special_token_text` to 'split', which reads it as "
                "ordinary text, or to 'drop', which leaves them out, or to 'keep' "
                "where such tokens are meant."
            )
        what = {
            "split": "It is read as ordinary text.",
            "keep": "It is read as that token.",
            "drop": "They are left out.",
        }
        return f"{found} {what[self._special_token_text]}"


def overlapping_questions(
    training_env: Any, evaluation_env: Any
) -> tuple[list[int], int]:
    """Finds the evaluation questions that are training questions too.

    Questions are compared without case and white space, in columns: a million of them
    take seconds.

    Returns:
        Their numbers in the evaluation environment's questions, counted from 0, and
        how many questions that has.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    evaluated = pa.chunked_array([*map(_normalised, questions(evaluation_env))])
    found = [
        texts.filter(pc.is_in(texts, value_set=evaluated))
        for texts in map(_normalised, questions(training_env))
    ]
    is_shared = pc.is_in(evaluated, value_set=pa.chunked_array(found, pa.string()))
    return np.flatnonzero(is_shared.to_numpy()).tolist(), len(evaluated)


def _normalised(texts: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = pc.utf8_lower(pa.array(texts, pa.string()))
    for space in " \n\t\r":
        texts = pc.replace_substring(texts, space, "")
    return texts


def _listed(texts: Iterable[str]) -> str:
    texts = list(texts)
    return ", ".join(texts[:_MAX_LISTED]) + ", ..." * (len(texts) > _MAX_LISTED)
