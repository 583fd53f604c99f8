"""Folders as runs leave them, made without a run."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from rllib_exgrpo.evaluation.examples import Example, write_examples
from rllib_exgrpo.evaluation.metrics import evaluation_metrics
from rllib_exgrpo.evaluation.questions import FOLDER, Question, write_questions
from rllib_exgrpo.metric_names import METRICS
from rllib_exgrpo.replay.audit import AUDIT_FOLDER, SCHEMA, Audit
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.versions import write_versions

HOSTILE = (
    "<script>document.title='stolen'</script>"
    "<img src='https://example.com/x.png' onerror='document.title=1'>"
    "</pre></details><h2>Injected</h2> \\boxed{3} & \x00"
)


def make_run(folder: Path, num_steps: int = 24, seed: int = 0, **config) -> Path:
    """Writes a run of random but plausible numbers, with hostile texts.

    It evaluates an unnamed set of two sources, and a set "hard", every 8 steps.
    """
    random = np.random.default_rng(seed)
    trial = folder / "trial"
    trial.mkdir(parents=True)
    results = [_step(i, num_steps, random) for i in range(1, num_steps + 1)]
    for iteration in range(0, num_steps + 1, 8):
        questions = _questions(iteration, iteration / num_steps, random)
        write_questions(Folder.at(trial / FOLDER), iteration, questions)
        metrics = evaluation_metrics(questions[:60])
        metrics["hard"] = evaluation_metrics(questions[60:])
        key = "evaluation" if iteration else "evaluation_at_start"
        results[max(iteration - 1, 0)][key] = metrics
    write_examples(Folder.at(trial / FOLDER), num_steps, _examples(num_steps))
    write_versions(Folder.at(trial))
    for iteration in (num_steps - 2, num_steps - 1):
        _write_audit(Folder.at(trial / AUDIT_FOLDER), iteration)
    lines = [json.dumps(result) for result in results]
    (trial / "result.json").write_text("\n".join([*lines, ""]))
    settings = {"lr": 1e-4, "replay_ratio": 0.5, "env": "<class 'ArithmeticEnv'>"}
    (trial / "params.json").write_text(json.dumps({**settings, **config}))
    return folder


def _step(i: int, num_steps: int, random: np.random.Generator) -> dict:
    share = i / num_steps
    noise = 0.03 * random.standard_normal()
    result = {"training_iteration": i, "time_total_s": 4.0 * i, "time_this_iter_s": 4.0}
    for path in METRICS:
        parts = path.split("/")
        if "*" in path or parts[0].startswith("evaluation") or len(parts) == 1:
            continue
        place = result
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = float(0.5 + 0.1 * random.random())
    result["env_runners"] |= {
        "pass_rate": 0.35 + 0.4 * share + noise,
        "num_prompts": 32.0,
        "num_env_steps_sampled_lifetime": 240.0 * i,
        "tokens_per_second": 4000 + 10_000 * noise,
        "completion_length_mean": 28 - 4 * share,
        "verdict_no_answer_fraction": 0.02,
    }
    result["replay"] |= {
        "prompts": 400 * (1 - (1 - share) ** 2),
        "retired": 150 * share**2,
        "num_prompts_replayed": 16.0 * (i > 2),
        **{f"bucket_{k}": 10 + 60 * share * (k / 8) for k in range(8)},
    }
    if i == 1:
        result["learners"]["default_policy"]["importance_ratio_replayed_mean"] = np.nan
    return result


def _questions(iteration: int, share: float, random: np.random.Generator) -> list:
    return [
        Question(
            evaluation_set="evaluation" if i < 60 else "hard",
            iteration=iteration,
            prompt_id=str(i),
            source=("amc", "aime", "hard")[min(i // 30, 2)],
            num_samples=8,
            num_correct=int(random.binomial(8, (0.3 + 0.4 * share) / (1 + (i >= 60)))),
            num_truncated=0,
            num_formatted=7,
            length_mean=30.0,
            majority=[0.5, 0.5, 1.0],
        )
        for i in range(80)
    ]


def _examples(iteration: int) -> list[Example]:
    return [
        Example(
            evaluation_set=name,
            iteration=iteration,
            prompt_id=str(i),
            source="amc",
            num_samples=8,
            num_correct=i,
            prompt=f"What is {i} + 1? {HOSTILE}",
            completion=f"{HOSTILE}\n{'carry the one. ' * 30}",
            num_tokens=64,
            reward=reward,
            reason="ok" if reward else "wrong",
            truncated=not reward,
        )
        for name in ("evaluation", "hard")
        for i in (0, 3, 8)
        for reward in ((0.0,) if i == 0 else (1.0,) if i == 8 else (1.0, 0.0))
    ]


def _write_audit(folder: Folder, iteration: int) -> None:
    """Writes that two prompts were replayed, the easier one first."""
    easy = dict.fromkeys(SCHEMA.names, 1.0) | {
        "iteration": iteration, "rule": "lowest_entropy", "prompt_id": '"easy"',
        "bucket": 6, "probability": 0.004, "candidates": 3, "rank": 1, "score": 0.12,
        "mean_score": 0.25, "saturated": 0.3, "correct": 8,
    }  # fmt: skip
    hard = {**easy, "prompt_id": f'"{HOSTILE}"', "bucket": 1, "correct": 2}
    rows = {name: [easy[name], hard[name]] for name in SCHEMA.names}
    arrays = [pa.array(rows[f.name]).cast(f.type) for f in SCHEMA]
    Audit(folder).write(pa.Table.from_arrays(arrays, schema=SCHEMA))
