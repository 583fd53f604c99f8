"""Cost of opening a table of problems against its size: time and memory.

Run `python benchmarks/data.py`: it generates files of each size, opens them in a
process of its own each, and prints a table: the time until the ids are there, that of
the first problem (parquet: its row group is decoded to disk), that of one of 1,000
other problems, and that of a comparison with 2,000 evaluation questions. "kept" is the
private memory that stays; "peak" counts all memory, the mapped pages of files included;
both are above what a process has that opened one row.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rllib_exgrpo.envs import MathEnv
from rllib_exgrpo.prompt_book import overlapping_questions

SIZES = [10_000, 100_000, 1_000_000]
CHUNK = 10_000
WORDS = 30  # of a question, about 200 characters
COLUMNS = {
    "prompt_column": "question",
    "answer_column": "answer",
    "source_column": None,
}


def write(folder, size):
    """Writes the same table as parquet, with one row group, and as an Arrow file."""
    rng = np.random.default_rng(0)
    words = np.array(
        ["".join(w) for w in rng.choice(list("abcdefgh"), (5000, 6))], object
    )
    path = folder / f"{size}.arrow"
    schema = pa.schema([("question", pa.string()), ("answer", pa.string())])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, size, CHUNK):
            count = min(CHUNK, size - start)
            texts = map(" ".join, rng.choice(words, (count, WORDS)))
            questions = [f"Problem {start + k}: {t}" for k, t in enumerate(texts)]
            answers = [str(start + k) for k in range(count)]
            writer.write_table(pa.table([questions, answers], schema=schema))
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
        pq.write_table(table, path.with_suffix(".parquet"), row_group_size=size)
    return path.with_suffix(".parquet"), path


def resident_mb():
    """Private memory: mapped pages of files belong to the system's cache."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1e3


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure(path):
    """Opens a table in this process; the process has opened a small one before."""
    folder = Path(path).parent
    small = folder / "1.parquet"
    MathEnv(COLUMNS, data=small).problem(MathEnv(COLUMNS, data=small).prompt_ids[0])
    kept, peak = resident_mb(), peak_mb()
    started = time.perf_counter()
    env = MathEnv(COLUMNS, data=path, cache_dir=folder / "cache")
    ids = env.prompt_ids
    opened = time.perf_counter()
    size = len(ids)
    env.problem(ids[size // 2])
    first = time.perf_counter()
    for index in range(0, size, size // 1000):
        env.problem(ids[index])
    read = time.perf_counter()
    result = {
        "rows": size,
        "file": Path(path).suffix,
        "ids s": opened - started,
        "first s": first - opened,
        "read ms": read - first,
        "kept MB": resident_mb() - kept,
        "peak MB": peak_mb() - peak,
    }
    started = time.perf_counter()
    evaluation = MathEnv(COLUMNS, data=path, limit=2000, max_rows_in_memory=0)
    shared, _ = overlapping_questions(env, evaluation)
    assert len(shared) == 2000
    return {**result, "overlap s": time.perf_counter() - started}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--measure", metavar="FILE", help="measure one file and end")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), 1)
        is_first = True
        for size in args.sizes:
            for path in write(Path(folder), size):
                command = [sys.executable, __file__, "--measure", str(path)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(done.stderr)
                result = json.loads(done.stdout)
                if is_first:
                    print("".join(f"{name:>11}" for name in result))
                is_first = False
                print("".join(map(formatted, result.values())), flush=True)


def formatted(value):
    return f"{value:11.2f}" if isinstance(value, float) else f"{value:>11}"


if __name__ == "__main__":
    main()
