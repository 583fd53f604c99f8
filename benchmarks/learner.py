"""Speed and memory of the learner, each against another side in the same run.

Run `python benchmarks/learner.py`; it prints tables and fails if a target is missed:

- speed: tokens/s of an update against a bare PyTorch loop on the same micro-batches,
  and against a loop that pads all rows to the longest one, by CPU time, which other
  processes on the machine disturb least;
- memory: peak of a forward and backward pass at two vocabularies, in processes of
  their own;
- parts: time of the parts of a step of the tiny example, for the local learner and for
  two learners under ZeRO-3.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import log_softmax
from transformers import Qwen2Config, Qwen2ForCausalLM

from rllib_exgrpo.batching import (
    cut_micro_batches,
    pad,
    rows_from_candidates,
    rows_from_groups,
)
from rllib_exgrpo.policy import LanguagePolicy
from rllib_exgrpo.records import Completion, Group

MAX_COMPLETION_TOKENS = 500
BUDGET = 2048
MIN_OF_BARE, MIN_OF_PADDED = 0.9, 1.5
VOCABULARIES = (8_192, 150_000)
MAX_MEMORY_RATIO = 1.3
MAX_GLUE = 0.05


def make_model(vocabulary, hidden, layers):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(hidden // 64, 1),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    model.config.use_cache = False
    return model


def make_rows(num_groups, vocabulary):
    """Groups of 8 with ragged completions of 1 to 500 tokens."""
    rng = np.random.default_rng(0)

    def completion(reward):
        length = int(rng.integers(1, MAX_COMPLETION_TOKENS + 1))
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        return Completion(ids, np.full(length, -9, np.float32), reward, 0)

    groups = [
        Group(
            i,
            rng.integers(0, vocabulary, 32).astype(np.int32),
            [completion(float(j % 2)) for j in range(8)],
        )
        for i in range(num_groups)
    ]
    return rows_from_groups(groups)


# --- speed


def bare_update(model, optimizer, batches, num_tokens, num_rows, everywhere=False):
    """What one writes by hand; all logits of a micro-batch exist at once.

    `everywhere` computes them for prompts and padding too, as most padded loops do.
    """
    for batch in batches:
        mask = batch.prediction_mask
        positions = torch.ones_like(mask) if everywhere else mask
        hidden = model.model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()
        ).last_hidden_state[:, :-1][positions]
        log_probs = log_softmax(model.lm_head(hidden).float(), -1)
        targets = batch.input_ids[:, 1:][positions]
        logp = log_probs.gather(1, targets[:, None])[:, 0][mask[positions]]
        entropy = -(log_probs.exp() * log_probs).sum(-1)[mask[positions]]
        ratio = (logp - batch.behavior_logp[batch.token_mask]).clamp(-20, 20).exp()
        weight = batch.advantages.repeat_interleave(batch.token_mask.sum(1))
        loss = -(weight * ratio).sum() / (MAX_COMPLETION_TOKENS * num_rows)
        (loss - 0.001 * entropy.sum() / num_tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def build_learner(folder):
    from gymnasium.spaces import Text
    from ray.rllib.core import DEFAULT_MODULE_ID

    from rllib_exgrpo import ExGRPOConfig

    config = (
        ExGRPOConfig()
        .language_model(folder, max_completion_tokens=MAX_COMPLETION_TOKENS)
        .learners(num_learners=0, max_tokens_per_micro_batch=BUDGET)
    )
    space = Text(1000)
    return config.build_learner_group(spaces={DEFAULT_MODULE_ID: (space, space)})


def measure_speed(rounds):
    vocabulary = 1024  # the head has the share of the work that it has in a 1.5B model
    rows = make_rows(4, vocabulary)
    lengths = rows.total_lengths_B
    cuts = cut_micro_batches(lengths, BUDGET)
    same = [pad(rows.take(cut)) for cut in cuts]
    padded = pad_to_longest(rows, BUDGET)

    model = make_model(vocabulary, 128, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    counts = int(rows.lengths_B.sum()), len(rows)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        learner = build_learner(folder)
    sides = {
        "this learner": lambda: learner.train([rows], clip_eps=None, timesteps={}),
        "bare PyTorch, same micro-batches": lambda: bare_update(
            model, optimizer, same, *counts
        ),
        "bare PyTorch, padded to the longest": lambda: bare_update(
            model, optimizer, padded, *counts, everywhere=True
        ),
    }
    seconds = {name: [] for name in sides}
    for index in range(rounds + 1):
        for name, update in sides.items():
            started = time.process_time()
            update()
            if index:  # the first round warms up
                seconds[name].append(time.process_time() - started)
    padding = 1 - lengths.sum() / sum(b.input_ids.numel() for b in same)
    whole = 1 - lengths.sum() / sum(b.input_ids.numel() for b in padded)
    own = statistics.median(seconds["this learner"])
    print(f"\nUpdate of {len(rows)} rows, {lengths.sum()} tokens, lengths 1 to 500")
    print(
        f"Padding: {padding:.1%} of the micro-batches, {whole:.1%} of the padded ones"
    )
    print(f"{'side':40}{'tokens/s':>10}{'ours over it':>14}")
    ratios = []
    for name, values in seconds.items():
        median = statistics.median(values)
        ratios.append(median / own)
        print(f"{name:40}{lengths.sum() / median:>10.0f}{ratios[-1]:>14.2f}")
    assert ratios[1] >= MIN_OF_BARE, ratios
    assert ratios[2] >= MIN_OF_PADDED, ratios


def pad_to_longest(rows, budget):
    """Pads all rows to the longest one and cuts them in the order they come."""
    whole = pad(rows)
    count = max(budget // whole.input_ids.shape[1], 1)
    return [
        type(whole)(*(getattr(whole, f.name)[i : i + count] for f in fields(whole)))
        for i in range(0, len(rows), count)
    ]


# --- memory


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes():
    """Returns the largest resident memory since the last reset."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def measure_one_vocabulary(vocabulary, hidden=64):
    """Peak of one forward and backward pass over 8,192 tokens, weights included."""
    tokens = np.full(8192 // 16, 7, np.int32)
    completion = Completion(tokens[1:], np.zeros(len(tokens) - 1, np.float32), 0.0, 0)
    rows = rows_from_candidates([tokens[:1]] * 16, [completion] * 16)
    batch = pad(rows)
    warm_up = LanguagePolicy(make_model(64, 64, 1))  # libraries allocate at first use
    sum(s.sum() for s in scores_of(warm_up, pad(rows.take(np.arange(1))))).backward()
    before = resident_bytes()
    policy = LanguagePolicy(make_model(vocabulary, hidden, 4))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    logp, entropy = scores_of(policy, batch)
    (logp.mean() + 0.001 * entropy.mean()).backward()
    return {"peak": peak_bytes() - before, "head": vocabulary * hidden * 4}


def scores_of(policy, batch):
    return policy(batch.input_ids, batch.attention_mask, batch.prediction_mask)


def measure_memory():
    results = []
    for vocabulary in VOCABULARIES:
        command = [sys.executable, __file__, "--vocabulary", str(vocabulary)]
        output = subprocess.run(command, check=True, capture_output=True, text=True)
        results.append(json.loads(output.stdout.splitlines()[-1]))
    small, large = results
    bound = MAX_MEMORY_RATIO * small["peak"] + 2 * large["head"]
    print("\nPeak memory of a forward and backward pass, 8,192 tokens")
    print(f"{'vocabulary':>10}{'peak MB':>10}{'weights + gradient MB':>24}")
    for vocabulary, result in zip(VOCABULARIES, results, strict=True):
        head = 2 * result["head"] / 1e6
        print(f"{vocabulary:>10}{result['peak'] / 1e6:>10.0f}{head:>24.0f}")
    logits = 8192 * VOCABULARIES[1] * 4 / 1e6
    print(
        f"bound {bound / 1e6:.0f} MB; one copy of all logits would be {logits:.0f} MB"
    )
    assert large["peak"] <= bound, results


# --- parts of a step


def tiny_example(env_runners, learners, zero_stage):
    from rllib_exgrpo.tuned_examples.exgrpo_arithmetic_cpu import config

    config = config.copy(copy_frozen=False)
    config.evaluation(evaluation_interval=None)
    config.training(replay_start_pass_rate=None)
    config.env_runners(num_env_runners=env_runners)
    return config.learners(num_learners=learners, zero_stage=zero_stage)


def measure_step(config, steps):
    """Returns the median seconds by part, over steps after two that warm up."""
    algo = config.build_algo()
    parts = []
    for _ in range(steps + 2):
        result = algo.train()
        timers = result["timers"]
        part = {name: result["env_runners"][f"{name}_s"] for name in GENERATING}
        part |= {name: timers[f"{name}_s"] for name in ("score", "update")}
        part["sync"] = timers["sync_s"]
        part["step"] = result["time_this_iter_s"]
        part["rest"] = part["step"] - sum(
            part[name] for name in (*GENERATING, "score", "update", "sync")
        )
        parts.append(part)
    algo.stop()
    return {n: statistics.median(p[n] for p in parts[2:]) for n in parts[0]}


GENERATING = ("generate", "verify")


def measure_parts(steps):
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    setups = {"local": (0, 0, None), "1 runner, 2 learners, ZeRO-3": (1, 2, 3)}
    results = {
        name: measure_step(tiny_example(*setup), steps)
        for name, setup in setups.items()
    }
    ray.shutdown()
    print("\nSeconds of a step of the tiny example, 256 completions")
    print(f"{'':10}" + "".join(f"{name:>32}" for name in results))
    for part in next(iter(results.values())):
        values = [
            f"{r[part]:.3f} ({r[part] / r['step']:.1%})" for r in results.values()
        ]
        print(f"{part:10}" + "".join(f"{value:>32}" for value in values))
    local = results["local"]
    glue = (local["sync"] + local["rest"]) / local["step"]
    print(f"glue of the local set-up (sync and rest): {glue:.1%}")
    assert glue <= MAX_GLUE, local


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["speed", "memory", "parts"])
    parser.add_argument("--rounds", type=int, default=5, help="updates and steps timed")
    parser.add_argument("--vocabulary", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.vocabulary:
        print(json.dumps(measure_one_vocabulary(args.vocabulary)))
        return
    measures = {
        "speed": lambda: measure_speed(args.rounds),
        "memory": measure_memory,
        "parts": lambda: measure_parts(args.rounds),
    }
    for name, measure in measures.items():
        if args.only in (None, name):
            measure()


if __name__ == "__main__":
    main()
