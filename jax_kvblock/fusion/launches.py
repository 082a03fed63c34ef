"""How many kernels a call runs on a GPU, counted by JAX's profiler."""

from __future__ import annotations

import collections
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

NO_GPU = "kernels are counted on GPUs alone"
_MOVES = re.compile(r"^mem(cpy|set)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Launches:
    """What one call ran on one GPU.

    Attributes:
      kernels: how many, or None where they were not counted.
      moves: copies and fills of memory, which are no kernels.
      names: of the kernels, with how often each ran in a call.
      reason: why there is no count; empty where there is one.
    """

    kernels: float | None
    moves: float | None = None
    names: dict[str, float] = dataclasses.field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        if self.kernels is None:
            return f"not counted: {self.reason}"
        return f"{self.kernels:g} kernels, {self.moves:g} copies and fills"


def count_launches(call: Callable[[], Any], calls: int = 3) -> Launches:
    """Counts the kernels of a call, which is made once before they are counted.

    A kernel that runs as a part of a CUDA graph counts as one: what is counted is what
    the GPU ran, not what the host asked for.

    Args:
      call: it takes nothing, and what it returns is waited for.
      calls: how many are recorded; the counts are divided by it.
    """
    if jax.default_backend() != "gpu":
        return Launches(None, reason=NO_GPU)
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        try:
            with jax.profiler.trace(folder, profiler_options=_options()):
                for _ in range(calls):
                    jax.block_until_ready(call())
        except RuntimeError as error:  # another one is recording, or CUPTI is not here
            return Launches(None, reason=f"the profiler failed: {error}")
        files = list(Path(folder).glob("**/*.xplane.pb"))
        if not files:
            return Launches(None, reason="the profiler wrote nothing")
        data = jax.profiler.ProfileData.from_file(str(files[0]))
    return read_launches(data.planes, calls)


def read_launches(planes: Iterable[Any], calls: int) -> Launches:
    """What planes of a profile say of the first GPU, for one of `calls` calls."""
    found = [
        event.name
        for plane in planes
        if re.search(r"GPU:0$", plane.name)
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    ]
    if not found:
        return Launches(None, reason="the profile has no kernels of GPU 0")
    counts = collections.Counter(name for name in found if not _MOVES.match(name))
    kernels = sum(counts.values())
    return Launches(
        kernels / calls,
        (len(found) - kernels) / calls,
        {name: count / calls for name, count in counts.most_common()},
    )


def _options() -> Any:
    """The device alone is recorded: Python's calls and the host's cost time."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    return options
