"""Which tests say nothing of a GPU, and what a run on a GPU does with them.

Two markers, which most tests get by what they ask for:

- `cpu`: on CPUs alone. Kernels on the emulator, which is C++ for a CPU; what plain JAX
  does there; builds and records. A run on a GPU leaves them out.
- `host`: on CPU devices, also where there is a GPU: meshes of four of them, fallbacks.
  CI runs them all. Beside a GPU, which is JAX's default device then, a CPU is still
  asked: there a run takes the first case of each test function.

What is left out is skipped, and says why: the record of a run counts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

# Fixtures that compile kernels for the emulator.
EMULATORS = {
    "attention_library",
    "float32_library",
    "fp8_library",
    "sm90_library",
    "latent_library",
    "emulated",
    "emulated_cast",
    "emulated_select",
    "select_as_cuda",
    "kernel_handlers",
    "paged_as_cuda",
    "latent_as_cuda",
    "float32_as_cuda",
    "as_cuda",
    "cast_as_cuda",
    "driver",
    "streams",
}
CPU_DEVICES = {"four_cpus", "on_cpu"}  # fixtures that make a CPU the default device


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks what asks for the emulator, or for CPU devices."""
    for item in items:
        asked = set(getattr(item, "fixturenames", ()))
        if asked & EMULATORS:
            item.add_marker("cpu")
        elif asked & CPU_DEVICES:
            item.add_marker("host")


def others_than_the_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """What is marked `host`, but for the first case of each function."""
    seen: set[tuple[str, str]] = set()
    others = []
    for item in items:
        if not item.get_closest_marker("host") or item.get_closest_marker("cpu"):
            continue
        function = (str(item.path), getattr(item, "originalname", item.name))
        if function in seen:
            others.append(item)
        seen.add(function)
    return others
