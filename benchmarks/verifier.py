"""Throughput of the verifier pool with hostile answers among the others.

Run `python benchmarks/verifier.py --out results/verifier`: it judges 10,000 answers,
5 % of them hostile, with a limit of 1 s, as `MathEnv` does, and writes `verifier.json`.

The base is one process that judges benign answers without a pool. The speed of a
machine changes while it works, so that both are measured by turns: `rate` is the base's
answers a second right before and after each tenth of the answers. With `cores` workers
and T seconds for a tenth:

- `share`: benign answers / rate, which is the work there was for one process, divided
  by the worker seconds that were not spent on hostile answers. It says what the pool
  costs benign answers. The median of the tenths counts.
- `plain_share`: all answers / T / (cores * rate). A time-out costs a worker its limit,
  so that this falls with the number of hostile answers whatever the pool does.

Exits with 1 unless every verdict is in, no child and no file is left, no hostile answer
is called right, and `share` is at least 0.8.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

from rllib_exgrpo.envs.math_pool import MathVerifierPool
from rllib_exgrpo.envs.math_verifier import verify_math

HOSTILE_SHARE = 0.05
LIMIT_S = 1.0
NUM_ROUNDS = 10
NUM_BASE = 200  # answers, before and after each round
TARGET = 0.8


def benign(rng):
    """A gold answer and an answer to it as models give them, one in three wrong."""
    a, b, c = (rng.randint(2, 99) for _ in range(3))
    wrong = rng.choice((0, 0, 1))
    kinds = (
        (str(a * b), f"{a * b + wrong}"),
        (f"{a}/{b}", rf"\frac{{{2 * a + wrong}}}{{{2 * b}}}"),
        (rf"{a}\%", str(a / 100 + wrong)),
        (f"({a},{b})", f"({a}, {b + wrong})"),
        (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b + wrong}}}"),
        (rf"{a}\pi", rf"\frac{{{2 * a + wrong}\pi}}{{2}}"),
        (f"(x+{a})^2", f"x^2+{2 * a}x+{a * a + wrong}"),
        (f"{a}x+{b}", f"{b + wrong}+{a}x"),
        (f"y = {a}x+{b}", f"{a}x-y+{b + wrong}=0"),
        (rf"\log_{{{a}}} {a**2}", str(2 + wrong)),
        (f"{a},{b},{c}", f"{c}, {a}, {b + wrong}"),
        (rf"[{a},\infty)", rf"x \ge {a + wrong}"),
    )
    gold, answer = rng.choice(kinds)
    return gold, rf"Thus the answer is \boxed{{{answer}}}."


def hostile(rng):
    """A gold answer and an answer that is made to last, to fill memory or to crash."""
    n = rng.randint(5, 9)
    kinds = {
        "power tower": rf"x+{n}^{{{n}^{{{n}^{n}}}}}",
        "hidden tower": rf"x+{n}^{{{n}^{{{n}^{{\sqrt{{{n * n}}}}}}}}}",
        "factorial": rf"x+{n}00000000!",
        "factorial of factorial": rf"x+(({n + 5}!)!)!",
        "binomial": rf"x+\binom{{{n}0000000}}{{{n}000000}}",
        "sum": rf"\sum_{{k=1}}^{{{n}0000000}} \frac{{1}}{{k^x}}",
        "integral": rf"\int_0^\infty \frac{{\sin(x^{n})}}{{1+x^{n}+e^x}} dx + x",
        "deep brackets": "(" * 300 + "x" + ")" * 300,
        "deep fractions": r"\frac{1}{1+" * 60 + "x" + "}" * 60,
        "huge output": rf"x+(a+b+c+d)^{{{n}00}}",
        "long sum": "+".join(f"x^{{{k}}}" for k in range(1500)),
        "long digits": "x+" + str(n) * 9000,
        "nonsense": r"\frac{\int^{x}_{" * 40 + "}",
    }
    kind = rng.choice(list(kinds))
    return kind, ("x+1", rf"\boxed{{{kinds[kind]}}}")


def single_process_rate(rng):
    """Benign answers a second that one process judges without a pool."""
    pairs = [benign(rng) for _ in range(NUM_BASE)]
    start = time.perf_counter()
    for pair in pairs:
        verify_math(*pair)
    return NUM_BASE / (time.perf_counter() - start)


def num_children():
    """Live processes whose parent is this one."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        count += parent == str(os.getpid()) and state != "Z"
    return count


