"""The call of the launcher: mirrors `cpp/ops/kernel_call/kernel_call_ffi.cc`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_kvblock.kernels import ptx
from jax_kvblock.kernels.call import SEQUENTIAL, WHERE, Call, Map, Packed, Pointer

TARGET, TARGET_THAT_WAITS = "kvblock_kernel_call", "kvblock_kernel_call_debug"
# Of a parameter: ParameterKind.
_BUFFER, _VALUE, _MAP, _ADDRESSES = range(4)


def runs_on(platform: str | None) -> bool:
    """Whether kernels run where a program is lowered for this platform."""
    return platform == "cuda"


def lower(ctx: Any, call: Call, *operands: Any) -> Any:
    """Lowers a call for an NVIDIA GPU, with the kernel's code."""
    results = len(ctx.avals_out)
    attributes = attributes_of(call, ctx.avals_in, results)
    aliases = {array: call.place_of(result) for array, result in call.aliases}
    target = TARGET_THAT_WAITS if call.debug else TARGET
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    return rule(ctx, *operands, **attributes)


def attributes_of(call: Call, avals: Sequence[Any], results: int) -> dict[str, Any]:
    """What the handler is told. The dtypes are settled here and nowhere else."""
    launch = call.launch(avals)
    values = b""
    maps: list[int] = []
    parameters: list[int] = []
    table = ptx.order_of(dict(launch.loaded))
    addresses: list[int] = []
    for number in table:
        scalar = launch.parameters[number]
        assert isinstance(scalar, Pointer)
        addresses.append(scalar.buffer)
    for number, parameter in enumerate(launch.parameters):
        if number in table:
            continue
        if isinstance(parameter, Pointer):
            parameters += (_BUFFER, parameter.buffer, 0)
        elif isinstance(parameter, Packed):
            values += bytes(-len(values) % 16)  # each where any type may lie
            parameters += (_VALUE, len(values), len(parameter.bytes))
            values += parameter.bytes
        else:
            assert isinstance(parameter, Map)
            numbers = parameter.map.numbers(WHERE, parameter.shape, parameter.dtype)
            parameters += (_MAP, len(maps) // len(numbers), parameter.buffer)
            maps += numbers
    if table:
        parameters += (_ADDRESSES, 0, len(table))
    # ShapeNumber.
    shape = (
        *launch.grid,
        *call.block,
        *(call.cluster or (0, 0, 0)),
        call.shared_memory,
        call.cooperative,
        call.members if call.batch == SEQUENTIAL and call.members else 1,
    )
    appended = [call.place_of(n) + extra for n in call.append for extra in (0, 1)]
    aliased = [n for a, r in call.aliases for n in (a, call.place_of(r))]
    return {
        "image": call.kernel.image_with(dict(launch.loaded)),
        "entry": call.kernel.name,
        "shown": str(call.kernel),
        "shape": np.array(shape, np.int64),
        "parameters": np.array(parameters, np.int64),
        "values": values,
        "maps": np.array(maps, np.int64),
        "addresses": np.array(addresses, np.int64),
        "strides": np.array(_strides(call, avals, launch.results, results), np.int64),
        "zeroed": np.array(appended, np.int64),
        "aliased": np.array(aliased, np.int64),
    }


def _strides(
    call: Call, avals: Sequence[Any], shapes: Sequence[Any], results: int
) -> list[int]:
    """Bytes from a member of a batch to the next, of each buffer."""
    if call.batch != SEQUENTIAL or not call.members:
        return [0] * (len(avals) + results)
    strides = [
        math.prod(a.shape) * a.dtype.itemsize if batched else 0
        for a, batched in zip(call.member(avals), call.batched, strict=True)
    ]
    for number, shape in enumerate(shapes):
        strides.append(math.prod(shape.shape) * shape.dtype.itemsize)
        if number in call.append:
            strides.append(4)
    return strides
