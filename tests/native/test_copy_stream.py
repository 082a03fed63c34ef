"""Copies of strips by the C interface: on the CPU, and on streams of the emulator."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np
import pytest
from emulated_streams import DEVICE, PAGEABLE, Streams

from jax_kvblock.cache.copy_lines import FIELDS, STRIP, CopyError, CpuLine, library
from jax_kvblock.core.ffi import BUILD


def strips(*rows: tuple[int, ...]) -> np.ndarray:
    made = np.zeros(len(rows), STRIP)
    for i, row in enumerate(rows):
        for name, value in zip(FIELDS, row, strict=False):
            made[name][i] = value
    return made


@pytest.fixture
def memory() -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(1).integers(0, 256, 4096, np.uint8)
    return source, np.full(4096, 0xEE, np.uint8)


def truth(source: np.ndarray, to: np.ndarray, made: np.ndarray) -> np.ndarray:
    want = to.copy()
    for s in made:
        first, start = s["to"] - to.ctypes.data, s["from"] - source.ctypes.data
        for i in range(s["rows"]):
            at, of = first + i * s["to_pitch"], start + i * s["from_pitch"]
            want[at : at + s["bytes"]] = source[of : of + s["bytes"]]
    return want


def copied(line: object, source: np.ndarray, to: np.ndarray, made: np.ndarray) -> None:
    want = truth(source, to, made)
    line.start(made, (source, to)).wait()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(to, want)


BY = ["cpu", "stream"]


@pytest.fixture(params=BY)
def line(request: pytest.FixtureRequest) -> object:
    if request.param == "cpu":
        return CpuLine(library())
    return request.getfixturevalue("streams").line()


def test_random_strips(line: object, memory: tuple[np.ndarray, np.ndarray]) -> None:
    source, to = memory
    rng = np.random.default_rng(2)
    a, b = source.ctypes.data, to.ctypes.data
    for _ in range(30):
        to[:] = rng.integers(0, 256, to.shape)
        size, rows = int(rng.integers(1, 40)), int(rng.integers(1, 5))
        up, down = (int(size + rng.integers(0, 9) * rng.integers(0, 2)) for _ in "ab")
        # Each strip has a place of its own; some continue the one before.
        places = rng.permutation(8) if rng.integers(2) else np.arange(8)
        span = rows * up if rng.integers(2) else rows * max(up, down) + 3
        made = strips(
            *((b + i * span, a + int(p) * span, size, rows, up, down)
              for i, p in enumerate(places[:5]))
        )  # fmt: skip
        copied(line, source, to, made)


def test_strips_that_go_on_are_one(
    streams: Streams, memory: tuple[np.ndarray, np.ndarray]
) -> None:
    source, to = memory
    a, b = source.ctypes.data, to.ctypes.data
    line = streams.line()
    cases = [
        ([(b, a, 64, 1), (b + 64, a + 64, 64, 1), (b + 128, a + 128, 32, 1)], 1),
        ([(b, a, 64, 1), (b + 64, a + 128, 64, 1)], 2),  # not in the source
        ([(b, a, 64, 1), (b + 128, a + 64, 64, 1)], 2),  # not in the destination
        ([(b, a, 8, 4, 8, 8), (b + 32, a + 32, 8, 1)], 1),  # rows without gaps
        ([(b, a, 8, 4, 8, 16), (b + 32, a + 64, 8, 2, 8, 16)], 1),  # gaps alike
        ([(b, a, 8, 4, 8, 16), (b + 32, a + 64, 8, 2, 8, 24)], 2),
        ([(b, a, 8, 4, 16, 16), (b + 64, a + 64, 16, 2, 16, 16)], 2),
        ([], 0),
    ]
    for rows, calls in cases:
        before = streams.copies
        copied(line, source, to, strips(*rows))
        assert streams.copies - before == calls, rows


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ((0, 1, 1, 1), "strip 1: to is NULL"),
        ((1, 0, 1, 1), "strip 1: from is NULL"),
        ((1, 1, 0, 1), "strip 1: bytes must be at least 1, got 0"),
        ((1, 1, -4, 1), "bytes must be at least 1, got -4"),
        ((1, 1, 1, 0), "rows must be at least 1, got 0"),
        ((1, 1, 8, 2, 7, 8), r"to_pitch must be from bytes \(8\) to 2\^31 - 1, got 7"),
        ((1, 1, 8, 2, 8, 7), r"from_pitch must be from bytes \(8\) .*, got 7"),
        ((1, 1, 8, 2, 2**31, 8), r"to_pitch must be .*, got 2147483648"),
        ((1, 1, 1, 2**40, 1, 1), r"rows must be below 2\^32, got 1099511627776"),
    ],
)
def test_wrong_strips(
    line: object, memory: tuple[np.ndarray, np.ndarray], row: tuple[int, ...], said: str
) -> None:
    source, to = memory
    before = to.copy()
    good = (to.ctypes.data, source.ctypes.data, 8, 1)
    with pytest.raises(CopyError, match=said):
        line.start(strips(good, row), None)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(to, before)


def test_wrong_calls(streams: Streams) -> None:
    native, mark = streams.native, ctypes.c_void_p()
    calls: list[tuple[Callable[[], bytes | None], str]] = [
        (lambda: native.kvblock_strips_copy_cpu(None, 1), "strips is NULL"),
        (lambda: native.kvblock_strips_copy_cpu(None, -1), "count must be at least 0"),
        (lambda: native.kvblock_copy_stream_open(0, None), "stream is NULL"),
        (lambda: native.kvblock_copy_stream_open(9, ctypes.byref(mark)), "ordinal"),
        (lambda: native.kvblock_copy_stream_start(None, None, 0, None), "mark is NULL"),
        (
            lambda: native.kvblock_copy_stream_start(None, None, 0, ctypes.byref(mark)),
            "stream is NULL",
        ),
        (lambda: native.kvblock_copy_mark_wait(None), "mark is NULL"),
        (lambda: native.kvblock_copy_mark_done(None, None), "mark or done is NULL"),
    ]
    for call, said in calls:
        message = call()
        assert message is not None and said in message.decode()
    assert native.kvblock_copy_stream_close(None) is None
    assert native.kvblock_copy_mark_free(None) is None
    assert native.emulator_last_error() == 0  # later launches report nothing of it


# ---- on a stream ---------------------------------------------------------------------


def test_nothing_has_ended_that_is_held(
    streams: Streams, memory: tuple[np.ndarray, np.ndarray]
) -> None:
    source, to = memory
    line = streams.line()
    streams.hold()
    one = strips((to.ctypes.data, source.ctypes.data, 100, 1))
    copy = line.start(one, None)
    time.sleep(0.02)
    assert not copy.done and (to == 0xEE).all()
    streams.go_on()
    copy.wait()
    assert copy.done and (to[:100] == source[:100]).all()
    copy.wait()  # again


def test_who_drops_a_copy_waits(
    streams: Streams, memory: tuple[np.ndarray, np.ndarray]
) -> None:
    source, to = memory
    before = streams.alive
    line = streams.line()
    line.start(strips((to.ctypes.data, source.ctypes.data, 4096, 1)), None)
    np.testing.assert_array_equal(to, source)
    del line
    assert streams.alive == before


def test_a_failure_leaves_nothing_under_way(
    streams: Streams, memory: tuple[np.ndarray, np.ndarray]
) -> None:
    source, to = memory
    a, b = source.ctypes.data, to.ctypes.data
    line, before = streams.line(), streams.alive
    three = strips(*((b + 100 * i, a + 200 * i, 100, 1) for i in range(3)))
    streams.fail_at(3)
    with pytest.raises(CopyError, match="a copy: invalid argument"):
        line.start(three, None)
    # The emulator begins a batch at its end: two were under way, and have ended.
    assert (to[200:300] == source[400:500]).all()
    assert (to[100:200] == source[200:300]).all()
    assert streams.alive == before and streams.native.emulator_last_error() == 0
    streams.fail_at(0)
    copied(line, source, to, three)


def test_a_driver_that_knows_no_batches(
    streams: Streams, memory: tuple[np.ndarray, np.ndarray]
) -> None:
    source, to = memory
    a, b = source.ctypes.data, to.ctypes.data
    line, before = streams.line(), streams.copies
    streams.native.emulator_old_driver(1)
    try:
        apart = strips(*((b + 100 * i, a + 200 * i, 100, 1) for i in range(3)))
        copied(line, source, to, apart)
    finally:
        streams.native.emulator_old_driver(0)
    assert streams.copies - before == 3
    assert streams.native.emulator_last_error() == 0


def test_memory_that_is_not_pinned_is_refused(
    streams: Streams, memory: tuple[np.ndarray, np.ndarray]
) -> None:
    source, to = memory
    line = streams.line(1)
    one = strips((to.ctypes.data, source.ctypes.data, 8, 1))
    streams.place(to.ctypes.data, 4096, DEVICE, 1)
    streams.place(source.ctypes.data, 4096, PAGEABLE)
    with pytest.raises(
        CopyError, match="from is memory of the host that is not pinned"
    ):
        line.start(one, None)
    streams.place(source.ctypes.data, 4096, DEVICE, 0)
    with pytest.raises(CopyError, match="from lies on device 0, the stream is of dev"):
        line.start(one, None)
    streams.place(source.ctypes.data, 4096, 1)
    copied(line, source, to, one)


@pytest.mark.skipif(BUILD["cuda"], reason="this build has CUDA")
def test_a_build_without_cuda_says_so() -> None:
    stream = ctypes.c_void_p()
    said = library().kvblock_copy_stream_open(0, ctypes.byref(stream))
    assert b"no CUDA kernels; rebuild it where nvcc is on the PATH" in said
