"""What the handler of kernel calls refuses: attributes that do not fit the buffers.

The package makes no such call. A program that was exported elsewhere, or calls the
target by itself, may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
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
