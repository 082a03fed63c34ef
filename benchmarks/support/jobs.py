"""A piece of work and the implementations that are timed at it, side by side."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from support import common, cuda_runtime


@dataclasses.dataclass
class Job:
    """One implementation of the work of its group.

    Attributes:
      implementation: its name in the results.
      call: `call(*args)`, or `call(target, *args)` when it updates its target in place;
        traceable by jit.
      args: arrays that are read.
      expected: what must come out, bit for bit. The target starts as zeros like it, in
        the same memory.
      in_place: whether `call` takes the target.
      fresh: its results are new memory, where the last result cannot be written over.
    """

    implementation: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    expected: Any
    in_place: bool = False
    fresh: bool = False

    compiled: Any = None
    state: Any = None

    def compile(self) -> None:
        if self.fresh:
            self.compiled = jax.jit(self.call).lower(*self.args).compile()
            return
        call = self.call if self.in_place else lambda _, *args: self.call(*args)
        jitted = jax.jit(call, donate_argnums=0, keep_unused=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers")
            # The target will be like `expected`, which lowering only looks at.
            self.compiled = jitted.lower(self.expected, *self.args).compile()

    def start(self) -> None:
        if not self.fresh:
            self.state = jax.tree.map(zeros_like, self.expected)

    def step(self) -> None:
        args = self.args if self.fresh else (self.state, *self.args)
        self.state = self.compiled(*args)

    def wait(self) -> None:
        jax.block_until_ready(self.state)

    def result(self) -> Any:
        return self.state

    def temporaries(self) -> int | None:
        """Bytes that one call takes beside its arguments and results."""
        stats = self.compiled.memory_analysis()
        if stats is None:
            return None
        return stats.temp_size_in_bytes + stats.host_temp_size_in_bytes

    def finish(self) -> None:
        self.compiled = self.state = None


@dataclasses.dataclass
class HostJob(Job):
    """One that is called as it is: eager jax, or a peer's own kernels (peers.py).

    Its call returns the result, or None when it wrote into `target`.
    """

    target: Any = None
    returned: Any = None

    def compile(self) -> None:
        pass

    def start(self) -> None:
        self.returned = None

    def step(self) -> None:
        self.returned = self.call(*self.args)

    def wait(self) -> None:
        if common.on_gpu():
            cuda_runtime.synchronize()
        jax.block_until_ready(self.returned)

    def result(self) -> Any:
        return self.target if self.returned is None else self.returned

    def temporaries(self) -> int | None:
        return None

    def finish(self) -> None:
        self.returned = self.target = None


def zeros_like(x: jax.Array) -> jax.Array:
    """Zeros in the memory where x lies."""
    if x.sharding.memory_kind == "device":
        return jnp.zeros_like(x)
    return jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)


@dataclasses.dataclass
class Group:
    """Implementations of the same work.

    Attributes:
      case: "shape / work".
      moved: bytes that one call moves, as the unit counts them.
      run: bytes that stay together, which the bars ask for; 0 when it does not matter.
      unit: of the bandwidth.
      parts, part: how many of which parts the work has, to tell the time of one.
      arrays: what a peer module is given (peers.py).
    """

    case: str
    moved: int
    jobs: list[Job]
    run: int = 0
    unit: str = ""
    parts: int = 0
    part: str = ""
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
