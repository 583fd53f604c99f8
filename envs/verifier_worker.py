"""The processes behind `VerifierPool`: a nursery that forks workers on demand.

Run as a script, never imported by the library: `python -P verifier_worker.py FD
MODULE:FUNCTION`. The nursery imports the verifier, a function of a module in this
folder, once, so that replacing a killed worker costs a fork and not an import. It loads
the folder under a name of its own, as the parent package would bring Ray along. It ends
when its socket closes or its parent dies, and its workers with it.
"""

import ctypes
import gc
import importlib
import json
import logging
import math
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
_MAX_MESSAGE_BYTES = 1 << 16

Verifier = Callable[..., Any]


def main() -> None:
    """Serves its socket until that closes.

    `spawn LIMIT` comes with a socket and is answered by a PID, `kill PID` is answered
    as well, `learn TASK` is not.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = os.getppid()
    verify = _load_verifier(sys.argv[2])
    workers: set[int] = set()
    while os.getppid() == parent:
        ready, _, _ = select.select([control], [], [], _PARENT_CHECK_SECONDS)
        _reap(workers)
        if ready:
            message, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 1)
            command, _, argument = message.partition(b" ")
            if not message:
                return
            if command == b"learn":
                _judge(argument, verify)
                gc.freeze()
                continue
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


def _judge(line: bytes, verify: Verifier) -> tuple[float, str, str]:
    try:
        verdict = verify(*json.loads(line))
    except MemoryError:
        return math.nan, "error", "memory limit reached"
    except Exception as error:  # any: a bug in the verifier must not look like a crash
        return math.nan, "error", f"{type(error).__name__}: {error}"[:200]
    return verdict.reward, str(verdict.reason), verdict.message


def _load_verifier(name: str) -> Verifier:
    module_name, _, function_name = name.partition(":")
    package = types.ModuleType("verifier_worker_envs")
    package.__path__ = [str(Path(__file__).parent)]
    sys.modules[package.__name__] = package
    module = importlib.import_module(f"{package.__name__}.{module_name}")
    logging.disable(logging.CRITICAL)  # math-verify logs whole completions
    module.warm_up()
    gc.freeze()
    verify: Verifier = getattr(module, function_name)
    return verify


if __name__ == "__main__":
    main()
