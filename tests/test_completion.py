"""Completion in the background: threads, early follow-ups, interruption, faults, memory."""

from __future__ import annotations

import contextlib
import gc
import io
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import (
    answer_of,
    distance,
    enabled_model,
    follow,
    logits_of,
    prompt_of,
    run_turn,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Reference, next_turn, random_inputs

from raincheck_hf import RaincheckCache, RaincheckConfig, completion
from raincheck_hf.conversation import Conversation, adopt_tensors
from raincheck_hf.executor.modules import ModulesExecutor
from raincheck_hf.progress import Progress, progress_bar
from raincheck_hf.recurrent import Checkpoint, Factors, RecurrentState

CONFIG = RaincheckConfig(selector="random", chunk_size=3, guard_tokens=2, completion_chunk_size=2)


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 20
    while workers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not workers()


def workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("raincheck")]


class Slow:
    """The modules executor with a delay, a counter and a fault for passes of a kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.delay = 0.0
        self.passes = 0
        self.fail_at: int | None = None
        self.error: BaseException = RuntimeError("injected")
        self.order: list[bool] = []  # of each pass, whether it was a step
        stock = ModulesExecutor.run

        def run(executor: Any, model: Any, work: Any, buffers: Any) -> Any:
            self.passes += 1
            self.order.append(work.wants_logits)
            if self.passes == self.fail_at:
                raise self.error
            if not work.wants_logits:
                time.sleep(self.delay)
            return stock(executor, model, work, buffers)

        monkeypatch.setattr(ModulesExecutor, "run", run)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


def follow_up(model: Any, inputs: Any, out: Any, seed: int, config: Any = CONFIG) -> Any:
    whole = next_turn(inputs, answer_of(out, inputs), random_inputs(model, seed, "text only"))
    return run_turn(model, whole, config, 4, cache=out.cache)


def expected_follow_up(model: Any, inputs: Any, seed: int, tokens: int = 4) -> torch.Tensor:
    out = run_turn(model, inputs, CONFIG.replace(completion="blocking"), tokens)
    return logits_of(follow_up(model, inputs, out, seed))


def test_generate_returns_before_the_rest_is_restored(architecture: str, slow: Slow) -> None:
    model = enabled_model(architecture)
    inputs = random_inputs(model, 1)
    slow.delay = 0.2
    out = run_turn(model, inputs, CONFIG, 2)
    assert out.cache.pending > 2
    with pytest.raises(TimeoutError, match="pending"):
        out.cache.finish(timeout=0.01)
    out.cache.finish(timeout=30)  # the timed-out wait left the work going
    assert out.cache.pending == out.raincheck.pending == 0
    assert out.raincheck.completion_ms >= 200


@pytest.mark.parametrize("think", [0.0, 0.03, 0.3])
def test_a_follow_up_at_any_time_is_right(architecture: str, slow: Slow, think: float) -> None:
    model = enabled_model(architecture)
    inputs = random_inputs(model, 2)
    expected = expected_follow_up(model, inputs, 3)
    slow.delay = 0.02
    out = run_turn(model, inputs, CONFIG, 4)
    time.sleep(think)
    assert distance(logits_of(follow_up(model, inputs, out, 3)), expected) < 1e-5


def test_a_background_fault_is_raised_at_the_barrier_once_with_its_traceback(
    architecture: str, slow: Slow
) -> None:
    model = enabled_model(architecture)
    inputs = random_inputs(model, 4)
    expected = expected_follow_up(model, inputs, 5)
    slow.fail_at = slow.passes + 6  # prefill, three decode passes, one chunk, then this one
    out = run_turn(model, inputs, CONFIG, 4)
    with pytest.raises(RuntimeError, match="injected") as caught:
        out.cache.finish(timeout=30)
    assert any(entry.name == "_run_one_chunk" for entry in caught.traceback)
    restored = out.raincheck.restored_in_answer + CONFIG.completion_chunk_size
    assert out.cache.pending == out.raincheck.n_deferred - restored > 0
    assert distance(logits_of(follow_up(model, inputs, out, 5)), expected) < 1e-5


@pytest.mark.parametrize("fail_at", range(1, 9))
def test_a_fault_at_any_pass_is_never_silent_and_wrong(
    architecture: str, slow: Slow, fail_at: int
) -> None:
    """Prefill, three decode passes, three chunks: each fails once; then the next turn is right."""
    model = enabled_model(architecture)
    inputs = random_inputs(model, 6)
    tokens = answer_of(run_turn(model, inputs, CONFIG.replace(completion="lazy"), 4), inputs)
    cache = RaincheckCache(model)

    slow.fail_at = slow.passes + fail_at
    expectation = (
        pytest.raises(RuntimeError, match="injected") if fail_at <= 7 else contextlib.nullcontext()
    )
    with expectation:
        run_turn(model, inputs, CONFIG, 4, cache=cache)
        cache.finish(timeout=30)
    slow.fail_at = None
    if fail_at == 1:
        assert cache.get_seq_length() == 0  # as if never called
        run_turn(model, inputs, CONFIG, 4, cache=cache)

    first, start = SimpleNamespace(raincheck=cache.report), cache.get_seq_length()
    said = tokens[: start - inputs["input_ids"].shape[1]]
    whole = next_turn(inputs, tokens, random_inputs(model, 7, "text only"))
    two = run_turn(model, whole, CONFIG, 4, cache=cache)
    reference = Reference(model)
    follow(reference, prompt_of(model, inputs, first), [*said, 0], first)
    reference.complete()
    second = prompt_of(model, whole, two, start=start)
    expected = follow(reference, second, answer_of(two, whole), two)
    assert distance(logits_of(two), expected) < 1e-4


def test_out_of_memory_retries_smaller_and_keeps_what_was_restored(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = enabled_model(architecture)
    inputs = random_inputs(model, 8)
    stock, sizes = ModulesExecutor.run, []

    def tight(executor: Any, model: Any, work: Any, buffers: Any) -> Any:
        rows = sum(group.rows for group in work.groups)
        if not work.opening and rows > limit:
            raise torch.OutOfMemoryError("injected")
        sizes.append(rows)
        return stock(executor, model, work, buffers)

    limit = 2
    monkeypatch.setattr(ModulesExecutor, "run", tight)
    config = CONFIG.replace(completion="lazy", completion_chunk_size=64)
    out = run_turn(model, inputs, config, 4)
    assert out.raincheck.restored_per_step == [0, 0, 1]  # 3 and a decode row did not fit
    out.cache.finish()
    assert set(sizes[4:]) <= {1, 2}
    monkeypatch.setattr(ModulesExecutor, "run", stock)
    # Another schedule in the answer, the same greedy tokens: the follow-up sees all of D.
    again = run_turn(model, inputs, CONFIG.replace(chunk_size=1, completion="blocking"), 4)
    assert answer_of(again, inputs) == answer_of(out, inputs)
    expected = logits_of(follow_up(model, inputs, again, 9))
    assert distance(logits_of(follow_up(model, inputs, out, 9)), expected) < 1e-5


def test_out_of_memory_for_good_names_what_to_lower(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = enabled_model(architecture)
    out = run_turn(model, random_inputs(model, 8), CONFIG.replace(completion="lazy"), 2)
    pending, stock = out.cache.pending, ModulesExecutor.run

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(ModulesExecutor, "run", full)
    with pytest.raises(torch.OutOfMemoryError, match="completion_chunk_size"):
        out.cache.finish()
    assert out.cache.pending == pending
    monkeypatch.setattr(ModulesExecutor, "run", stock)
    out.cache.finish()
    assert out.cache.pending == 0


def test_eight_threads_give_what_each_conversation_gives_alone() -> None:
    model = enabled_model("qwen3_5")

    def conversation(seed: int, think: Any) -> list[list[int]]:
        inputs = random_inputs(model, seed)
        answers, cache = [], RaincheckCache(model)
        for turn in range(3):
            if turn:
                new = random_inputs(model, 1000 * turn + seed, "text only")
                inputs = next_turn(inputs, answers[-1], new)
            out = run_turn(model, inputs, CONFIG, 4, cache=cache)
            answers.append(answer_of(out, inputs))
            time.sleep(think())
        return answers

    seeds = range(20)
    alone = {seed: conversation(seed, lambda: 0.0) for seed in seeds}
    wrong: list[Any] = []

    def work(thread: int) -> None:
        draw = random.Random(thread)
        for seed in seeds:
            got = conversation(seed, lambda: draw.choice([0.0, 0.005, 0.02, 0.05]))
            if got != alone[seed]:
                wrong.append((thread, seed, got, alone[seed]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_step_waits_for_no_more_than_one_completion_chunk(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "_REST", 0)  # the turnstile alone
    model = enabled_model("qwen3_vl")
    slow.delay = 0.1
    config = CONFIG.replace(completion_chunk_size=1)
    others = [run_turn(model, random_inputs(model, seed), config, 1) for seed in (1, 2, 3)]
    slow.order.clear()
    run_turn(model, random_inputs(model, 9), CONFIG.replace(defer="never"), 8)
    steps = "".join("s" if is_step else "c" for is_step in slow.order).strip("c")
    # Three conversations have chunks waiting all the time; a step meets at most one of them.
    assert "c" in steps
    assert "cc" not in steps
    for other in others:
        other.cache.close()


def test_completion_makes_way_for_a_turn(slow: Slow) -> None:
    """While a turn runs, the worker takes a tenth of the time at most, and goes on after it."""
    model = enabled_model("qwen3_vl")
    slow.delay = 0.05
    other = run_turn(model, random_inputs(model, 1), CONFIG.replace(completion_chunk_size=1), 1)
    before = other.cache.pending
    out = run_turn(model, random_inputs(model, 9), CONFIG.replace(defer="never"), 40)
    seconds = sum(out.raincheck.step_ms) / 1e3
    assert before - other.cache.pending <= 2 + seconds / (10 * slow.delay)
    other.cache.finish(timeout=30)


@pytest.mark.parametrize("completion", ["background", "blocking", "lazy"])
def test_progress_is_told_pass_by_pass(architecture: str, completion: str) -> None:
    model = enabled_model(architecture)
    cache, told = RaincheckCache(model), []
    cache.on_progress = told.append
    config = CONFIG.replace(completion=completion, completion_chunk_size=1)
    run_turn(model, random_inputs(model, 1), config, 4, cache=cache)
    cache.finish(timeout=30) if completion == "background" else cache.finish()
    assert told[0] == Progress(restored=3, total=cache.report.n_deferred, phase="decode")
    assert told[-1].restored == told[-1].total
    assert [p.restored for p in told] == sorted({p.restored for p in told})
    assert {p.phase for p in told[1:]} == {"completion"}


def test_the_progress_bar_counts_to_the_end() -> None:
    model, written = enabled_model("qwen3_vl"), io.StringIO()
    cache = RaincheckCache(model)
    cache.on_progress = progress_bar(file=written)
    run_turn(model, random_inputs(model, 1), CONFIG.replace(completion="blocking"), 4, cache=cache)
    assert "100%" in written.getvalue()
    assert "completion" in written.getvalue()


@pytest.mark.parametrize("how", ["finish", "fork"])
def test_a_retry_takes_the_background_back(architecture: str, slow: Slow, how: str) -> None:
    """A turn broke off, its rest went to the background, and then another question came."""
    model = enabled_model(architecture)
    first, other = random_inputs(model, 5), random_inputs(model, 6)
    expected = run_turn(model, other, CONFIG.replace(completion="blocking"), 6)
    cache = RaincheckCache(model)

    def stop(ids: Any, scores: Any) -> Any:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        model.generate(**first, raincheck=CONFIG, cache=cache, logits_processor=[stop])
    slow.delay = 0.2
    if how == "finish":
        with pytest.raises(TimeoutError):
            cache.finish(timeout=0.01)
    else:
        cache.fork().close()
    got = run_turn(model, other, CONFIG.replace(completion="blocking"), 6, cache=cache)
    assert distance(logits_of(got), logits_of(expected)) < 1e-5
    assert cache.get_seq_length() == other["input_ids"].shape[1] + 5
    assert cache.pending == 0


def test_rewind_brings_back_all_there_was(architecture: str) -> None:
    model = enabled_model(architecture)
    inputs = random_inputs(model, 5)
    one = run_turn(model, inputs, CONFIG, 4)
    cache, last = one.cache, one.cache.last_token
    whole = next_turn(inputs, answer_of(one, inputs), random_inputs(model, 6))

    def stop(ids: Any, scores: Any) -> Any:
        raise RuntimeError("stop")

    for _ in range(2):  # a second try breaks off too
        with pytest.raises(RuntimeError, match="stop"):
            model.generate(**whole, raincheck=CONFIG, cache=cache, logits_processor=[stop])
    cache.rewind()
    cache.rewind()  # nothing more to do
    assert cache.last_token == last
    assert cache.report is one.raincheck
    assert cache.get_seq_length() == inputs["input_ids"].shape[1] + 3
    # Parting inside the answer drops it; there is no last token then.
    parted = next_turn(inputs, [one.cache.token_ids[-3] + 1, 4], random_inputs(model, 6))
    with pytest.raises(RuntimeError, match="stop"):
        model.generate(**parted, raincheck=CONFIG, cache=cache, logits_processor=[stop])
    cache.rewind()
    assert cache.last_token is None
    assert cache.get_seq_length() == inputs["input_ids"].shape[1]


def test_a_callback_may_close_the_conversation(slow: Slow) -> None:
    model = enabled_model("qwen3_vl")
    slow.delay = 0.02
    one, two = (RaincheckCache(model) for _ in range(2))
    one.on_progress = lambda progress: one.close()
    config = CONFIG.replace(defer="post_answer")
    for seed, cache in ((1, one), (2, two)):
        run_turn(model, random_inputs(model, seed), config, 2, cache=cache)
    two.finish(timeout=30)  # the worker lives on
    assert one.closed
    one.on_progress = None  # the callback holds its cache


def test_conversations_are_served_in_turn(slow: Slow) -> None:
    model = enabled_model("qwen3_vl")
    slow.delay = 0.02
    caches = [run_turn(model, random_inputs(model, s), CONFIG, 1).cache for s in (1, 2)]
    total = caches[0].pending
    while min(c.pending for c in caches) > 4:
        ahead = abs(caches[0].pending - caches[1].pending)
        assert ahead <= 3 * CONFIG.completion_chunk_size, (ahead, total)
        time.sleep(0.002)
    for cache in caches:
        cache.finish()


@pytest.mark.parametrize("how", ["drop", "close"])
def test_abandoned_work_stops_within_one_chunk_and_frees_its_memory(
    architecture: str, slow: Slow, how: str
) -> None:
    model = enabled_model(architecture)
    slow.delay = 0.1
    out = run_turn(model, random_inputs(model, 1), CONFIG, 1)
    assert out.cache.pending > 4
    held = [weakref.ref(buffer.keys) for buffer in out.cache.buffers.values()]
    held.append(weakref.ref(out.cache.conversation.deferred._blocks[0].embeds))
    if how == "close":
        out.cache.close()
        with pytest.raises(ValueError, match="closed"):
            out.cache.finish()
    cache = weakref.ref(out.cache)
    model.__dict__.pop("raincheck_report", None)
    del out
    deadline = time.monotonic() + 5
    while workers() and time.monotonic() < deadline:
        time.sleep(0.01)
    gc.collect()
    assert cache() is None
    assert [ref() for ref in held] == [None] * len(held)


@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria", "streamer"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interruption_leaves_a_usable_cache(
    architecture: str, where: str, error: type[BaseException]
) -> None:
    model = enabled_model(architecture)
    inputs = random_inputs(model, 5)
    new = random_inputs(model, 6, "text only")

    class Interrupts:
        calls = 0

        def _maybe(self) -> None:
            self.calls += 1
            if self.calls == 5:
                raise error("stop")

        def __call__(self, ids: Any, scores: Any) -> Any:
            self._maybe()
            return scores if where == "logits_processor" else torch.zeros(1, dtype=torch.bool)

        def put(self, value: Any) -> None:
            self._maybe()

        def end(self) -> None: ...

    hook = Interrupts()
    kwargs = {where: hook if where == "streamer" else [hook]}
    cache = RaincheckCache(model)
    with pytest.raises(error, match="stop"):
        model.generate(
            **inputs, raincheck=CONFIG, cache=cache, max_new_tokens=9, do_sample=False, **kwargs
        )
    consumed = cache.get_seq_length() - inputs["input_ids"].shape[1]
    assert consumed in (3, 4)
    # Continued: what was consumed stays, and the conversation goes on behind it.
    said = cache.token_ids[inputs["input_ids"].shape[1] :].tolist()
    whole = next_turn(inputs, said, new)
    resumed = run_turn(model, whole, CONFIG, 4, cache=cache)
    full = run_turn(model, inputs, CONFIG.replace(completion="blocking"), consumed + 1)
    assert answer_of(full, inputs)[:consumed] == said
    expected = run_turn(model, whole, CONFIG, 4, cache=full.cache)
    assert distance(logits_of(resumed), logits_of(expected)) < 1e-5


@pytest.mark.parametrize("completion", ["lazy", "background"])
def test_fork_before_and_after_completion(architecture: str, slow: Slow, completion: str) -> None:
    model = enabled_model(architecture)
    inputs = random_inputs(model, 5)
    expected = expected_follow_up(model, inputs, 6)
    slow.delay = 0.5
    out = run_turn(model, inputs, CONFIG.replace(completion=completion), 4)
    early = out.cache.fork()
    assert early.pending
    slow.delay = 0.0
    out.cache.finish()
    late = out.cache.fork()
    whole = next_turn(inputs, answer_of(out, inputs), random_inputs(model, 6, "text only"))
    for cache in (early, late, out.cache):
        got = run_turn(model, whole, CONFIG, 4, cache=cache)
        assert distance(logits_of(got), expected) < 1e-5


ACTIONS = ["ask", "early", "close", "drop", "interrupt", "fork"]


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1)), max_size=6),
    which=st.sampled_from(["qwen3_vl", "qwen3_5"]),
)
def test_random_schedules(actions: list[tuple[str, int]], which: str) -> None:
    """Whatever happens in whatever order: no hang, no leak, and answers as when run alone."""
    model = enabled_model(which, **SMALL)
    conversations: list[dict[str, Any] | None] = [None, None]
    held: list[Any] = []
    for action, index in actions:
        now = conversations[index]
        if action in ("ask", "early") or now is None:
            now = now or {"cache": RaincheckCache(model), "inputs": None, "answers": []}
            conversations[index] = now
            held.append(weakref.ref(now["cache"]))
            turn = len(now["answers"])
            seed = 50 * index + turn
            new = random_inputs(model, seed, "text only" if turn else TINY)
            inputs = next_turn(now["inputs"], now["answers"][-1], new) if turn else new
            if action == "ask" and now["cache"].pending:
                now["cache"].finish(timeout=30)
            out = run_turn(model, inputs, CONFIG, 3, cache=now["cache"])
            now["inputs"] = inputs
            now["answers"].append(answer_of(out, inputs))
            assert now["answers"] == alone(which, index, turn)
            del out
        elif action == "close":
            now["cache"].close()
            conversations[index] = None
        elif action == "drop":
            conversations[index] = None
        elif action == "fork":
            now["cache"] = now["cache"].fork()
            held.append(weakref.ref(now["cache"]))
        elif action == "interrupt":
            interrupt(model, now)
        del now
    conversations.clear()
    model.__dict__.pop("raincheck_report", None)
    deadline = time.monotonic() + 10
    while workers() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not workers()
    gc.collect()
    assert [cache() for cache in held] == [None] * len(held)


SMALL: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 32}
TINY = (("text", 2), ("image", 3, 3), ("text", 2))
_alone: dict[tuple[str, int], list[list[int]]] = {}


def alone(which: str, index: int, turn: int) -> list[list[int]]:
    """The answers of a conversation that nothing disturbs."""
    answers = _alone.setdefault((which, index), [])
    if len(answers) <= turn:
        model = enabled_model(which, **SMALL)
        cache, inputs = RaincheckCache(model), None
        answers.clear()
        for t in range(turn + 1):
            new = random_inputs(model, 50 * index + t, "text only" if t else TINY)
            inputs = next_turn(inputs, answers[-1], new) if t else new
            out = run_turn(model, inputs, CONFIG.replace(completion="blocking"), 3, cache=cache)
            answers.append(answer_of(out, inputs))
    return answers[: turn + 1]


def interrupt(model: Any, now: dict[str, Any]) -> None:
    """A turn that is broken off before its prefill: nothing of it may stay."""
    before = now["cache"].token_ids
    new = random_inputs(model, 99, "text only")
    inputs = next_turn(now["inputs"], now["answers"][-1], new)

    def stop(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # the worker has other passes
            raise KeyboardInterrupt

    handle = model.model.language_model.layers[-1].register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_turn(model, inputs, CONFIG, 3, cache=now["cache"])
    finally:
        handle.remove()
    assert torch.equal(now["cache"].token_ids, before)


def test_the_interpreter_exits_promptly_with_work_pending() -> None:
    program = """
