"""What numbers are kept in: the names of formats, and how many bits each takes."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


class PrecisionFormat(enum.Enum):
    """A format of stored numbers.

    FP32, FP16 and BF16 are JAX's own. FP8 is e4m3 with a scale for each group. INT8 to
    INT2 are codes of that many bits, packed without gaps, with a scale and an offset
    for each group.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT6 = "int6"
    INT5 = "int5"
    INT4 = "int4"
    INT3 = "int3"
    INT2 = "int2"

    @property
    def bits(self) -> int:
        """Of a number, without what its group shares."""
        return int("".join(filter(str.isdigit, self.name)))

    @property
    def dtype(self) -> Any:
        """JAX's type of the stored numbers; of packed codes, that of their words."""
        return _DTYPES.get(self, jnp.uint32)

    @property
    def is_plain(self) -> bool:
        """Numbers alone, without groups: FP32, FP16 and BF16."""
        return self in PLAIN

    @property
    def is_packed(self) -> bool:
        """Codes in words: INT8 to INT2."""
        return self not in _DTYPES


_DTYPES: dict[PrecisionFormat, Any] = {
    PrecisionFormat.FP32: jnp.float32,
    PrecisionFormat.FP16: jnp.float16,
    PrecisionFormat.BF16: jnp.bfloat16,
    PrecisionFormat.FP8: jnp.float8_e4m3fn,
}
PLAIN = (PrecisionFormat.FP32, PrecisionFormat.FP16, PrecisionFormat.BF16)
GROUPED = tuple(format for format in PrecisionFormat if format not in PLAIN)


def check_format(
    where: str, name: str, value: Any, among: Sequence[PrecisionFormat]
) -> PrecisionFormat:
    """One of these formats."""
    if value not in among or not isinstance(value, PrecisionFormat):
        names = ", ".join(f"PrecisionFormat.{one.name}" for one in among)
        error = ValueError if isinstance(value, PrecisionFormat) else TypeError
        raise error(f"{where}: {name} must be one of {names}, got {value!r}")
    return value


def check_formats(where: str, name: str, values: Any) -> tuple[PrecisionFormat, ...]:
    """Different formats, the ones of fewest bits first."""
    if isinstance(values, PrecisionFormat):
        values = (values,)
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise TypeError(
            f"{where}: {name} must be a sequence of PrecisionFormat, got {values!r}"
        )
    found = [
        check_format(where, name, value, tuple(PrecisionFormat)) for value in values
    ]
    if len(set(found)) < len(found):
        raise ValueError(f"{where}: {name} must differ from each other, got {values!r}")
    return tuple(sorted(found, key=lambda one: (one.bits, one.name)))
