"""What a compiled program takes of a device's memory, by kind."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class MemoryUsage:
    """Bytes of one device's memory that a compiled program takes while it runs.

    As `memory_analysis()` tells them of the program, on each device where there are
    several. Other arrays that are alive meanwhile are not among them.

    Attributes:
      arguments: what goes in.
      outputs: what comes out.
      aliased: outputs that take the memory of donated arguments.
      temporaries: everything between.
      code: the program itself, where it lies on the device.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """All of it, what is aliased counted once."""
        whole = self.arguments + self.outputs + self.temporaries + self.code
        return whole - self.aliased

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{field.name} {getattr(self, field.name) / 2**20:.1f}"
            for field in dataclasses.fields(self)
        )
        return f"{self.total / 2**20:.1f} MiB: {kinds}"


def usage_of(where: str, compiled: Any) -> MemoryUsage:
    """Of a compiled program: `jax.jit(f).lower(...).compile()`."""
    told = compiled.memory_analysis()
    if told is None:
        raise NotImplementedError(
            f"{where}: {jax.devices()[0].platform} does not analyse the memory of "
            "compiled programs; measure it where the program runs"
        )
    return MemoryUsage(
        arguments=int(told.argument_size_in_bytes),
        outputs=int(told.output_size_in_bytes),
        aliased=int(told.alias_size_in_bytes),
        temporaries=int(told.temp_size_in_bytes),
        code=int(told.generated_code_size_in_bytes),
    )
