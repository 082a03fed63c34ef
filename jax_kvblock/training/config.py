"""Which 8-bit formats training takes, and where its scales come from."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import as_int, check_choice, shown


class FP8Format(enum.Enum):
    """A format of 8 bits with a sign, an exponent and a mantissa.

    E4M3 is JAX's `float8_e4m3fn` (4 bits of exponent, 3 of mantissa, up to 448, no
    infinity), E5M2 `float8_e5m2` (5 and 2, up to 57344). HYBRID is both: E4M3 for what
    goes forward, E5M2 for gradients.
    """

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"

    @property
    def dtype(self) -> np.dtype:
        """JAX's dtype; HYBRID is two, and has none."""
        if self is FP8Format.HYBRID:
            raise ValueError(
                "FP8Format: HYBRID is two formats, and has no dtype; ask "
                "FP8Config(FP8Format.HYBRID) for forward_format and backward_format"
            )
        e4m3 = self is FP8Format.E4M3
        return np.dtype(jnp.float8_e4m3fn if e4m3 else jnp.float8_e5m2)

    @property
    def max(self) -> float:
        """The largest number."""
        return float(jnp.finfo(self.dtype).max)


IMPLEMENTATIONS = ("cuda", "xla", None)
_NAMES = {
    **{name: form for form in FP8Format for name in (form.value, form.name)},
    "e4m3fn": FP8Format.E4M3,
    "float8_e4m3fn": FP8Format.E4M3,
    "float8_e5m2": FP8Format.E5M2,
}


@dataclasses.dataclass(frozen=True)
class FP8Config:
    """How products of 8 bits are scaled.

    A tensor is multiplied by its scale, a power of two, before it is rounded, and the
    product is divided by both scales. Powers of two change no digit: they cost at most
    one of the formats' 18 (E4M3) or 32 (E5M2) binary orders of magnitude.

    Attributes:
      forward_format: of inputs and weights, E4M3. HYBRID is E4M3 with gradients in
        E5M2. E5M2 is an error: cuBLASLt has no product of two E5M2.
      backward_format: of gradients, E5M2 unless given. Names as strings do, too:
        "e4m3", "e5m2", "hybrid".
      scaling: "delayed" takes the scale from the largest sizes of the last steps, so
        that a tensor is read once; "current" from the tensor itself, which is read
        twice and never too large for its scale (both as in Transformer Engine).
      history: with delayed scaling, how many steps are looked back on.
      margin: halvings of every scale: room for sizes that grow from step to step.
      implementation: who casts: "cuda", the kernel that writes both orders of an array
        and finds its largest size in one pass (rows and columns that are multiples of
        16); "xla"; or None, the kernel where it serves, on NVIDIA GPUs.
      skip_saturated: True skips a step of the optimizer in which numbers were too large
        for their delayed scale, as those that are not finite always are. False takes
        it: such numbers became the largest one.
    """

    forward_format: FP8Format | str = FP8Format.E4M3
    backward_format: FP8Format | str | None = None
    scaling: Literal["delayed", "current"] = "delayed"
    history: int = 16
    margin: int = 0
    skip_saturated: bool = False
    implementation: Literal["cuda", "xla"] | None = None

    def __post_init__(self) -> None:
        where = "FP8Config"
        forward = _format(where, "forward_format", self.forward_format)
        backward = self.backward_format
        if backward is None:
            backward = FP8Format.E5M2
        backward = _format(where, "backward_format", backward)
        if forward is FP8Format.HYBRID:
            if backward is not FP8Format.E5M2:
                raise ValueError(
                    f"{where}: backward_format must be FP8Format.E5M2 where "
                    f"forward_format is FP8Format.HYBRID, got {backward}; leave it out"
                )
            forward = FP8Format.E4M3
        if forward is FP8Format.E5M2:
            raise ValueError(
                f"{where}: forward_format must be FP8Format.E4M3 or FP8Format.HYBRID, "
                f"got {forward}: cuBLASLt has no product of two E5M2"
            )
        if backward is FP8Format.HYBRID:
            raise ValueError(
                f"{where}: backward_format must be FP8Format.E5M2 or FP8Format.E4M3, "
                f"got {backward}; FP8Config(FP8Format.HYBRID) sets both"
            )
        object.__setattr__(self, "forward_format", forward)
        object.__setattr__(self, "backward_format", backward)
        check_choice(where, "scaling", self.scaling, ("delayed", "current"))
        check_choice(where, "implementation", self.implementation, IMPLEMENTATIONS)
        for name, least in (("history", 1), ("margin", 0)):
            number = as_int(getattr(self, name))
            if number is None or number < least:
                raise ValueError(
                    f"{where}: {name} must be an integer of at least {least}, got "
                    f"{shown(getattr(self, name))}"
                )
            object.__setattr__(self, name, number)
        check_flag(where, "skip_saturated", self.skip_saturated)

    @property
    def formats(self) -> tuple[FP8Format, FP8Format, FP8Format]:
        """Of inputs, weights and gradients."""
        forward, backward = self.forward_format, self.backward_format
        assert isinstance(forward, FP8Format) and isinstance(backward, FP8Format)
        return forward, forward, backward


def checked_config(where: str, config: Any) -> FP8Config:
    """The config itself, or the default one for None."""
    if config is None:
        return FP8Config()
    if not isinstance(config, FP8Config):
        raise TypeError(
            f"{where}: config must be an FP8Config, got {shown(config)}; make one, for "
            "example FP8Config('e4m3')"
        )
    return config


def check_flag(where: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{where}: {name} must be True or False, got {shown(value)}")
    return value


def _format(where: str, name: str, value: Any) -> FP8Format:
    if isinstance(value, FP8Format):
        return value
    found = _NAMES.get(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(
            f"{where}: {name} must be one of FP8Format.E4M3, FP8Format.E5M2 and "
            f"FP8Format.HYBRID, got {value!r}"
        )
    return found
