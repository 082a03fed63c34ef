"""What the handler of kernel calls refuses: attributes that do not fit the buffers.

The package makes no such call. A program that was exported elsewhere, or calls the
target by itself, may.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import emulated_kernels
import jax.numpy as jnp
import numpy as np
import pytest
from cpp_programs import folder_of
from emulated_kernels import kernel, scale

from jax_kvblock.kernels import cuda, kernel_call


def number(name: str, at: int, value: int) -> Callable[[Any], None]:
    def change(attributes: dict[str, Any]) -> None:
        attributes[name][at] = value

    return change


def told(name: str, *numbers: int) -> Callable[[Any], None]:
    return lambda attributes: attributes.update({name: np.array(numbers, np.int64)})


NAMES, SIZES = "the attributes do not fit", "the buffers are others than the attributes"
VALUE = 1  # ParameterKind, of a number that travels by value
# By name: what is wrong, and the message. There are one operand and one result.
BAD: dict[str, tuple[Callable[[Any], None], str]] = {
    "a large grid": (number("shape", 0, (1 << 32) + 16), NAMES),
    "a negative block": (number("shape", 3, -64), NAMES),
    "values that end nowhere": (told("parameters", VALUE, 2**63 - 1, 1), NAMES),
    "a result in front of all": (told("zeroed", -1), SIZES),
    "a result behind all": (told("zeroed", 1), SIZES),
    "an alias of no operand": (told("aliased", 1, 0), SIZES),
    "an alias of no result": (told("aliased", 0, -1), SIZES),
}


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    attributes_of = cuda.attributes_of

    def spoilt(*given: Any) -> dict[str, Any]:
        change(attributes := attributes_of(*given))
        return attributes

    monkeypatch.setattr(cuda, "attributes_of", spoilt)


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name, driver, monkeypatch):
    change, message = BAD[name]
    spoil(monkeypatch, change)
    with pytest.raises(Exception, match=f"kernel_call: {message}"):
        scale(jnp.ones(1000), 2.0).block_until_ready()


def test_an_alias_of_another_size(driver, monkeypatch):
    spoil(monkeypatch, told("aliased", 0, 0))
    with pytest.raises(Exception, match=f"kernel_call: {SIZES}"):
        kernel_call(
            kernel("scale"),
            jnp.ones(1000),
            out=jnp.ones(500),
            scalars=(2.0, 500),
            grid=8,
            block=64,
        ).block_until_ready()


class Shape(ctypes.Structure):
    """kvblock_kernel_shape."""

    _fields_ = (
        *((name, ctypes.c_uint32 * 3) for name in ("grid", "block", "cluster")),
        ("shared_bytes", ctypes.c_uint32),
        ("cooperative", ctypes.c_int32),
    )


def test_two_threads_that_ask_for_shared_memory(driver, tmp_path_factory):
    """Kernels of one image share a function, and what it may have stays the most."""
    library = ctypes.CDLL(str(folder_of(tmp_path_factory) / emulated_kernels.HANDLERS))
    create, prepare = library.kvblock_kernel_create, library.kvblock_kernel_prepare
    launch = library.kvblock_kernel_launch
    create.restype, create.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p],
    )
    for call in (prepare, launch):
        call.restype = ctypes.c_char_p
    launch.argtypes = [ctypes.c_void_p] * 4
    prepare.argtypes = [ctypes.c_void_p] * 2

    image = b".version 8.0 .entry nothing /* of two threads */"
    shapes = [
        Shape((1, 1, 1), (1, 1, 1), (0, 0, 0), kib << 10, 0) for kib in (200, 100)
    ]
    made = [create(image, len(image), b"nothing", b"a kernel") for _ in shapes]
    said: list[bytes | None] = []

    def ready(nth: int) -> None:
        said.append(prepare(made[nth], ctypes.byref(shapes[nth])))

    driver.emulator_look_slowly(100)
    try:
        threads = [threading.Thread(target=ready, args=(nth,)) for nth in (0, 1)]
        for thread in threads:
            thread.start()
            time.sleep(0.03)
        for thread in threads:
            thread.join()
    finally:
        driver.emulator_look_slowly(0)
    said += [
        launch(own, ctypes.byref(shape), None, None)
        for own, shape in zip(made, shapes, strict=True)
    ]
    assert said == [None] * 4
    for own in made:
        library.kvblock_kernel_destroy(ctypes.c_void_p(own))


def test_debug_names_a_kernel_that_has_failed_by_then(driver):
    """Whoever asks after that about the stream is told so."""
    driver.emulator_fail_when_asked(700)
    try:
        with pytest.raises(Exception, match=r"Kernel\('scale'\) failed as it ran"):
            scale(jnp.ones(1000), 2.0, debug=True).block_until_ready()
    finally:
        driver.emulator_fail_when_asked(0)
