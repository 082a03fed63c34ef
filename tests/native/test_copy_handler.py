"""What the FFI handler of block copies refuses: results that are not their operands.

The package makes no such call. A program that was exported elsewhere, or calls the
target by itself, may.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_kvblock.core import ffi

BYTES = 64
ROW = np.array([0] * 8 + [1, 0], np.int64)  # a side: bytes, one after the other
ATTRIBUTES = {
    "num_src": np.int64(1),
    "in_place": np.bool_(True),
    "scalars": np.int64(0),
    "unit": np.int64(1),
    "dims": np.array([BYTES], np.int64),
    "src": ROW,
    "dst": ROW,
}


def in_place(operand_bytes: int) -> np.ndarray:
    """A copy in place over an operand of so many bytes; the result has `BYTES`."""
    ffi.register_targets()
    result = jax.ShapeDtypeStruct((BYTES,), np.uint8)
    target = jax.ffi.ffi_call("kvblock_copy", result)
    run = jax.jit(lambda source, operand: target(source, operand, **ATTRIBUTES))
    source = np.arange(BYTES, dtype=np.uint8)
    return np.asarray(run(source, np.full(operand_bytes, 7, np.uint8)))


def test_a_result_that_lies_elsewhere():
    np.testing.assert_array_equal(in_place(BYTES), np.arange(BYTES))


@pytest.mark.parametrize("operand_bytes", [BYTES + 1, BYTES - 1])
def test_a_result_of_another_size(operand_bytes):
    message = "a result in place has another size than its operand"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        in_place(operand_bytes)
