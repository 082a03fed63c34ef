"""No input from Python may crash the process: fuzzes of the native entry points.

A fuzz calls one entry point with arguments that are mostly right and partly hostile.
The call must refuse them with a message, or do exactly what the model does, and touch
nothing else. A whole fuzz runs in a child process, so that a crash is a failing test
and not the end of the run.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import gc
import math
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import c_interface
import jax
import numpy as np
import pytest
from c_interface import SCHEDULE, TASK, CCopy, Memory, load_library
from fuzz_attention import Fields, calls, is_right, struct
from fuzz_copies import (
    HOSTILE,
    INT64,
    KNOWN,
    MAX_COORDINATES,
    Case,
    cases,
    compare,
    contents,
    look_up,
    run_model,
)
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from managers import Holder

import jax_kvblock
from jax_kvblock import _native
from jax_kvblock.core import ffi

# ---- the FFI target ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the FFI target: the arrays, the attributes, and how they were bent."""

    case: Case
    in_place: bool
    bend: str = "nothing"
    value: int = 0

    def operands(self) -> list[np.ndarray]:
        case = self.case
        arrays = [*contents(case.src.sizes, 1)]
        arrays += contents(case.dst.sizes, 2) if self.in_place else []
        scalars = [case.src.ids, case.dst.ids, case.src.start, case.dst.start]
        numbers = [np.array(s, np.int32) for s in scalars if s is not None]
        if self.bend == "ids of another dtype":
            other = (np.float32, np.int16)[self.value % 2]
            numbers = [n.astype(other) for n in numbers]
        if self.bend == "ids of another length":
            numbers = [np.append(n, n) for n in numbers]
        return [np.frombuffer(a, np.uint8) for a in arrays] + numbers

    def attributes(self) -> dict[str, Any]:
        case = self.case
        scalars = (case.src.ids, case.dst.ids, case.src.start, case.dst.start)
        mask = sum((s is not None) << i for i, s in enumerate(scalars))
        attributes: dict[str, Any] = {
            "num_src": np.int64(len(case.src.sizes)),
            "in_place": np.bool_(self.in_place),
            "scalars": np.int64(mask),
            "unit": np.int64(case.unit),
            "dims": np.array(case.dims, np.int64),
            "src": np.array(case.src.numbers, np.int64),
            "dst": np.array(case.dst.numbers, np.int64),
        }
        names = sorted(attributes)
        name = names[self.value % len(names)]
        if self.bend in ("num_src", "scalars"):
            attributes[self.bend] = np.int64(self.value)
        elif self.bend == "in_place":
            attributes["in_place"] = np.bool_(not self.in_place)
        elif self.bend == "missing":
            del attributes[name]
        elif self.bend == "wrong type":
            attributes[name] = np.float32(1)
        elif self.bend == "longer":
            name = ("dims", "src", "dst")[self.value % 3]
            attributes[name] = np.append(attributes[name], attributes[name])
        elif self.bend == "shorter":
            name = ("dims", "src", "dst")[self.value % 3]
            attributes[name] = attributes[name][: -1 - self.value % 2]
        return attributes

    def meant(self) -> Case | None:
        """What the bent call says: a case, or None when it must be refused."""
        case = self.case
        scalars = [case.src.ids, case.dst.ids, case.src.start, case.dst.start]
        held = [np.atleast_1d(s) for s in scalars if s is not None]
        if self.bend == "ids of another dtype" and not held:
            return case
        if self.bend == "ids of another length" and not any(h.size for h in held):
            return case
        if self.bend == "num_src" and self.value == len(case.src.sizes):
            return case
        if self.bend != "scalars":
            return case if self.bend == "nothing" else None
        if not 0 <= self.value < 16 or self.value.bit_count() != len(held):
            return None
        chosen: list[Any] = [None] * 4
        for bit in range(4):
            if self.value >> bit & 1:
                array = held.pop(0)
                if array.size != (case.dims[0] if bit < 2 else 1):
                    return None
                chosen[bit] = tuple(map(int, array)) if bit < 2 else int(array[0])
        src = dataclasses.replace(case.src, ids=chosen[0], start=chosen[2])
        dst = dataclasses.replace(case.dst, ids=chosen[1], start=chosen[3])
        return dataclasses.replace(case, src=src, dst=dst)


