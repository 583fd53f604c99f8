import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_exgrpo.prompts import PromptCycle


def test_each_pass_holds_every_prompt_once():
    cycle = PromptCycle(list("abcdef"), seed=3)
    first, second = cycle.draw(6), cycle.draw(6)
    assert sorted(first) == sorted(second) == list("abcdef")
    assert first != second  # another permutation


def test_same_seed_same_order():
    ids = list(range(100))
    assert PromptCycle(ids, seed=1).draw(50) == PromptCycle(ids, seed=1).draw(50)
    assert PromptCycle(ids, seed=1).draw(50) != PromptCycle(ids, seed=2).draw(50)


def test_a_replayed_prompt_keeps_its_place():
    cycle = PromptCycle(list(range(10)), seed=0)
    order = PromptCycle(list(range(10)), seed=0).draw(10)
    drawn = cycle.draw(4, exclude=[order[0]])
    assert drawn == order[1:5]
    assert cycle.draw(3) == [order[0], *order[5:7]]


def test_retired_prompts_are_dropped_at_once():
    cycle = PromptCycle(list(range(10)), seed=0)
    drawn = cycle.draw(10, is_retired=lambda i: i >= 4)
    assert sorted(drawn) == [0, 1, 2, 3]  # fewer than asked for: no more there


def test_retired_prompts_may_stay_until_the_pass_ends():
    cycle = PromptCycle(list(range(6)), seed=0, retired_prompts="until_pass_ends")
    cycle.draw(1)
    rest = cycle.draw(5, is_retired=lambda i: True)
    assert len(rest) == 5
    assert cycle.draw(1, is_retired=lambda i: True) == []


def test_retired_prompts_may_be_kept():
    cycle = PromptCycle(list(range(6)), seed=0, retired_prompts="keep")
    assert len(cycle.draw(6, is_retired=lambda i: True)) == 6
    assert len(cycle.draw(6, is_retired=lambda i: True)) == 6


def test_restored_cycle_continues_identically():
    cycle = PromptCycle(list(range(20)), seed=5)
    cycle.draw(7, exclude=[1, 2, 3])
    state = cycle.get_state()
    expected = [cycle.draw(9) for _ in range(5)]
    other = PromptCycle(list(range(20)), seed=99)
    other.set_state(state)
    assert [other.draw(9) for _ in range(5)] == expected


def test_state_of_other_data_is_refused():
    state = PromptCycle(list(range(20)), seed=5).get_state()
    with pytest.raises(ValueError, match="20 training prompts.*now has 21"):
        PromptCycle(list(range(21))).set_state(state)


@given(
    size=st.integers(1, 30),
    steps=st.lists(
        st.tuples(st.integers(0, 12), st.sets(st.integers(0, 29), max_size=10)),
        max_size=20,
    ),
    seed=st.integers(0, 100),
)
def test_no_step_repeats_or_takes_an_excluded_prompt(size, steps, seed):
    cycle = PromptCycle(list(range(size)), seed=seed)
    for count, excluded in steps:
        drawn = cycle.draw(count, exclude=excluded)
        assert len(set(drawn)) == len(drawn)
        assert not set(drawn) & excluded
        available = size - len({i for i in excluded if i < size})
        assert len(drawn) == min(count, available)
