"""`HardwareAbstractionLayer`: what a model takes of devices, and what serves it."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_kvblock.attention.nnx import attention_fn
from jax_kvblock.core import ffi
from jax_kvblock.core.checks import check_positive
from jax_kvblock.core.models import is_nnx_module
from jax_kvblock.hardware.devices import check_limit
from jax_kvblock.hardware.search import BatchSize, search
from jax_kvblock.hardware.served import Served, capabilities
from jax_kvblock.hardware.step import Arguments, Step, check_donated
from jax_kvblock.hardware.usage import MemoryUsage

_NAME = "HardwareAbstractionLayer"


class HardwareAbstractionLayer:
    """Memory and implementations on some devices of one platform.

    A model is a function `step(*arguments)`, jitted or not, an nnx module, or another
    pytree that can be called. Of the arguments it needs shapes and dtypes alone:
    `arguments` is a function of the batch size that gives a tuple of them (arrays or
    `ShapeDtypeStruct`s, parameters and optimizer state included), or a sample, one or a
    tuple, of arrays whose first dim is the batch. Programs are compiled for the
    devices, and none of them runs.

    With several devices a batch is cut over them: an argument that grows with the batch
    along the dim where it grows, the others are whole on each. Arguments with a
    `NamedSharding` keep it. Bytes are those of one device.

    Args:
      target_devices: devices, or one; the default device unless given.

    Raises:
      TypeError, ValueError: these are no devices, the same twice, or of two platforms.

    Example:
      >>> hal = HardwareAbstractionLayer()
      >>> batch = lambda b: (jax.ShapeDtypeStruct((b, 1024), jnp.float32),)
      >>> hal.get_optimal_batch_size(jnp.tanh, batch, limit=2**20)
      128
    """

    def __init__(
        self, target_devices: Sequence[jax.Device] | jax.Device | None = None
    ) -> None:
        given: Any = ffi.default_device() if target_devices is None else target_devices
        devices = [given] if isinstance(given, jax.Device) else list(given)
        if not devices or not all(isinstance(d, jax.Device) for d in devices):
            names = ", ".join(type(d).__name__ for d in devices) or "none"
            raise TypeError(
                f"{_NAME}: target_devices must be devices of JAX, got {names}; pass "
                "jax.devices(), or a list of detect_available_devices()"
            )
        platforms = sorted({ffi.platform_of(d) for d in devices})
        if len(platforms) > 1 or len(set(devices)) < len(devices):
            raise ValueError(
                f"{_NAME}: target_devices must be of one platform, each once, got "
                f"{devices}; pass one list of detect_available_devices()"
            )
        self.devices: tuple[jax.Device, ...] = tuple(devices)
        self.platform: str = platforms[0]

    def __repr__(self) -> str:
        return f"{_NAME}({list(self.devices)})"

    def implementations(self) -> list[Served]:
        """Which implementation serves each op on these devices, and why."""
        return capabilities(self.devices[0])

    def estimate_memory_usage(
        self,
        model: Callable[..., Any],
        batch_size: int,
        arguments: Arguments,
        *,
        donate_argnums: int | Sequence[int] = (),
    ) -> MemoryUsage:
        """What the program of a batch takes of each device, without running it.

        Args:
          model: see the class.
          batch_size: items over all devices, a multiple of their number.
          arguments: how the model's arguments are made; see the class.
          donate_argnums: of a function that is not jitted, arguments whose memory its
            results may take, as for `jax.jit`.

        Returns:
          Bytes by kind, and `total`.

        Raises:
          TypeError, ValueError: what is no model, no number or no argument; arguments
            that do not depend on the batch size.

        Example:
          >>> shapes = lambda b: (jax.ShapeDtypeStruct((b, 1024), jnp.float32),)
          >>> hal = HardwareAbstractionLayer()
          >>> hal.estimate_memory_usage(jnp.tanh, 8, shapes).arguments
          32768
        """
        where = "estimate_memory_usage"
        (batch_size,) = check_positive(where, batch_size=batch_size)
        return self._step(where, model, arguments, donate_argnums).usage(batch_size)

    def find_batch_size(
        self,
        model: Callable[..., Any],
        arguments: Arguments,
        *,
        limit: int | None = None,
        multiple_of: int = 1,
        largest: int | None = None,
        donate_argnums: int | Sequence[int] = (),
    ) -> BatchSize:
        """The largest batch whose program fits, and what the next one would take.

        Sizes are doubled until one does not fit, then halved: about twice as many
        programs are compiled as the answer, in units, has bits.

        Args:
          model, arguments, donate_argnums: see `estimate_memory_usage`.
          limit: bytes of each device that the program may take, its arguments included.
            Unless given, the least of what the devices tell (`bytes_limit` of
            `memory_stats()`), or of a CPU the host's memory, shared out to JAX's
            devices on it. What else is alive there is to be taken off by the caller.
          multiple_of: sizes to look at are multiples of it, and of the devices' number.
          largest: no size above it is looked at.

        Raises:
          MemoryError: the smallest batch does not fit.
          TypeError, ValueError: as `estimate_memory_usage`; a device that does not tell
            its memory, and no limit.
        """
        return self._find(
            "find_batch_size",
            model,
            arguments,
            limit,
            multiple_of,
            largest,
            donate_argnums,
        )

    def get_optimal_batch_size(
        self,
        model: Callable[..., Any],
        arguments: Arguments,
        *,
        limit: int | None = None,
        multiple_of: int = 1,
        largest: int | None = None,
        donate_argnums: int | Sequence[int] = (),
    ) -> int:
        """The `size` that `find_batch_size` finds: the largest that fits."""
        return self._find(
            "get_optimal_batch_size",
            model,
            arguments,
            limit,
            multiple_of,
            largest,
            donate_argnums,
        ).size

    def optimize_for_hardware(
        self, model: Any, *, donate_argnums: int | Sequence[int] = ()
    ) -> Any:
        """The model with what this package can change of it, and nothing else.

        - An nnx module: every `nnx.MultiHeadAttention` in it that has flax's own
          attention has `jax_kvblock.attention_fn` in its place, so scores `[T, S]` are
          not in memory; on NVIDIA GPUs kernels compute it, elsewhere plain JAX in
          blocks. What comes back is another module with the same arrays; the one that
          was given stays as it is. Dropout drops other pairs than flax's.
        - A function: jitted, with the arguments donated that are named.

        Where nothing is to be changed there is a `UserWarning`, and the model comes
        back as it is.

        Args:
          model: an nnx module or a function.
          donate_argnums: of a function, as for `jax.jit`.

        Raises:
          TypeError: another kind of model; donate_argnums with an nnx module.
        """
        where = "optimize_for_hardware"
        donated = check_donated(where, donate_argnums)
        if is_nnx_module(model):
            if donated:
                raise TypeError(
                    f"{where}: donate_argnums must be left out for an nnx module, got "
                    f"{donated}; donate where your step is jitted"
                )
            return _with_our_attention(where, model)
        plain = callable(model) and jax.tree_util.all_leaves([model])
        jitted = plain and hasattr(model, "lower")
        if jitted and not donated:
            return _unchanged(where, model, "it is jitted already")
        if jitted or not plain:
            raise TypeError(
                f"{where}: model must be an nnx module or a function that is not "
                f"jitted, got {type(model).__name__}; pass a function step(*arguments)"
            )
        return jax.jit(model, donate_argnums=donated)

    def _step(
        self, where: str, model: Any, arguments: Any, donate_argnums: Any
    ) -> Step:
        donated = check_donated(where, donate_argnums)
        return Step(where, model, arguments, self.devices, donated)

    def _find(
        self,
        where: str,
        model: Any,
        arguments: Any,
        limit: Any,
        multiple_of: Any,
        largest: Any,
        donate_argnums: Any,
    ) -> BatchSize:
        (multiple_of,) = check_positive(where, multiple_of=multiple_of)
        unit = math.lcm(multiple_of, len(self.devices))
        if largest is not None:
            (largest,) = check_positive(where, largest=largest)
            if largest < unit:
                raise ValueError(
                    f"{where}: largest must be at least {unit}, the least common "
                    "multiple of multiple_of and the devices, got "
                    f"{largest}; pass a larger one"
                )
        step = self._step(where, model, arguments, donate_argnums)
        return search(
            where,
            step.usage,
            unit=unit,
            largest=largest,
            limit=check_limit(where, limit, list(self.devices)),
            devices=len(self.devices),
        )


def _with_our_attention(where: str, model: Any) -> Any:
    """A module of the same arrays whose layers of attention call ours."""
    nnx: Any = sys.modules["flax.nnx"]
    copy = nnx.merge(*nnx.split(model))
    changed = 0
    for _, part in nnx.iter_graph(copy):
        is_attention = isinstance(part, nnx.MultiHeadAttention)
        if is_attention and part.attention_fn is nnx.dot_product_attention:
            part.attention_fn = attention_fn
            changed += 1
    if changed:
        return copy
    reason = "it has no nnx.MultiHeadAttention with flax's own attention"
    return _unchanged(where, model, reason)


def _unchanged(where: str, model: Any, reason: str) -> Any:
    warnings.warn(f"{where}: model stays as it is: {reason}", UserWarning, stacklevel=3)
    return model
