"""Cost of the replay buffer against its size: time of a step, memory, pauses, disk.

Run `python benchmarks/replay.py --out results/replay`: it fills a buffer of each size
in a process of its own, trains on it for a while, and writes `replay.json` and
`replay.png`. The largest size needs about 3 GB of memory twice (it is loaded back), and
as much in `--disk`; to measure the buffer and not a disk, that is a RAM-backed folder.
"""

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from rllib_exgrpo.records import Completion, Group
from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.files import ReplayFiles
from rllib_exgrpo.replay.folder import Folder

GROUP_SIZE = 8
STORED = 4  # completions stored a prompt
MEAN_TOKENS = 64
SIZES = [1_000, 10_000, 100_000, 1_000_000]
AT_MOST = {
    "draw_ms_median": 5.0,
    "record_ms_median": 20.0,
    "draw_ms_max": 200.0,
    "choose_ms_max": 200.0,
    "record_ms_max": 200.0,
    "fill_record_ms_max": 200.0,
    "gc_ms_max": 200.0,
    "memory_ratio": 1.25,
}
TICKS_MS = (1, 2, 5, 10, 20, 50, 100)
AT_LEAST = {"save_mb_per_s": 300.0}


class Source:
    """Makes groups of made-up completions, fast."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.token_ids = self.rng.integers(0, 150_000, 1 << 20).astype(np.int32)
        self.logps = self.rng.random(1 << 20, dtype=np.float32)
        self.wrong = self.completion(0.0, 0)
        self.prompt = np.zeros(16, np.int32)

    def completion(self, reward, version):
        length = int(self.rng.integers(MEAN_TOKENS // 2, 3 * MEAN_TOKENS // 2 + 1))
        start = int(self.rng.integers(len(self.token_ids) - length))
        part = slice(start, start + length)
        return Completion(self.token_ids[part], self.logps[part], reward, version)

    def group(self, prompt_id, version, correct, replayed=None):
        fresh = GROUP_SIZE - (replayed is not None)
        completions = [self.completion(1.0, version) for _ in range(correct)]
        completions += [self.wrong] * (fresh - correct)
        return Group(prompt_id, self.prompt, completions, replayed)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def timed(durations, function, *args):
    """Calls a function and appends (wall ms, CPU ms of this thread)."""
    wall, cpu = time.perf_counter(), time.thread_time()
    result = function(*args)
    spent = time.perf_counter() - wall, time.thread_time() - cpu
    durations.append([1e3 * seconds for seconds in spent])
    return result


class CollectorPauses:
    """Times the pauses of Python's garbage collector, in ms."""

    def __init__(self):
        self.longest = 0.0
        gc.callbacks.append(self)

    def __call__(self, phase, info):
        now = time.perf_counter()
        if phase == "stop":
            self.longest = max(self.longest, 1e3 * (now - self.started))
        self.started = now


def loop_ms():
    """Times a plain loop of a million rounds: how fast the machine is just now."""
    durations = []
    timed(durations, lambda: sum(i & 1 for i in range(1_000_000)))
    return durations[0]


def summary(name, durations):
    wall, cpu = np.array(durations).T
    return {
        f"{name}_ms_median": float(np.median(wall)),
        f"{name}_ms_p99": float(np.quantile(wall, 0.99)),
        f"{name}_ms_max": float(wall.max()),
        f"{name}_cpu_ms_median": float(np.median(cpu)),
        f"{name}_cpu_ms_p99": float(np.quantile(cpu, 0.99)),
        f"{name}_cpu_ms_max": float(cpu.max()),
    }


def fill(buffer, source, num_prompts):
    """Records groups of 128 until the buffer is full; returns the calls' times."""
    durations = []
    for start in range(0, num_prompts, 128):
        ids = range(start, min(start + 128, num_prompts))
        groups = [source.group(i, 0, STORED) for i in ids]
        timed(durations, buffer.record, groups, 0)
    return durations


def train(buffer, source, num_prompts, num_steps):
    """Runs steps of 64 replayed and 64 fresh prompts; returns times a call, by call.

    A cap of STORED completions a prompt keeps the size steady: each step evicts about
    as much as it stores, which is the worst case for compaction.
    """
    times = {"draw": [], "choose": [], "record": []}
    rng = source.rng
    for step in range(1, num_steps + 1):
        draws = timed(times["draw"], buffer.draw, 64, step)
        scores = [rng.random(len(draw.candidates)) for draw in draws]
        chosen = timed(times["choose"], buffer.choose, draws, scores)
        groups = [
            source.group(c.prompt_id, step, int(rng.integers(1, 6)), c.completion)
            for c in chosen
        ]
        groups += [
            source.group(int(i), step, int(rng.integers(1, 6)))
            for i in rng.integers(0, num_prompts, 64)
        ]
        timed(times["record"], buffer.record, groups, step)
    return times


