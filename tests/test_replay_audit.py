"""The audit and the metrics of what is replayed."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from replay_helpers import group

from rllib_exgrpo.loss_metrics import UpdateTotals, token_totals
from rllib_exgrpo.losses import mixed_policy_loss
from rllib_exgrpo.replay.audit import Audit, audit_table
from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.folder import Folder, ReplayFileError
from rllib_exgrpo.replay_metrics import has_code, replay_metrics


def choices(num_prompts=3, version=5, **knobs):
    buffer = ReplayBuffer(group_size=4, seed=0, **knobs)
    buffer.record([group((i, "p"), 2, version=i) for i in range(num_prompts)], 1)
    draws = buffer.draw(num_prompts, version)
    needs = buffer.needs_scores
    scores = [np.array([0.75, 0.25]) for _ in draws] if needs else None
    return sorted(buffer.choose(draws, scores), key=lambda c: c.prompt_id)


def table(iteration, num_prompts=3):
    chosen = choices(num_prompts)
    sums = {c.prompt_id: np.array([4.0, 2.0, 1.0]) for c in chosen}
    correct = {c.prompt_id: 3 for c in chosen}
    return audit_table(iteration, "lowest_entropy", chosen, sums, correct)


def test_a_row_tells_why_a_completion_was_replayed():
    row = table(20).slice(1, 1).to_pylist()[0]
    # Three prompts in the only occupied bucket: 1 / 3 each. Weights 5 replay what
    # weights 1 sampled.
    assert row.pop("probability") == pytest.approx(1 / 3)
    assert row == {
        "iteration": 20, "prompt_id": '{"tuple": [1, "p"]}', "bucket": 2,
        "completion_id": 3, "candidates": 2, "rule": "lowest_entropy", "score": 0.25,
        "mean_score": 0.5, "rank": 1, "age": 4, "tokens": 4, "importance_ratio": 0.5,
        "saturated": 0.25, "correct": 3,
    }  # fmt: skip


def test_a_completion_that_the_update_left_out_has_no_ratio():
    # All of its group were right: advantage 0.
    chosen = choices(2)
    sums = {chosen[1].prompt_id: np.array([4.0, 2.0, 1.0])}
    correct = {c.prompt_id: 4 for c in chosen}
    left_out, trained = audit_table(1, "newest", chosen, sums, correct).to_pylist()
    assert left_out["tokens"] == 0
    assert math.isnan(left_out["importance_ratio"])
    assert math.isnan(left_out["saturated"])
    assert (trained["tokens"], trained["importance_ratio"]) == (4, 0.5)


def test_a_repeated_step_replaces_its_rows_and_later_ones_can_be_forgotten(tmp_path):
    audit = Audit(Folder.at(tmp_path / "audit"))
    assert audit.read().num_rows == 0
    for iteration in (2, 3, 10):
        audit.write(table(iteration))
    audit.write(table(3, num_prompts=1))
    assert audit.read()["iteration"].to_pylist() == [2] * 3 + [3] + [10] * 3
    assert audit.read(10).num_rows == 3
    audit.forget_after(3)
    assert set(audit.read()["iteration"].to_pylist()) == {2, 3}
    assert not list((tmp_path / "audit").glob("*.tmp"))


def test_a_step_of_64_prompts_takes_a_few_kilobytes(tmp_path):
    Audit(Folder.at(tmp_path)).write(table(1, num_prompts=64))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 10_000


@pytest.mark.parametrize("content", [b"PAR1 cut short", None])
def test_a_damaged_or_foreign_file_is_named(tmp_path, content):
    path = tmp_path / "audit-00000001.parquet"
    if content is None:
        pq.write_table(pa.table({"x": [1]}), path)
    else:
        path.write_bytes(content)
    with pytest.raises(ReplayFileError, match=re.escape(str(path))):
        Audit(Folder.at(tmp_path)).read()


def test_sums_of_replayed_rows_add_up_over_micro_batches():
    # Ratios 1, 2 | 4 of the replayed rows. f(w) = w / (w + 0.1) > 0.9 from w = 0.9 on;
    # the padded place of the second row counts nowhere.
    log_ratio = torch.tensor([[0.0, math.log(2)], [math.log(4), 9.0], [1.0, 1.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    replayed = torch.tensor([True, True, False])
    totals = UpdateTotals()
    for cut in (slice(0, 1), slice(1, 3)):
        zeros = torch.zeros_like(log_ratio[cut])
        rows = SimpleNamespace(
            advantages=torch.ones(3)[cut],
            token_mask=mask[cut],
            loss_mask=mask[cut],
            scored=torch.ones(3, dtype=torch.bool)[cut],
            replay_mask=replayed[cut],
            token_weights=torch.ones_like(zeros),
            engine_logp=zeros,
        )
        output = mixed_policy_loss(
            log_ratio[cut], zeros, rows.advantages, rows.loss_mask, rows.replay_mask,
            clip_eps=None, shaping_beta=0.1, denominator=1,
        )  # fmt: skip
        totals.add(
            token_totals(
                output,
                current_logp=log_ratio[cut],
                entropy=zeros,
                rows=rows,
                shaping_beta=0.1,
            )
        )
    np.testing.assert_allclose(totals.replayed_rows, [[2, 3, 2], [1, 4, 1]], rtol=1e-6)


def test_metrics_of_replayed_completions():
    # Ages 5, 4, 3; entropies 0.25 chosen from 0.75 and 0.25.
    metrics = replay_metrics(
        choices(), ["x = 1", "```python", "so\n  def f(x):"], "entropy"
    )
    assert metrics == pytest.approx(
        {
            "age_p50": 4.0,
            "age_p90": 4.8,
            "code_block_fraction": 2 / 3,
            "chosen_entropy_mean": 0.25,
            "candidate_entropy_mean": 0.5,
        }
    )


def test_metrics_without_replay_or_entropy_are_nan():
    assert all(map(math.isnan, replay_metrics([], [], "entropy").values()))
    chosen = choices(completion_selection="newest")
    metrics = replay_metrics(chosen, ["", "", ""], None)
    assert metrics["code_block_fraction"] == 0
    assert math.isnan(metrics["chosen_entropy_mean"])


@pytest.mark.parametrize("text", ["we print the import tax", "define f", "3 + 4 = 7"])
def test_prose_is_not_code(text):
    assert not has_code(text)
