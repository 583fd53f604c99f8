"""A pool of killable processes that judge answers within hard limits."""

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from .verdict import Reason, Verdict

_WORKER_FILE = Path(__file__).with_name("verifier_worker.py")
_START_SECONDS = 120.0  # importing SymPy takes seconds, on a loaded machine more
_STOP_SECONDS = 5.0
_LESSON_SECONDS = (0.01, 0.2)
_MAX_LESSONS = 300
_MAX_LESSON_BYTES = 10_000


class VerifierPool:
    """Judges answers in worker processes; by default, maths answers.

    An answer that takes longer than the limit has its worker killed and replaced, and
    gets a verdict without a reward. No signal is used in the calling process, so that
    it works from any thread, from Ray actors and from Tune trials. The processes start
    with the first answer, and end with `close` or with the calling process. A new one
    starts with what the verifier's caches have of answers that others have judged.

    Args:
        num_workers: processes, and answers judged at a time; None means one a CPU.
        time_limit_s: wall time for one answer, in seconds.
        memory_limit_bytes: address space of one worker.
        answers_per_worker: answers after which a worker is renewed, as SymPy's caches
            grow.
        verifier: "module:function" of this package. The function gets what `submit`
            gets, as JSON leaves it, and returns a verdict; the module has a function
            `warm_up`, which is called once.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        time_limit_s: float = 5.0,
        memory_limit_bytes: int = 2 << 30,
        answers_per_worker: int = 500,
        verifier: str = "math_verifier:verify_math",
    ) -> None:
        num_workers = num_workers or len(os.sched_getaffinity(0))
        if num_workers < 1 or time_limit_s <= 0:
            raise ValueError(
                f"A verifier pool needs at least one worker and a positive time limit; "
                f"got {num_workers} workers and {time_limit_s} s."
            )
        self._limits = (time_limit_s, memory_limit_bytes, answers_per_worker)
        self._threads = ThreadPoolExecutor(num_workers, "verifier")
        self._nursery = _Nursery(verifier)
        self._own = threading.local()

    def submit(self, *task: Any) -> Future[Verdict]:
        """Starts judging one answer; for grading while others are still generated.

        Args:
            *task: the verifier's arguments; for maths, gold answer and completion.
        """
        return self._threads.submit(self._judge, task)

    def verify_many(
        self, golds: Sequence[Any], completions: Sequence[str]
    ) -> list[Verdict]:
        """Judges `completions[i]` against `golds[i]`, and returns verdicts in order."""
        pairs = zip(golds, completions, strict=True)
        futures = [self.submit(gold, completion) for gold, completion in pairs]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends all processes; answers not yet started are given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._nursery.close()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge(self, task: Sequence[Any]) -> Verdict:
        """Judges one answer with the calling thread's own worker."""
        time_limit_s, memory_limit_bytes, answers_per_worker = self._limits
        worker = getattr(self._own, "worker", None)
        if worker is None:
            worker = self._own.worker = _Worker(self._nursery, memory_limit_bytes)
        start = time.monotonic()
        reward, reason, message = worker.judge(task, time_limit_s)
        verdict = Verdict(reward, Reason(reason), message, time.monotonic() - start)
        is_broken = reason in (Reason.TIMEOUT, Reason.ERROR)
        is_lesson = _LESSON_SECONDS[0] < verdict.seconds < _LESSON_SECONDS[1]
        if is_lesson and not is_broken:
            self._nursery.teach(task)
        if is_broken or worker.num_answers >= answers_per_worker:
            self._own.worker = None
            worker.kill()
        return verdict


def judged(verdict: Verdict) -> Future[Verdict]:
    """Returns what `submit` returns, for an answer that needs no worker."""
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    return future


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self, nursery: "_Nursery", memory_limit_bytes: int) -> None:
        self._nursery = nursery
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._pid = nursery.request(f"spawn {memory_limit_bytes}", theirs)
        self.num_answers = 0

    def judge(self, task: Sequence[Any], limit_s: float) -> tuple[float, str, str]:
        """Returns reward, reason, message; after a time-out or an error, kill it."""
        self.num_answers += 1
        line = _encode(task) + b"\n"
        deadline = time.monotonic() + limit_s
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(line)
            reply = self._receive_line(deadline)
        except TimeoutError:
            return math.nan, Reason.TIMEOUT, f"no verdict within {limit_s:g} s"
        except OSError as error:
            return math.nan, Reason.ERROR, f"the worker process ended: {error}"
        if not reply:
            return math.nan, Reason.ERROR, "the worker process ended"
        reward, reason, message = json.loads(reply)
        return reward, reason, message

    def kill(self) -> None:
        """Ends the process at once."""
        self._socket.close()
        self._nursery.request(f"kill {self._pid}")

    def _receive_line(self, deadline: float) -> bytes:
        reply = b""
        while not reply.endswith(b"\n"):
            self._socket.settimeout(max(1e-6, deadline - time.monotonic()))
            piece = self._socket.recv(65536)
            if not piece:
                return b""
            reply += piece
        return reply


class _Nursery:
    """The parent's end of the process that forks the workers; started when needed."""

    def __init__(self, verifier: str) -> None:
        self._verifier = verifier
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False
        self._num_lessons = 0

    def teach(self, task: Sequence[Any]) -> None:
        """Lets workers to come start with caches that know a task like this.

        The process judges it too. It must have been judged fast, as none can be forked
        meanwhile.
        """
        line = _encode(task)
        if self._num_lessons >= _MAX_LESSONS or len(line) > _MAX_LESSON_BYTES:
            return
        with self._lock:
            if self._control is not None and not self._is_closed:
                self._num_lessons += 1
                with suppress(OSError):  # the next request finds out what is wrong
                    self._control.send(b"learn " + line)

    def request(self, message: str, passed: socket.socket | None = None) -> str:
        """Sends a request, with a socket to pass on, and returns the reply."""
        with self._lock:
            for _ in range(2):  # the second time with a new process
                if self._is_closed:
                    return ""
                reply = self._exchange(message, passed)
                if reply:
                    return reply
            raise RuntimeError(
                "The process that starts the verifier's workers ended twice; most "
                "likely the verifier cannot be imported, or the memory ran out."
            )

    def close(self) -> None:
        """Ends the process, and thereby its workers."""
        with self._lock:
            self._is_closed = True
            if self._process is None or self._control is None:
                return
            self._control.close()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _exchange(self, message: str, passed: socket.socket | None) -> str:
        """Returns the reply, empty if the process has ended."""
        try:
            control = self._running()
            fds = [passed.fileno()] if passed else []
            socket.send_fds(control, [message.encode()], fds)
            reply = control.recv(256).decode()
        except OSError:
            reply = ""
        if not reply and self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._num_lessons = 0
        return reply

    def _running(self) -> socket.socket:
        if self._process is None or self._control is None:
            self._control, theirs = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_SEQPACKET
            )
            self._control.settimeout(_START_SECONDS)
            # -P keeps this folder off the module path, where `math.py` would hide
            # Python's own; a new session keeps Ctrl-C from the workers.
            arguments = [str(_WORKER_FILE), str(theirs.fileno()), self._verifier]
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        return self._control


def _encode(task: Sequence[Any]) -> bytes:
    return json.dumps(task, default=str).encode()
