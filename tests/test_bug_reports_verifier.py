"""Wrong verdicts and missing rewards that people met elsewhere stay out here."""

import sys
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from rllib_exgrpo.advantages import group_advantages
from rllib_exgrpo.batching import rows_from_groups
from rllib_exgrpo.envs import MathEnv, Problem, Verdict, VerifiableTextEnv
from rllib_exgrpo.envs.math_verifier import verify_math
from rllib_exgrpo.exgrpo_env_runner import ExGRPOEnvRunner
from rllib_exgrpo.judging import Judging
from rllib_exgrpo.records import Completion, Group, RolloutRequest
from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.rollout_metrics import rollout_metrics
from rllib_exgrpo.sampler import Sample

THIRD = Problem(0, "?", "1/3")
# The second needs SymPy, and thereby a worker process.
THIRDS = (r"\boxed{\frac13}", r"\boxed{\frac{\sin(x)^2+\cos(x)^2}{3}}")


def reward(gold, answer):
    boxed = answer if "boxed" in answer else rf"\boxed{{{answer}}}"
    return verify_math(gold, boxed).reward


def judge_thirds(_=None):
    env = MathEnv(data="unused", verifier_workers=1, verifier_time_limit_s=60.0)
    try:
        return [v.reward for v in env.verify_many(THIRDS, [THIRD] * 2)]
    finally:
        env.close()


# bug report 1: the verifier raises, or gives 0, off the main thread
def test_the_verifier_works_on_the_main_thread_and_others():
    results = [judge_thirds()]
    thread = threading.Thread(target=lambda: results.append(judge_thirds()))
    thread.start()
    thread.join()
    assert results == [[1.0, 1.0]] * 2


# bug report 1: the same in a threaded actor and in a Tune trial
@pytest.mark.slow
def test_the_verifier_works_in_a_threaded_actor_and_a_tune_trial(
    ray_session, tmp_path, capfd
):
    import ray
    from ray import tune

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    @ray.remote(max_concurrency=4)
    class Judge:
        def judge(self):
            return judge_thirds()

    judge = Judge.remote()
    assert ray.get([judge.judge.remote() for _ in range(4)]) == [[1.0, 1.0]] * 4
    tuner = tune.Tuner(
        lambda config: {"reward": min(judge_thirds())},
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    (result,) = tuner.fit()
    assert result.metrics["reward"] == 1.0
    assert "Traceback" not in capfd.readouterr().err


# bug report 2: an unparseable or empty gold answer gives full reward
@pytest.mark.parametrize("gold", ["", None, "   ", "no closed form"])
def test_an_unusable_gold_answer_is_never_rewarded_nor_stored(gold):
    verdicts = [verify_math(gold, text) for text in (rf"\boxed{{{gold}}}", r"\boxed{}")]
    assert [v.reward for v in verdicts] == [0.0, 0.0]
    assert {v.reason for v in verdicts} == {"gold_unparsed"}
    group = group_of([v.reward for v in verdicts])
    group = replace(group, reasons=[str(v.reason) for v in verdicts])
    buffer = ReplayBuffer(group_size=2)
    buffer.record([group], 0)
    assert len(buffer) == 0
    metrics = rollout_metrics([group], [], success_threshold=1.0)
    assert metrics["verdict_gold_unparsed_fraction"] == 1.0


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        # bug report 3: bare LaTeX is cut down to a number
        (r"2\pi", r"2\pi", 1.0),
        (r"2\pi", "2", 0.0),
        (r"3\sqrt{2}", r"\sqrt{18}", 1.0),
        (r"3\sqrt{2}", "3", 0.0),
        (r"\{1,2,3\}", r"\{3,1,2\}", 1.0),
        # bug report 4: boxes near each other are merged
        ("7", r"I first get \boxed{5}. Then, fixing the sign, \boxed{7}.", 1.0),
        ("5", r"I first get \boxed{5}. Then, fixing the sign, \boxed{7}.", 0.0),
        ("840", r"\boxed{840}, restated: \boxed{840}", 1.0),
        # bug report 5: tiny exact values compare equal
        (r"\frac{1}{2^{80}}", r"\frac{1}{2^{79}}", 0.0),
        ("0.0000003", "0.0000001", 0.0),
        (r"\frac13", "0.333333", 1.0),
        ("0.333333", r"\frac13", 1.0),
        # bug report 6: percent differs between whole and decimal values
        (r"28\%", "28", 1.0),
        (r"12.5\%", "12.5", 1.0),
        ("0.28", "28", 0.0),
        (r"50\%", "0.5", 1.0),
        # bug report 7: mixed numbers match one of their parts
        ("9/4", "2 1/4", 1.0),
        ("11", "3 11/4", 0.0),
        ("2", "2 1/4", 0.0),
        # bug report 8: the order of the arguments changes the verdict
        (r"x \ge 2", r"[2,\infty)", 1.0),
        (r"[2,\infty)", r"x \ge 2", 1.0),
        # bug report 9: a shortcut by text breaks leading zeros
        ("16", "016", 1.0),
        ("027", "27", 1.0),
        ("1,234", "1234", 1.0),
    ],
)
def test_verdicts_that_were_wrong_elsewhere(gold, answer, expected):
    assert reward(gold, answer) == expected