BENDS = (
    *("in_place", "missing", "wrong type", "longer", "shorter", "num_src", "scalars"),
    *("ids of another dtype", "ids of another length"),
)
CALLS = st.one_of(
    st.builds(Call, cases(), st.booleans()),
    st.builds(Call, cases(), st.booleans(), st.sampled_from(BENDS), HOSTILE),
)


def run_ffi(call: Call) -> list[bytes]:
    case = call.case
    operands = call.operands()
    first = len(case.src.sizes)
    held = len(case.dst.sizes) if call.in_place else 0
    aliases = {first + i: i for i in range(held)}
    results = [jax.ShapeDtypeStruct((n,), np.uint8) for n in case.dst.sizes]
    target = jax.ffi.ffi_call("kvblock_copy", results, input_output_aliases=aliases)
    step = jax.jit(lambda *arrays: target(*arrays, **call.attributes()))
    return [np.asarray(r).tobytes() for r in step(*operands)]


def check_ffi(call: Call, seen: Counts) -> None:
    case = call.meant()
    assume(case is None or not case.takes_forever)
    seen.note(call)
    try:
        results = run_ffi(call)
    except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
        # Anything else, like an illegal address, is not a refusal.
        assert "INVALID_ARGUMENT" in str(error), error
        seen.refused += 1
        return
    seen.accepted += 1
    assert case is not None, f"accepted a call that is wrong in {call.bend}"
    before = contents(case.dst.sizes, 2)
    written = run_model(case, contents(case.src.sizes, 1), before)
    for i, after in enumerate(results):
        compare(written[i], before[i] if call.in_place else None, after)


def fuzz_ffi(seen: Counts) -> None:
    ffi.register_targets()
    run = given(CALLS)(lambda call: check_ffi(call, seen))
    for case in KNOWN:
        run = example(Call(case, in_place=False))(run)
        run = example(Call(case, in_place=True))(run)
    settings(BASE, max_examples=350)(run)()


# ---- the launchers in the C library --------------------------------------------------


def check_launcher(
    library: ctypes.CDLL, case: Case, how: str, value: int, skew: int, seen: Counts
) -> None:
    # A launcher cannot know how long the ids are: there must be one for each item.
    ids = [side.ids for side in (case.src, case.dst) if side.ids is not None]
    assume(all(0 < len(given) >= case.dims[0] for given in ids))
    seen.note((case, how, value, skew))
    src, dst = Memory(case.src, 1, skew), Memory(case.dst, 2, 0)
    rank = len(case.dims)
    copy = CCopy(rank=rank, unit=case.unit)
    copy.dims[:rank] = case.dims
    copy.src, copy.dst = src.describe(case.src, rank), dst.describe(case.dst, rank)
    bent = False
    if how == "rank":
        copy.rank, bent = value, not 1 <= value <= 8
        assume(bent)
    elif how == "no buffers":
        copy.dst.num_buffers, bent = min(value, 0), 0 not in case.dims
    elif how == "null buffers":
        copy.src.buffers, bent = None, 0 not in case.dims
    elif how == "null entry":
        side, memory = (copy.src, src) if value % 2 else (copy.dst, dst)
        entry = value % side.num_buffers
        memory.buffers[entry] = None
        bent = 0 not in case.dims and side.buffer_bytes > 0
    elif how == "odd ids":
        odd = ctypes.c_void_p(ctypes.addressof(ctypes.c_int32(0)) | 1)
        copy.src.ids = ctypes.cast(odd, type(copy.src.ids))
        bent = 0 not in case.dims
    elif how == "fewer bytes":
        copy.src.buffer_bytes, bent = min(value, 0), 0 not in case.dims
        bent = bent and (
            (case.src.ids is None and case.src.start is None)
            or copy.src.buffer_bytes < 0
        )
    late: list[tuple[int, int]] = []

    def lend(context: int, task: int, data: int) -> None:
        seen.lent += 1
        if seen.lent > 10**5:
            print("kvblock_copy_cpu schedules without end", file=sys.stderr, flush=True)
            os._exit(1)
        if how == "tasks at once":
            TASK(task)(data)
        else:
            late.append((task, data))

    schedule = SCHEDULE(lend) if how.startswith("tasks") else SCHEDULE()
    refusal = library.kvblock_copy_check(ctypes.byref(copy))
    error = library.kvblock_copy_cpu(ctypes.byref(copy), value, schedule, None)
    assert (refusal is None) == (error is None), (refusal, error)
    assert not (bent and error is None), f"accepted a copy that is wrong in {how}"
    written = [{} for _ in case.dst.sizes]
    if error is None:
        seen.accepted += 1
        written = run_model(case, src.inner(), dst.inner())
    else:
        assert error.decode(), "a refusal without a message"
        seen.refused += 1
    for i, array in enumerate(dst.arrays):
        shifted = {dst.first + k: values for k, values in written[i].items()}
        compare(shifted, dst.before[i], array.tobytes())
        array[:] = 7
    for task, data in late:  # after the copy has ended, a task does nothing
        TASK(task)(data)
    assert all((array == 7).all() for array in dst.arrays)
    assert [a.tobytes() for a in src.arrays] == src.before


