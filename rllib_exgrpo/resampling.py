"""Dynamic sampling: new prompts in place of fresh groups that teach nothing."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from rllib_exgrpo.advantages import group_advantages
from rllib_exgrpo.records import Group, PromptId, RolloutResult, groups_of


class Resampled(NamedTuple):
    """The outcome of `resample`.

    Attributes:
        trained: as many groups as at first, the ones to train on.
        replaced: fresh groups whose place another one took.
        rounds: what the env runners returned, round by round.
    """

    trained: list[Group]
    replaced: list[Group]
    rounds: list[list[RolloutResult]]


def resample(
    groups: Sequence[Group],
    max_prompts: int,
    *,
    draw: Callable[[int, Collection[PromptId]], list[PromptId]],
    sample: Callable[[list[PromptId], int], list[RolloutResult]],
) -> Resampled:
    """Samples new prompts until all fresh groups teach something, or the cap is met.

    Args:
        groups: of the step; replayed ones stay.
        max_prompts: most prompts to sample.
        draw: gives at most so many fresh prompts, without the excluded ones.
        sample: samples a whole group of each prompt; takes the number of the round too,
            from 1.
    """
    trained, replaced = list(groups), list[Group]()
    rounds: list[list[RolloutResult]] = []
    while True:
        idle = [i for i, group in enumerate(trained) if _is_idle(group)]
        wanted = min(len(idle), max_prompts - len(replaced))
        prompt_ids = draw(wanted, {g.prompt_id for g in trained + replaced})
        if not prompt_ids:
            return Resampled(trained, replaced, rounds)
        rounds.append(sample(prompt_ids, len(rounds) + 1))
        for group in groups_of(rounds[-1]):
            position = idle.pop(0)
            replaced.append(trained[position])
            trained[position] = group


def _is_idle(group: Group) -> bool:
    return group.replayed is None and not group_advantages(group.rewards_G).any()
