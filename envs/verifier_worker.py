"""The processes behind `VerifierPool`: a nursery that forks workers on demand.

Run as a script, never imported by the library: `python -P verifier_worker.py FD`. The
nursery imports SymPy once, so that replacing a killed worker costs a fork and not an
import. It loads this folder under a name of its own, as the parent package would bring
Ray along. It ends when its socket closes or its parent dies, and its workers with it.
"""

import ctypes
import gc
import importlib
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_SECONDS = 1.0

# Imports SymPy, and fills the grammar's tables, which all workers then inherit.
_WARM_UP = (
    ("x+1", r"\frac{2x+2}{2}"),
    (r"\sqrt{2}+\sqrt[3]{5}", r"2^{1/2}+\log_2 8"),
    (r"e^{-2t}\cos(3t-\frac{\pi}{4})", r"\frac{1}{a_1}\left(b^{n}-1\right)"),
    (r"\binom{n}{2}-\lfloor n/2 \rfloor", r"\frac{n(n-1)}{2}"),
    (r"(-\infty,0)\cup(0,\infty)", r"\mathbb{R}\setminus\{0\}"),
)

Verifier = Callable[[Any, Any], Any]


def main() -> None:
    """Serves `spawn LIMIT` (with a socket) and `kill PID` until the socket closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = os.getppid()
    verify = _load_verifier()
    workers: set[int] = set()
    while os.getppid() == parent:
        ready, _, _ = select.select([control], [], [], _PARENT_CHECK_SECONDS)
        _reap(workers)
        if ready:
            message, fds, _, _ = socket.recv_fds(control, 256, 1)
            if not message:
                return
            control.send(
                _serve_request(message.decode(), fds, workers, control, verify)
            )


def _serve_request(
    message: str, fds: list[int], workers: set[int], control: Any, verify: Verifier
) -> bytes:
    command, number = message.split()
    if command == "kill":
        if int(number) in workers:  # not yet reaped, so the number is still its own
            os.kill(int(number), signal.SIGKILL)
            os.waitpid(int(number), 0)
            workers.discard(int(number))
        return b"done"
    pid = os.fork()
    if pid == 0:
        control.close()
        _work(socket.socket(fileno=fds[0]), int(number), verify)
    os.close(fds[0])
    workers.add(pid)
    return str(pid).encode()


def _reap(workers: set[int]) -> None:
    for pid in list(workers):
        if os.waitpid(pid, os.WNOHANG)[0]:
            workers.discard(pid)


def _work(tasks: socket.socket, memory_limit_bytes: int, verify: Verifier) -> None:
    """Answers one JSON line with another until the socket closes, then exits."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tasks.makefile("rwb") as stream:
        for line in stream:
            stream.write(json.dumps(_judge(line, verify)).encode() + b"\n")
            stream.flush()
    os._exit(0)


def _judge(line: bytes, verify: Verifier) -> tuple[str, str]:
    try:
        verdict = verify(*json.loads(line))
    except MemoryError:
        return "error", "memory limit reached"
    except Exception as error:  # any: a bug in the verifier must not look like a crash
        return "error", f"{type(error).__name__}: {error}"[:200]
    return str(verdict.reason), verdict.message


def _load_verifier() -> Verifier:
    package = types.ModuleType("verifier_worker_envs")
    package.__path__ = [str(Path(__file__).parent)]
    sys.modules[package.__name__] = package
    module = importlib.import_module(f"{package.__name__}.math_verifier")
    logging.disable(logging.CRITICAL)  # math-verify logs whole completions
    verify: Verifier = module.verify_math
    for gold, answer in _WARM_UP:
        verify(gold, rf"\boxed{{{answer}}}")
    gc.freeze()
    return verify


if __name__ == "__main__":
    main()
