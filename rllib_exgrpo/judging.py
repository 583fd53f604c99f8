"""The verification of a rollout's completions, while others are sampled if possible."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, repeat
from typing import Any, TypeVar

from rllib_exgrpo import text_env
from rllib_exgrpo.records import RolloutRequest
from rllib_exgrpo.sampler import Sample

T = TypeVar("T")


class Judging:
    """Has an environment judge the completions of one rollout.

    Args:
        env: the environment.
        request: what is sampled.
        decode: makes texts of completions.
    """

    def __init__(
        self,
        env: Any,
        request: RolloutRequest,
        decode: Callable[[Sequence[Sample]], list[str]],
    ) -> None:
        self._env = env
        self._request = request
        self._decode = decode
        self._texts: dict[int, list[str]] = {}
        self._pending: dict[int, Callable[[], list[text_env.Judgement]]] = {}

    @property
    def on_finished(self) -> Callable[[int, list[Sample]], None] | None:
        """What starts to judge a prompt's completions; None if that has to wait."""
        return self._start if text_env.judges_early(self._env) else None

    def _start(self, position: int, samples_G: list[Sample]) -> None:
        texts = self._texts[position] = self._decode(samples_G)
        ids = [self._request.prompt_ids[position]] * len(texts)
        self._pending[position] = text_env.start_judging(self._env, texts, ids)

    def finish(
        self, samples_PG: Sequence[Sequence[Sample]]
    ) -> tuple[list[list[text_env.Judgement]], list[list[str | None] | None]]:
        """Waits for the judgements.

        Args:
            samples_PG: all completions of each prompt.

        Returns:
            The judgements and, in an evaluation, the answers of each group.
        """
        counts = self._request.counts
        positions = range(len(counts))
        if self.on_finished is not None:
            texts = [*chain.from_iterable(self._texts[i] for i in positions)]
            judged_PG = [self._pending[i]() for i in positions]
        else:
            texts = self._decode([*chain.from_iterable(samples_PG)])
            ids = chain.from_iterable(map(repeat, self._request.prompt_ids, counts))
            judged = text_env.start_judging(self._env, texts, list(ids))()
            judged_PG = _split(judged, counts)
        answers = None
        if self._request.evaluation_set is not None:
            answers = text_env.answer_keys(self._env, texts)
        if answers is None:
            return judged_PG, [None] * len(counts)
        return judged_PG, [*_split(answers, counts)]


def _split(items: Iterable[T], counts: Sequence[int]) -> list[list[T]]:
    """Cuts a sequence into consecutive parts of given lengths."""
    rest = iter(items)
    return [list(islice(rest, count)) for count in counts]