import atexit, sys, time, torch
atexit.register(lambda: print("stopped", time.time() - left))  # runs after the package's own
sys.path.insert(0, "tests")
torch.set_num_threads(1)
from harness import enabled_model, run_turn
from reference import random_inputs
from raincheck_hf import RaincheckConfig
from raincheck_hf.executor.modules import ModulesExecutor
stock = ModulesExecutor.run
def slow(self, model, work, buffers):
    if not work.wants_logits:
        time.sleep(0.2)
    return stock(self, model, work, buffers)
ModulesExecutor.run = slow
model = enabled_model("qwen3_vl")
config = RaincheckConfig(selector="random", completion_chunk_size=1)
outs = [run_turn(model, random_inputs(model, seed), config, 1) for seed in range(8)]
assert sum(out.cache.pending for out in outs) > 40  # ten seconds of work
left = time.time()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert float(done.stdout.split()[-1]) < 3  # one chunk of 0.2 s, and the rest of the pass
    assert not done.stderr.count("Traceback"), done.stderr


# A conversation over several GPUs, with stand-ins for them

GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Gpus:
    """Streams of GPUs that are not there, and which of them have work that nobody waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.busy: set[Any] = set()
        self.stack: list[Any] = []
        self.behind: list[tuple[Any, Any]] = []
        callers = {gpu: self._new(gpu) for gpu in GPUS}
        stand_ins = {
            "Stream": self._new,
            "stream": self._entered,
            "current_stream": callers.__getitem__,
            "default_stream": callers.__getitem__,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        self.callers = callers

    def _new(self, device: torch.device) -> Any:
        stream = SimpleNamespace(device=device)
        stream.wait_stream = lambda other: self.behind.append((device, other))
        stream.synchronize = lambda: self.busy.discard(device)
        return stream

    @contextlib.contextmanager
    def _entered(self, stream: Any) -> Iterator[None]:
        self.stack.append(stream)
        try:
            yield
        finally:
            assert self.stack.pop() is stream

    def launch(self) -> None:
        """A pass with layers on every GPU."""
        assert {stream.device for stream in self.stack} == set(GPUS)
        assert self.stack[-1].device == GPUS[0]  # the current GPU, where passes start
        self.busy |= set(GPUS)


class Spread:
    """A conversation whose rows wait on the first GPU, with keys on both."""

    closed = False
    pending = 0

    def __init__(self, gpus: Gpus, fail: bool) -> None:
        self.gpus, self.fail = gpus, fail
        self.seen: list[set[Any]] = []
        self.conversation = SimpleNamespace(deferred=SimpleNamespace(device=GPUS[0]), recurrent={})
        self.buffers = {
            i: SimpleNamespace(keys=SimpleNamespace(device=gpu)) for i, gpu in enumerate(GPUS)
        }
        self.buffers[2] = SimpleNamespace(keys=None)  # not written yet

    def restore_chunk(self, ready: Any) -> None:
        self.gpus.launch()
        if self.fail:
            raise RuntimeError("injected")
        ready()
        self.seen.append(set(self.gpus.busy))


@pytest.mark.parametrize("fail", [False, True])
def test_completion_waits_for_every_gpu_of_the_conversation(
    monkeypatch: pytest.MonkeyPatch, fail: bool
) -> None:
    gpus = Gpus(monkeypatch)
    cache = Spread(gpus, fail)
    worker = completion.Completer()
    job = worker.submit(cache)
    assert job.done.wait(10)
    assert gpus.behind == [(gpu, gpus.callers[gpu]) for gpu in reversed(GPUS)]
    assert not gpus.busy and not gpus.stack  # a failed pass may still be writing, too
    if fail:
        assert isinstance(job.error, RuntimeError) and str(job.error) == "injected"
    else:
        assert job.error is None
        assert cache.seen == [set()]  # nothing was under way when the chunk was published


def test_what_the_background_made_is_adopted_where_it_lies() -> None:
    """A job withdrawn half-way leaves factors and a lead state behind that later joins read."""

    class OnGpu:
        is_cuda = True

        def __init__(self, index: int) -> None:
            self.device = GPUS[index]
            self.users: list[Any] = []

        def record_stream(self, stream: Any) -> None:
            self.users.append(stream)

    def state(index: int) -> tuple[Any, list[OnGpu]]:
        made = [OnGpu(index) for _ in range(9)]
        prefix, live, lead = Checkpoint(*made[:2]), Checkpoint(*made[2:4]), Factors(*made[4:7])
        return RecurrentState(prefix, live, lead, made[7], made[8]), made

    (one, on_first), (two, on_second) = state(0), state(1)
    with pytest.MonkeyPatch.context() as patch:
        gpus = Gpus(patch)
        adopt_tensors(Conversation(recurrent={0: one, 1: two}))
    assert all(tensor.users == [gpus.callers[GPUS[0]]] for tensor in on_first)
    assert all(tensor.users == [gpus.callers[GPUS[1]]] for tensor in on_second)