def num_files():
    return len(os.listdir("/proc/self/fd"))


def judge(pool, pairs):
    """Judges as `MathEnv` does; returns verdicts and seconds."""
    start = time.perf_counter()
    verdicts = pool.verify_many(*zip(*pairs, strict=True))
    return verdicts, time.perf_counter() - start


def made_up_answers(num_answers, rng):
    """Pairs (kind, (gold, completion)) in a random order."""
    num_hostile = round(num_answers * HOSTILE_SHARE)
    answers = [hostile(rng) for _ in range(num_hostile)]
    answers += [("benign", benign(rng)) for _ in range(num_answers - num_hostile)]
    rng.shuffle(answers)
    return answers


def measure_round(pool, answers, cores, rates, rng):
    """Judges some of the answers; returns verdicts and the figures of this round."""
    verdicts, seconds = judge(pool, [pair for _, pair in answers])
    rates.append(single_process_rate(rng))
    rate = (rates[-2] + rates[-1]) / 2
    judged = list(zip(answers, verdicts, strict=True))
    hostile_seconds = sum(v.seconds for (kind, _), v in judged if kind != "benign")
    num_benign = sum(kind == "benign" for kind, _ in answers)
    return verdicts, {
        "seconds": seconds,
        "share": num_benign / rate / (cores * seconds - hostile_seconds),
        "plain_share": len(answers) / seconds / (cores * rate),
    }


def measure(num_answers, cores, seed):
    rng = random.Random(seed)
    answers = made_up_answers(num_answers, rng)
    verify_math("x+1", r"\boxed{1+x}")  # imports SymPy
    rates = [single_process_rate(rng) for _ in range(2)][1:]
    left = (num_children(), num_files())
    verdicts, rounds = [], []
    with MathVerifierPool(cores, LIMIT_S) as pool:
        pool.verify_many(["x+1"] * cores, [r"\boxed{1+x}"] * cores)  # starts it
        for i in range(NUM_ROUNDS):
            part = answers[i::NUM_ROUNDS]
            judged, figures = measure_round(pool, part, cores, rates, rng)
            verdicts += zip(part, judged, strict=True)
            rounds.append(figures)
    time.sleep(0.5)
    leaks = (num_children() - left[0], num_files() - left[1])
    seconds = sum(figures["seconds"] for figures in rounds)
    return {
        "answers": num_answers,
        "verdicts": len(verdicts),
        "cores": cores,
        "seconds": seconds,
        "answers_per_second": num_answers / seconds,
        "single_process_rates": rates,
        "num_timeouts": sum(v.reason == "timeout" for _, v in verdicts),
        "share": statistics.median(figures["share"] for figures in rounds),
        "plain_share": statistics.median(figures["plain_share"] for figures in rounds),
        "rounds": rounds,
        "slowest_verdict_s": max(v.seconds for _, v in verdicts),
        "children_left": leaks[0],
        "files_left": leaks[1],
        "hostile_called_right": sum(
            v.reward >= 1.0 for (kind, _), v in verdicts if kind != "benign"
        ),
        "benign_unknown": sum(
            not v.is_known for (kind, _), v in verdicts if kind == "benign"
        ),
        "reasons": dict(
            sorted(Counter(f"{kind}: {v.reason}" for (kind, _), v in verdicts).items())
        ),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="results/verifier", metavar="FOLDER")
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = measure(args.answers, args.cores, args.seed)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1)
    (folder / "verifier.json").write_text(text)
    print(text)
    passed = (
        result["verdicts"] == result["answers"]
        and result["children_left"] == result["files_left"] == 0
        and result["hostile_called_right"] == 0
        and result["share"] >= TARGET
    )
    print("passed" if passed else "FAILED")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