# bug report 8: nothing passes the completion where the gold answer belongs
def test_the_gold_answer_comes_first():
    env = MathEnv(data="unused")
    # A gold answer alone may be bare: in the other order there would be no box.
    assert env.verify(r"\boxed{7}", Problem(0, "?", "7")).reason == "ok"
    env.close()


class ThinkEnv(VerifiableTextEnv):
    """Rewards a closed thinking part before a box."""

    def load(self):
        return [Problem(0, "2+2?", "4")]

    def verify(self, completion, problem):
        thought, closing, final = completion.partition("</think>")
        is_closed = thought.startswith("<think>") and bool(closing)
        return float(is_closed and "boxed" in final)


# bug report 10: the format reward is 0 when the template opens the thinking tag
@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("2+2 is 4.\n</think>\nThe answer is \\boxed{4}.", 1.0),
        ("2+2\n\n\nis 4.\n</think>\nThe answer is \\boxed{4}.", 1.0),
        ("2+2 is 4. The answer is \\boxed{4}.", 0.0),
    ],
)
def test_the_verifier_reads_what_the_template_opened(completion, expected):
    runner = SimpleNamespace(
        formatter=SimpleNamespace(assistant_prefix="<think>\n"),
        tokenizer=SimpleNamespace(batch_decode=lambda ids, **_: [completion]),
    )
    sample = Sample(np.zeros(1, np.int32), np.zeros(1, np.float32), False)
    for env in (ThinkEnv(), MathEnv(data="unused")):
        env.problem = lambda _: Problem(0, "2+2?", "4")
        request = RolloutRequest([0], [1], temperature=1.0, seed=0)
        judging = Judging(env, request, partial(ExGRPOEnvRunner._decode, runner))
        if judging.on_finished is not None:
            judging.on_finished(0, [sample])
        judged_PG, _ = judging.finish([[sample]])
        assert judged_PG[0][0].reward == expected
        env.close()


def group_of(rewards):
    completions = [
        Completion(np.arange(3, dtype=np.int32), -np.ones(3, np.float32), r, 0)
        for r in rewards
    ]
    return Group("p", np.arange(2, dtype=np.int32), completions)


# bug report 11: a missing reward counts as 0
@pytest.mark.parametrize(
    ("rewards", "advantages", "unscored"),
    [
        # Of 1 and 0 the mean is 1/2.
        ([1.0, np.nan, 0.0, np.nan], [0.5, 0.0, -0.5, 0.0], 2),
        ([np.nan, np.nan, 1.0, np.nan], [0.0] * 4, 3),
    ],
)
def test_a_missing_reward_moves_nobody_and_is_counted(rewards, advantages, unscored):
    group = group_of(rewards)
    for normalise in (False, True):
        result = group_advantages(group.rewards_G, normalize_by_std=normalise)
        assert np.isfinite(result).all()
        assert (result[np.isnan(rewards)] == 0).all()
    assert group_advantages(group.rewards_G).tolist() == advantages
    rows = rows_from_groups([group], [0], normalize_by_std=False)
    assert np.isfinite(rows.advantages_B).all()
    assert rows.scored_B.tolist() == [not np.isnan(r) for r in rewards]  # loss mask
    metrics = rollout_metrics([group], [], success_threshold=1.0)
    assert metrics["num_unscored"] == unscored


# bug report 11: a verifier that forgets to return is told so
def test_a_verifier_that_returns_none_is_refused():
    class Forgets(ThinkEnv):
        def verify(self, completion, problem):
            self.reward(Verdict.of("error"))

    env = Forgets()
    env.reset()
    with pytest.raises(TypeError, match="`verify` returned None.*`Verdict`"):
        env.step("4")
