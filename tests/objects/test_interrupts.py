"""Interrupts: whatever stops Python, no block and no pool is lost."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import ctypes
import functools
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interrupts import Alarm, interrupt_everywhere

import jax_kvblock as kv
from jax_kvblock.objects import steps

BLOCKS = 8


def make_manager() -> kv.BlockManager:
    return kv.BlockManager(
        2, 4, num_kv_heads=2, head_dim=4, dtype=jnp.float32, num_blocks=BLOCKS
    )


@pytest.fixture
def manager() -> kv.BlockManager:
    return make_manager()


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell may start a program with SIGINT ignored; Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    left = signal.signal(signal.SIGINT, before)
    assert left is signal.default_int_handler  # no update has kept it


def add_one(pool: kv.KVPool) -> kv.KVPool:
    return kv.KVPool(pool.data + 1, pool.spec)


# ---- blocks --------------------------------------------------------------------------


def allocate_and_free(manager: kv.BlockManager) -> None:
    blocks = manager.allocate_blocks(3)
    others = blocks.share()
    manager.free(blocks)
    with manager.allocate_blocks(2) as more:
        more += manager.allocate_blocks(1)
        more.append(others[0].share())
        capsule = others[1][0].k.__dlpack__()
    del capsule


BLOCK_USES: dict[str, Callable[[kv.BlockManager], Any]] = {
    "allocate and free": allocate_and_free,
    "collect": lambda manager: manager.allocate_blocks(2)[0].share(),
    "slots": lambda manager: manager.allocate_blocks(2).slots(1, 5),
    "export": lambda manager: manager.allocate_blocks(1)[0][1].__dlpack__(),
}


@pytest.mark.parametrize("use", BLOCK_USES)
def test_no_block_is_lost_wherever_an_interrupt_comes(
    manager: kv.BlockManager, use: str
) -> None:
    def all_are_back() -> None:
        assert manager.num_free_blocks == BLOCKS and manager.live_exports == []

    places = interrupt_everywhere(lambda: BLOCK_USES[use](manager), all_are_back)
    assert places > 10
    assert sorted(manager.allocate_blocks(BLOCKS).ids) == list(range(BLOCKS))


def test_no_block_is_lost_in_a_storm_of_signals(manager: kv.BlockManager) -> None:
    with Alarm() as alarm:
        count = alarm.storm(lambda: allocate_and_free(manager), lambda: None, 0.7)
    assert count > 5
    gc.collect()
    assert manager.num_free_blocks == BLOCKS and manager.live_exports == []
    assert sorted(manager.allocate_blocks(BLOCKS).ids) == list(range(BLOCKS))


# ---- the pool ------------------------------------------------------------------------


def update_and_count(manager: kv.BlockManager) -> Callable[[], None]:
    """Checks that the pool is there, and counts all updates or all but the last."""
    block = manager.allocate_blocks(1)[0]
    least = [0.0]

    def check() -> None:
        assert block and not manager.pool.data.is_deleted()
        values = np.unique(np.asarray(block))
        assert len(values) == 1 and values[0] >= least[0]
        least[0] = values[0]

    return check


def test_no_pool_is_lost_wherever_an_interrupt_comes(manager: kv.BlockManager) -> None:
    manager.update(add_one)
    pool_is_there = update_and_count(manager)

    def check() -> None:
        pool_is_there()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    places = interrupt_everywhere(lambda: manager.update(add_one), check)
    assert places > 30
    assert manager.lock.acquire(blocking=False)
    manager.lock.release()
    before = np.asarray(manager.pool.data).max()
    manager.update(add_one)
    assert (np.asarray(manager.pool.data) == before + 1).all()


def test_a_block_is_written_or_not_wherever_an_interrupt_comes(
    manager: kv.BlockManager,
) -> None:
    block, other = manager.allocate_blocks(2)
    ones = np.ones(block.shape, np.float32)
    other.copy_from(ones)

    def check() -> None:
        assert np.asarray(block).max() in (0, 1) and len(np.unique(block)) == 1
        assert np.asarray(other).all() and block.ref_count == other.ref_count == 1
        other.copy_from(ones)

    places = interrupt_everywhere(lambda: block.copy_from(ones), check)
    assert places > 50 and np.asarray(block).all()


def test_no_pool_is_lost_in_a_storm_of_signals(manager: kv.BlockManager) -> None:
    check = update_and_count(manager)
    manager.update(add_one)
    with Alarm() as alarm:
        assert alarm.storm(lambda: manager.update(add_one), check, 0.7) > 5


def test_no_pool_is_lost_on_a_first_call(manager: kv.BlockManager) -> None:
    """Where JAX runs much Python code of its own around the program."""
    check = update_and_count(manager)

    def first_call() -> None:
        def step(pool: kv.KVPool) -> kv.KVPool:
            return add_one(pool)

        manager.update(step)

    first_call()  # a process's very first one takes longer
    start = time.monotonic()
    first_call()
    usual = time.monotonic() - start
    count = 0
    with Alarm() as alarm:
        for part in np.linspace(0.01, 1.2, 24):
            count += alarm.interrupts(first_call, after=part * usual)
            check()
    assert count > 2


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """What a handler of SIGUSR1 was called for."""
    signals: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    yield signals
    signal.signal(signal.SIGUSR1, before)


def raise_in_the_main_thread(number: int) -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


def step_that_signals(number: int) -> Callable[[kv.KVPool], kv.KVPool]:
    """The signal comes as its program runs: the pool is given away by then."""

    def ring(x: Any) -> Any:
        raise_in_the_main_thread(number)
        return np.asarray(x)

    def step(pool: kv.KVPool) -> kv.KVPool:
        one = jnp.ones((), jnp.float32)
        return kv.KVPool(pool.data + jax.pure_callback(ring, one, one), pool.spec)

    return step


def test_an_interrupt_of_a_program_waits_for_the_new_pool(
    manager: kv.BlockManager,
) -> None:
    step, block = step_that_signals(signal.SIGINT), manager.allocate_blocks(1)[0]
    for count in (1, 2, 3):  # the first call, where JAX compiles, and later ones
        with pytest.raises(KeyboardInterrupt):
            manager.update(step)
            for _ in range(1000):  # on a GPU the program runs behind the call
                time.sleep(0.01)
        assert block and (np.asarray(block) == count).all()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_handlers_wait_and_run_once(
    manager: kv.BlockManager, handled: list[int]
) -> None:
    step = step_that_signals(signal.SIGUSR1)
    for count in (1, 2):
        manager.update(step)
        np.asarray(manager.pool.data)
        assert handled == [signal.SIGUSR1] * count
    assert (np.asarray(manager.pool.data) == 2).all()


def test_a_step_can_be_interrupted_while_it_is_traced(manager: kv.BlockManager) -> None:
    traced = []

    def endless(pool: kv.KVPool) -> kv.KVPool:
        signal.raise_signal(signal.SIGINT)
        traced.append("went on")
        return pool

    with pytest.raises(KeyboardInterrupt):
        manager.update(endless)
    assert traced == [] and not np.asarray(manager.pool.data).any()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_may_set_a_handler_of_its_own(
    manager: kv.BlockManager, handled: list[int]
) -> None:
    mine = []

    def step(pool: kv.KVPool) -> kv.KVPool:
        signal.signal(signal.SIGUSR1, lambda number, _: mine.append(number))
        return add_one(pool)

    manager.update(step)
    signal.raise_signal(signal.SIGUSR1)
    assert mine == [signal.SIGUSR1] and handled == []


@pytest.fixture
def raising() -> Iterator[dict[int, Callable[..., Any]]]:
    """Two handlers that raise, of signals in the order in which they are put back."""

    def handler(number: int, _: Any) -> None:
        raise InterruptedError(number)

    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: functools.partial(handler) for number in numbers}
    before = {number: signal.signal(number, handlers[number]) for number in numbers}
    yield handlers
    for number, old in before.items():
        signal.signal(number, old)


class SignalAsPutBack:
    """The signal module, where a signal comes right after a handler is put back."""

    def __init__(self, put_back: dict[int, Callable[..., Any]]) -> None:
        self._left = put_back
        self.getsignal = signal.getsignal

    def signal(self, number: int, handler: Any) -> None:
        _signal.signal(number, handler)
        if handler is self._left.get(number):
            del self._left[number]
            signal.raise_signal(number)


def test_a_handler_that_raises_leaves_no_other_behind(
    manager: kv.BlockManager,
    raising: dict[int, Callable[..., Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = raising
    manager.update(add_one)
    monkeypatch.setattr(steps, "_signal", SignalAsPutBack({first: raising[first]}))
    with pytest.raises(InterruptedError, match=f"^{int(first)}$"):
        manager.update(add_one)
    for number in raising:
        assert signal.getsignal(number) is raising[number]
    with pytest.raises(InterruptedError, match=f"^{int(second)}$"):
        signal.raise_signal(second)
    assert (np.asarray(manager.pool.data) == 2).all()


def test_handlers_that_waited_all_run_when_each_raises(
    manager: kv.BlockManager, raising: dict[int, Callable[..., Any]]
) -> None:
    def ring(x: Any) -> Any:
        for number in raising:
            raise_in_the_main_thread(number)
        return np.asarray(x)

    def step(pool: kv.KVPool) -> kv.KVPool:
        one = jnp.ones((), jnp.float32)
        return kv.KVPool(pool.data + jax.pure_callback(ring, one, one), pool.spec)

    with pytest.raises(InterruptedError) as error:
        manager.update(step)
        np.asarray(manager.pool.data)
    assert isinstance(error.value.__context__, InterruptedError)
    both = {*error.value.args, *error.value.__context__.args}
    assert both == set(raising)
    for number in raising:
        assert signal.getsignal(number) is raising[number]


def test_what_outlives_an_update_hands_signals_on_and_goes_with_the_next(
    manager: kv.BlockManager, handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when exceptions of other threads stop it at every turn."""
    handler = signal.getsignal(signal.SIGUSR1)
    manager.update(add_one)
    nothing_is_put_back = SignalAsPutBack({})
    nothing_is_put_back.getsignal = lambda number: None  # type: ignore[assignment]
    begin = steps._Waiting.begin

    def begin_then_break(waiting: Any) -> None:
        begin(waiting)
        monkeypatch.setattr(steps, "_signal", nothing_is_put_back)

    with monkeypatch.context() as patch:
        patch.setattr(steps._Waiting, "begin", begin_then_break)
        manager.update(add_one)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGUSR1) is not handler
    signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1]
    manager.update(add_one)
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_threads_that_only_threading_takes_for_the_main_one_may_update(
    manager: kv.BlockManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Python is embedded, and imported from some thread of the program."""
    errors: list[BaseException] = []

    def work() -> None:
        monkeypatch.setattr(threading, "main_thread", threading.current_thread)
        try:
            manager.update(add_one)
        except BaseException as error:
            errors.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert errors == [] and np.asarray(manager.pool.data).all()


@pytest.mark.cpu  # on a GPU the program fails behind the call
def test_an_interrupt_that_comes_with_an_error_stays_an_interrupt(
    manager: kv.BlockManager, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> Any:
        raise_in_the_main_thread(signal.SIGINT)
        raise ArithmeticError("no more")

    def step(pool: kv.KVPool) -> kv.KVPool:
        one = jnp.ones((), jnp.float32)
        return kv.KVPool(pool.data + jax.pure_callback(fail, one, one), pool.spec)

    block = manager.allocate_blocks(1)[0]
    with pytest.raises(KeyboardInterrupt) as interrupt:
        manager.update(step)
    (note,) = interrupt.value.__notes__
    assert "what its pool held is lost" in note and "KVPool.zeros(" in note
    assert not block
    capfd.readouterr()


def test_exceptions_set_by_other_threads_lose_nothing(manager: kv.BlockManager) -> None:
    """They reach any thread, and no handler can make them wait."""

    class Stop(BaseException):
        pass

    check = update_and_count(manager)
    manager.update(add_one)
    stopped: list[int] = []

    def work(begun: threading.Event) -> None:
        with contextlib.suppress(Stop):  # another one
            try:
                begun.set()
                while True:
                    manager.update(add_one)
            except Stop:
                stopped.append(threading.get_ident())

    # One for each thread, since a second might reach it while it takes the first; but a
    # finalizer may have swallowed that.
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    for i in range(50):
        begun = threading.Event()
        worker = threading.Thread(target=work, args=(begun,))
        worker.start()
        begun.wait()
        time.sleep(0.003 + 0.0001 * i)
        while worker.is_alive():
            set_exception(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(Stop))
            worker.join(2)
    check()
    assert len(stopped) > 40
