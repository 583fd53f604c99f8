"""The verifier's processes: limits, order, threads, and nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rllib_exgrpo.envs.verifier_pool import VerifierPool

# The roots hide the size from the check that comes before SymPy.
TOWER = r"\boxed{x+9^{9^{9^{\sqrt{81}}}}}"
FACTORIAL = r"\boxed{x+(\sqrt{10^{16}})!}"
RIGHT = r"\boxed{\frac{2x+2}{2}}"
GOLD = "x+1"


def live_parents() -> dict[int, int]:
    """The parent of each live process, zombies not counted."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        state, parent = rest.split()[:2]
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    return parents


def descendants(pid: int) -> set[int]:
    parents = live_parents()
    found, wave = set(), {pid}
    while wave:
        wave = {child for child, parent in parents.items() if parent in wave}
        found |= wave
    return found


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def test_eight_answers_with_a_tower_take_the_limit_plus_little():
    with VerifierPool(2, time_limit_s=1.0) as pool:
        pool.verify_many([GOLD], [RIGHT])  # starts the processes
        start = time.monotonic()
        completions = [RIGHT, TOWER, *[RIGHT] * 5, r"\boxed{x+2}"]
        verdicts = pool.verify_many([GOLD] * 8, completions)
        seconds = time.monotonic() - start
    reasons = [v.reason for v in verdicts]
    assert reasons == ["ok", "timeout", *["ok"] * 5, "wrong"]
    assert verdicts[1].reward != verdicts[1].reward  # NaN
    assert 1.0 <= seconds < 3.0  # the limit, and room for a loaded machine
    limit = verdicts.pop(1).seconds
    assert 1.0 <= limit < 1.5
    assert all(0 < verdict.seconds < 1.0 for verdict in verdicts)


def test_order_is_kept_from_several_threads():
    sums = [(f"x+{k}", rf"\boxed{{{k % 3}+x}}") for k in range(12)]
    results = {}

    def judge(name):
        results[name] = [v.reward for v in pool.verify_many(*zip(*sums, strict=True))]

    with VerifierPool(2) as pool:
        threads = [threading.Thread(target=judge, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = [float(k == k % 3) for k in range(12)]
    assert results == {"a": expected, "b": expected}


def test_the_callers_alarm_is_left_alone():
    def handler(*_):
        raise AssertionError("the alarm rang")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.alarm(100)
        with VerifierPool(1, time_limit_s=0.3) as pool:
            pool.verify_many([GOLD] * 2, [RIGHT, TOWER])
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 80 < signal.alarm(0) <= 100
    finally:
        signal.signal(signal.SIGALRM, before)


def test_nothing_is_left_after_close():
    others = descendants(os.getpid())
    pool = VerifierPool(2, time_limit_s=0.5)
    pool.verify_many([GOLD] * 3, [RIGHT, TOWER, RIGHT])
    assert len(descendants(os.getpid()) - others) >= 2  # the nursery and a worker
    futures = [pool.submit(GOLD, TOWER) for _ in range(4)]
    pool.close()
    assert wait_until(lambda: descendants(os.getpid()) <= others)
    assert wait_until(lambda: all(f.done() for f in futures))


def test_processes_end_with_a_killed_parent():
    script = textwrap.dedent(f"""
        import sys, time, types
        package = sys.modules["envs"] = types.ModuleType("envs")  # loads without Ray
        package.__path__ = [{str(Path(__file__).parent.parent / "envs")!r}]
        from envs.verifier_pool import VerifierPool
        pool = VerifierPool(1, time_limit_s=60)
        pool.submit({GOLD!r}, {RIGHT!r}).result()
        pool.submit({GOLD!r}, {TOWER!r})
        print("busy", flush=True)
        time.sleep(60)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline() == b"busy\n"
    time.sleep(0.3)
    children = descendants(parent.pid)
    assert len(children) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not children & live_parents().keys())


def test_memory_limit_is_an_error_and_the_worker_is_replaced():
    with VerifierPool(1, time_limit_s=20.0, memory_limit_bytes=600 << 20) as pool:
        # The floor needs the power's digits: 2 GiB.
        hungry = r"\boxed{x+\lfloor 2^{\sqrt{4}^{34}}/3 \rfloor}"
        verdicts = pool.verify_many([GOLD] * 2, [hungry, RIGHT])
    assert [v.reason for v in verdicts] == ["error", "ok"]
    assert "memory" in verdicts[0].message


def test_workers_are_renewed_and_killed_ones_replaced():
    with VerifierPool(1, answers_per_worker=2) as pool:
        verdicts = pool.verify_many([GOLD] * 5, [RIGHT] * 5)
        assert [v.reason for v in verdicts] == ["ok"] * 5
        for pid in descendants(os.getpid()):
            if b"verifier_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        # The worker is gone and so is the process that forks new ones.
        assert wait_until(
            lambda: pool.verify_many([GOLD], [RIGHT])[0].reason == "ok", 20
        )


def test_long_prose_is_quick():
    prose = ["word " * 20_000, "$" * 20_000, "\n" * 60_000, r"\[ x " * 6_000]
    with VerifierPool(1) as pool:
        pool.verify_many([GOLD], [RIGHT])
        verdicts = pool.verify_many([GOLD] * 4, [text + RIGHT for text in prose])
    assert [v.reason for v in verdicts] == ["ok"] * 4
    assert max(v.seconds for v in verdicts) < 2.0


def test_memory_is_flat_over_200_hostile_answers(capfd):
    with VerifierPool(2, time_limit_s=0.05) as pool:
        pool.verify_many([GOLD] * 20, [TOWER, FACTORIAL] * 10)
        before = resident_bytes()
        verdicts = pool.verify_many([GOLD] * 200, [TOWER, FACTORIAL] * 100)
        grown = resident_bytes() - before
        assert len(descendants(os.getpid())) < 20
    # A fast machine finds some of them wrong in time; most end at the limit.
    assert {v.reason for v in verdicts} <= {"timeout", "wrong"}
    assert grown < 5 << 20
    assert capfd.readouterr() == ("", "")  # not a line per answer, let alone a trace


def test_bad_limits_are_refused():
    with pytest.raises(ValueError, match="positive time limit"):
        VerifierPool(1, time_limit_s=0)