WAYS = (
    *("alone", "tasks at once", "tasks too late"),
    *("rank", "no buffers", "null buffers", "null entry", "odd ids", "fewer bytes"),
)


def fuzz_launchers(seen: Counts) -> None:
    library = load_library()
    assert library.kvblock_copy_check(None) and library.kvblock_copy_cpu(
        None, 1, SCHEDULE(), None
    )
    ways, skews = st.sampled_from(WAYS), st.sampled_from([0, 0, 0, 1, 4, 8])

    def check(case: Case, how: str, value: int, skew: int) -> None:
        check_launcher(library, case, how, value, skew, seen)

    run = given(cases(), ways, HOSTILE, skews)(check)
    for case in KNOWN:
        run = example(case, "alone", 1, 0)(run)
    run = example(look_up((0, 1), 2, 1), "tasks at once", -INT64, 0)(run)
    for value in (0, 1):  # a NULL where a buffer's address should be, on either side
        run = example(look_up((0, 1), 2, 1), "null entry", value, 0)(run)
    settings(BASE, max_examples=1500)(run)()


# ---- the check before every attention launch -----------------------------------------


def check_attention(
    library: ctypes.CDLL, call: tuple[Fields, int], seen: Counts
) -> None:
    fields, which = call
    seen.note(call)
    error = c_interface.check_attention(library, struct(fields), which)
    assert (error is None) == is_right(fields, which), error
    if error is None:
        seen.accepted += 1
    else:
        assert error.startswith(b"attention: "), error
        seen.refused += 1


def fuzz_attention(seen: Counts) -> None:
    library = load_library()
    run = given(calls())(lambda call: check_attention(library, call, seen))
    settings(BASE, max_examples=1500)(run)()


# ---- DLPack views --------------------------------------------------------------------


class Lease:
    """Something to keep alive: a plain object takes no weak reference."""


EXTENTS = st.lists(st.one_of(st.integers(0, 4), HOSTILE), max_size=4)
OWNERS = ("fresh", "fresh", "fresh", "fresh", "nested", "used", "none", "other capsule")
ANYTHING = st.one_of(st.booleans(), st.none(), st.integers(), st.text(max_size=3))


def check_view(
    whole: jax.Array,
    owner: str,
    numbers: tuple[int, list[int], list[int]],
    flags: tuple[Any, Any, Any, Any],
    seen: Counts,
) -> None:
    offset, shape, strides = numbers
    seen.note((owner, numbers, flags))
    lease = Lease()
    gone = weakref.ref(lease)
    size, first = whole.size, 0
    capsule: Any = whole.__dlpack__()
    if owner == "nested":
        size, first = 5, 3
        capsule = _native.export_view(capsule, None, 3, [5], [1], 1, 0, False, False)
    elif owner == "used":
        np.from_dlpack(Holder(capsule))
    elif owner in ("none", "other capsule"):
        capsule = None if owner == "none" else _native.handlers()["cpu"]["kvblock_copy"]
    try:
        view = _native.export_view(capsule, lease, offset, shape, strides, *flags)
    except (ValueError, TypeError):
        seen.refused += 1
        del lease
        assert gone() is None, "a refusal keeps the lease"
        return
    seen.accepted += 1
    assert owner in ("fresh", "nested"), f"accepted the owner {owner}"
    assert len(shape) == len(strides) and min([*shape, *strides, 0]) >= 0
    assert math.prod(shape) < INT64, "accepted more elements than can be counted"
    last = offset + sum((n - 1) * k for n, k in zip(shape, strides, strict=True))
    assert 0 <= offset <= size and (0 in shape or last < size), "left the owner"
    if flags[:2] == (1, 0) and math.prod(shape) < MAX_COORDINATES:
        steps = None if 0 in shape else [k * whole.dtype.itemsize for k in strides]
        rest = np.asarray(whole)[first + offset :]
        expected = np.lib.stride_tricks.as_strided(rest, shape, steps)
        view = np.from_dlpack(Holder(view))
        np.testing.assert_array_equal(view, expected)
    del lease
    assert gone() is not None, "the view dropped its lease"
    del view, capsule
    if gone() is not None:
        gc.collect()
    assert gone() is None, "the lease outlives the view"