def measure_disk(buffer, source, num_prompts, disk):
    """Saves in full, trains a step, saves what changed, and loads."""
    tokens = buffer.store.num_tokens
    files, folders = ReplayFiles(), [Folder.at(f"{disk}/{i}") for i in range(2)]
    seconds = []
    cpu = time.process_time()
    full = timed(seconds, files.save, buffer, folders[0])
    cpu = time.process_time() - cpu
    train(buffer, source, num_prompts, 1)
    changed = timed(seconds, files.save, buffer, folders[1])
    buffer = ReplayBuffer(group_size=GROUP_SIZE)
    timed(seconds, ReplayFiles().load, buffer, folders[1])
    save, again, load = (wall / 1e3 for wall, _ in seconds)
    return {
        "save_s": save,
        "save_cpu_s": cpu,
        "save_bytes": full,
        "save_mb_per_s": full / save / 1e6,
        "save_token_mb_per_s": 8 * tokens / save / 1e6,
        "save_changed_s": again,
        "save_changed_bytes": changed,
        "load_s": load,
        "load_mb_per_s": full / load / 1e6,
    }


def measure(num_prompts, num_steps, disk):
    source = Source()
    gc.collect()
    gc.freeze()  # a full collection of torch's and ray's modules takes 0.3 s itself
    before = resident_bytes()
    pauses = CollectorPauses()
    buffer = ReplayBuffer(
        group_size=GROUP_SIZE, seed=0, max_completions_per_prompt=STORED
    )
    fill_ms = fill(buffer, source, num_prompts)
    filled = (resident_bytes() - before) / (8 * buffer.store.num_tokens)
    times = train(buffer, source, num_prompts, num_steps)
    after = (resident_bytes() - before) / (8 * buffer.store.num_tokens)
    result = {
        "prompts": num_prompts,
        "loop_ms": loop_ms(),
        "completions": buffer.num_completions,
        "tokens": buffer.store.num_tokens,
        "memory_ratio_filled": filled,
        "memory_ratio": after,
        "gc_ms_max": pauses.longest,
        **summary("fill_record", fill_ms),
    }
    for name, durations in times.items():
        result |= summary(name, durations)
    return {**result, **measure_disk(buffer, source, num_prompts, disk)}


def measure_in_process(num_prompts, num_steps, disk):
    """Measures in a fresh process, so that its memory is the buffer's alone."""
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--one", str(num_prompts)]
        command += ["--steps", str(num_steps), "--disk", folder, "--out", str(out)]
        subprocess.run(command, check=True)
        return json.loads(out.read_text())


def missed(result):
    """Returns the targets that the largest size misses, with the values found."""
    high = [name for name, bound in AT_MOST.items() if result[name] > bound]
    low = [name for name, bound in AT_LEAST.items() if result[name] < bound]
    return {name: result[name] for name in high + low}


def growth(results):
    """Compares cost with size: the ratio of the largest to the smallest.

    A cost that grows no faster than the logarithm of the size has at most the ratio of
    the logarithms. CPU time, in that of a plain loop in the same process, as the speed
    of a machine changes from one size to the next.
    """
    first, last = results[0], results[-1]
    names = ("draw_cpu_ms_median", "choose_cpu_ms_median", "record_cpu_ms_median")
    loop_ms = last["loop_ms"][1] / first["loop_ms"][1]
    ratios = {name: last[name] / first[name] / loop_ms for name in names}
    return {
        "log_size": math.log(last["prompts"]) / math.log(first["prompts"]),
        **ratios,
    }


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullLocator

    prompts = [r["prompts"] for r in results]
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(12, 3.6), layout="constrained"
    )
    for name, label in (("draw", "draw 64"), ("record", "record 128 groups")):
        median = [r[f"{name}_cpu_ms_median"] for r in results]
        (line,) = left.plot(prompts, median, "o-", label=label)
        slowest = [r[f"{name}_cpu_ms_p99"] for r in results]
        left.plot(prompts, slowest, ":", color=line.get_color(), label="99 % quantile")
        bound = AT_MOST[f"{name}_ms_median"]
        left.axhline(bound, lw=0.5, color=line.get_color())
    left.set(yscale="log", ylim=(1, 200), ylabel="ms", title="CPU time of a step")
    left.set_yticks(TICKS_MS, map(str, TICKS_MS))
    left.yaxis.set_minor_locator(NullLocator())
    left.legend(fontsize="small", ncols=2, loc="upper center")
    middle.plot(prompts, [r["memory_ratio"] for r in results], "o-")
    middle.axhline(AT_MOST["memory_ratio"], lw=0.5)
    middle.set(ylim=(0, None), title="resident memory / (8 bytes a token)")
    for name in ("save", "load"):
        right.plot(prompts, [r[f"{name}_mb_per_s"] for r in results], "o-", label=name)
    right.axhline(AT_LEAST["save_mb_per_s"], lw=0.5)
    right.set(ylim=(0, None), title="MB/s, RAM-backed folder")
    right.legend()
    for axes in (left, middle, right):
        axes.set(xscale="log", xlabel="prompts stored (thin lines: targets)")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/replay"))
    parser.add_argument("--disk", default="/dev/shm", help="folder to save to")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        result = measure(args.one, args.steps, args.disk)
        args.out.write_text(json.dumps(result))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    for size in args.sizes:
        results.append(measure_in_process(size, args.steps, args.disk))
        print(json.dumps(results[-1], indent=1), flush=True)
    report = {
        "at_most": AT_MOST,
        "at_least": AT_LEAST,
        "missed": missed(results[-1]),
        "growth": growth(results),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),  # of a shared machine: read times with it
        "results": results,
    }
    print(json.dumps({key: report[key] for key in ("missed", "growth")}, indent=1))
    (args.out / "replay.json").write_text(json.dumps(report, indent=1))
    plot(results, args.out / "replay.png")


if __name__ == "__main__":
    main()
