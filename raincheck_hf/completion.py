"""Restoring the rest of D after the answer, in the background (paper section 3.3).

One worker thread a model takes one chunk of each waiting conversation in turn. It holds
conversations weakly: what nobody holds any more is dropped within one chunk. The thread ends when
nothing waits, and when the interpreter exits.

On a GPU the chunks run on a stream of their own, on each GPU that holds a part of the conversation.
The worker waits for all of them after each chunk: nothing is published that a GPU still works on,
and work never piles up in front of a step. Completion is for the gap between turns: while some
conversation of the model is being answered, the worker rests nine times as long as a chunk took.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

if TYPE_CHECKING:
    from raincheck_hf.cache import RaincheckCache


# Rest after a chunk over the chunk's own time, while a turn runs: its steps lose about a tenth.
_REST = 9


class Job:
    """One conversation waiting for the worker.

    Attributes:
        error: What a chunk raised, for the barrier.
        done: Set when the worker has let go of the job for good.
        behind: Streams of the caller, one a GPU, that hold the conversation's own kernels.
    """

    def __init__(self, cache: RaincheckCache) -> None:
        self.cache = ref(cache)
        self.behind = [torch.cuda.current_stream(gpu) for gpu in _gpus(cache)]
        self.error: BaseException | None = None
        self.done = threading.Event()


class Completer:
    """The worker of one model."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._turns = 0
        self._streams: dict[torch.device, Any] = {}

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A conversation of the model is being answered."""
        with self._change:
            self._turns += 1
        try:
            yield
        finally:
            with self._change:
                self._turns -= 1
                self._change.notify_all()

    def submit(self, cache: RaincheckCache) -> Job:
        """Queue a conversation; returns at once."""
        job = Job(cache)
        with self._change:
            self._waiting.append(job)
            if not self._stopping and (self._thread is None or not self._thread.is_alive()):
                # A daemon, so that a blocked caller cannot keep the interpreter; see stop().
                self._thread = threading.Thread(
                    target=self._work, name="raincheck-completion", daemon=True
                )
                self._thread.start()
        return job

    def withdraw(self, job: Job) -> None:
        """Take a job back from the worker; waits for the chunk it is in, if any."""
        with self._change:
            job.done.set()  # the worker does not take it up again
            if job in self._waiting:
                self._waiting.remove(job)
            if threading.current_thread() is not self._thread:  # it is, in a callback of a chunk
                self._change.wait_for(lambda: self._running is not job)
            self._change.notify_all()

    def stop(self) -> None:
        """Finish the current chunk and end the thread; what waits stays pending."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            started = time.monotonic()
            more = self._run_one_chunk(job)
            rest = _REST * (time.monotonic() - started)
            with self._change:
                self._running = None
                if more and not job.done.is_set():
                    self._waiting.append(job)  # behind the others: one chunk each in turn
                else:
                    job.done.set()
                self._change.notify_all()
                self._change.wait_for(self._may_go_on, timeout=rest)

    def _may_go_on(self) -> bool:
        return self._turns == 0 or self._stopping or not self._waiting

    def _next(self) -> Job | None:
        """The next job to run, or None to end the thread."""
        with self._change:
            if self._stopping or not self._waiting:
                self._thread = None
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _run_one_chunk(self, job: Job) -> bool:
        """Whether the conversation has more pending."""
        cache = job.cache()
        if cache is None or cache.closed:
            return False
        try:
            with torch.no_grad(), self._own_streams(job) as wait:
                cache.restore_chunk(ready=wait)
            return cache.pending > 0
        except BaseException as error:  # handed to the barrier, whatever it is
            job.error = error
            return False

    @contextmanager
    def _own_streams(self, job: Job) -> Iterator[Callable[[], None]]:
        """Run on streams of the worker's own, behind the conversation's kernels on each GPU.

        Yields:
            What waits for all of them. It is called at the end in any case: a pass that failed may
            have kernels under way that write to memory which is about to be freed.
        """
        own = [self._stream(behind.device) for behind in job.behind]

        def wait() -> None:
            for stream in own:
                stream.synchronize()

        with ExitStack() as entered:
            for stream, behind in zip(own, job.behind, strict=True):
                stream.wait_stream(behind)
                entered.enter_context(torch.cuda.stream(stream))
            entered.callback(wait)
            yield wait

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _gpus(cache: RaincheckCache) -> list[torch.device]:
    """GPUs that hold a part of the conversation, where its deferred rows wait last.

    Entering a stream makes its GPU the current one, and passes start from the deferred rows.
    """
    first = cache.conversation.deferred.device
    kept = [buffer.keys for buffer in cache.buffers.values()]
    kept += [state.live.state for state in cache.conversation.recurrent.values()]
    places = {tensor.device for tensor in kept if tensor is not None}
    return [place for place in (*sorted(places - {first}, key=str), first) if place.type == "cuda"]


_guard = threading.Lock()
_completers: WeakKeyDictionary[Any, Completer] = WeakKeyDictionary()


def completer(model: Any) -> Completer:
    """The model's worker."""
    with _guard:
        return _completers.setdefault(model, Completer())


@atexit.register
def _stop_all() -> None:
    """Daemon threads must not be inside a kernel when the interpreter goes away."""
    with _guard:
        workers = list(_completers.values())
    for worker in workers:
        worker.stop()