def fuzz_views(seen: Counts) -> None:
    cpu = jax.devices("cpu")[0]
    wholes = st.sampled_from(
        [jax.device_put(np.arange(12, dtype=t), cpu) for t in ("f4", "i1", "f2")]
    )
    numbers = st.integers(0, 4).flatmap(
        lambda rank: st.tuples(
            st.integers(0, 6),
            *[st.lists(st.integers(0, 3), min_size=rank, max_size=rank)] * 2,
        )
    )
    bent = st.tuples(HOSTILE, EXTENTS, EXTENTS)
    flag = st.booleans()
    good = st.tuples(st.just(1), st.just(0), flag, flag)
    hostile = st.tuples(HOSTILE, HOSTILE, ANYTHING, ANYTHING)

    def check(whole: Any, owner: str, numbers: Any, flags: Any) -> None:
        check_view(whole, owner, numbers, flags, seen)

    owners = st.sampled_from(OWNERS)
    run = given(wholes, owners, numbers | numbers | bent, good | good | hostile)(check)
    array = jax.device_put(np.arange(12, dtype="f4"), cpu)
    for shape in ([2**62, 4], [0, -5]):
        run = example(array, "fresh", (0, shape, [0, 0]), (1, 0, True, False))(run)
    settings(BASE, max_examples=600)(run)()


# ---- the child, and the tests that start it ------------------------------------------

HANG = 120  # seconds after which a fuzz is taken to hang
BASE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@dataclasses.dataclass
class Counts:
    """What a fuzz did, and where it notes what it is about to do."""

    path: Path
    accepted: int = 0
    refused: int = 0
    lent: int = 0

    def note(self, what: object) -> None:
        self.path.write_text(repr(what))


def crash(seen: Counts) -> None:
    seen.note("about to read address 1")
    ctypes.string_at(1)


FUZZES: dict[str, Callable[[Counts], None]] = {
    "ffi": fuzz_ffi,
    "launchers": fuzz_launchers,
    "attention": fuzz_attention,
    "views": fuzz_views,
    "crash": crash,
}


def run_child(fuzz: str, note: Path, platform: str) -> subprocess.CompletedProcess[str]:
    package = str(Path(jax_kvblock.__file__).parent.parent)
    helpers = str(Path(__file__).parents[1] / "support")  # fuzz_copies.py and others
    given = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([package, helpers, *given])
    return subprocess.run(
        [sys.executable, __file__, fuzz, str(note)],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": platform},
        capture_output=True,
        text=True,
        timeout=HANG + 60,
    )


@pytest.mark.wide
@pytest.mark.parametrize(
    ("fuzz", "platform"),
    [
        ("ffi", "cpu"),
        pytest.param("ffi", "cuda,cpu", marks=pytest.mark.gpu),
        ("launchers", "cpu"),
        ("attention", "cpu"),
        ("views", "cpu"),
    ],
)
def test_survives(fuzz: str, platform: str, tmp_path: Path) -> None:
    note = tmp_path / "last_example"
    child = run_child(fuzz, note, platform)
    last = note.read_text() if note.exists() else "nothing"
    assert child.returncode == 0, (
        f"exit code {child.returncode} after {last}\n{child.stderr[-4000:]}"
    )
    accepted, refused = map(int, child.stdout.split())
    assert accepted >= 50, "the fuzz hardly ever ran a copy"
    assert refused >= 50, "the fuzz hardly ever was refused"


def test_a_crash_is_seen(tmp_path: Path) -> None:
    note = tmp_path / "last_example"
    child = run_child("crash", note, "cpu")
    assert child.returncode == -signal.SIGSEGV
    assert "address 1" in note.read_text()


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.dump_traceback_later(HANG, exit=True)
    counts = Counts(Path(sys.argv[2]))
    FUZZES[sys.argv[1]](counts)
    print(counts.accepted, counts.refused)
