"""`kernel_call`: a kernel of one's own as a JAX function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.core.checks import check_array, check_integer, plural
from jax_kvblock.kernels.call import (
    AXES,
    MAX_THREADS,
    SEQUENTIAL,
    WHERE,
    Call,
    Packed,
    check_alias,
    integers_of,
    parameter_numbers,
    results_of,
    sizes_of,
)
from jax_kvblock.kernels.functions import by_code
from jax_kvblock.kernels.kernel import Kernel
from jax_kvblock.kernels.primitive import bind
from jax_kvblock.kernels.tensor_map import TensorMap

Out = Any
Scalars = Sequence[Any] | Mapping[int | str, Any] | Callable[..., Any]
Sizes = int | Sequence[int] | Callable[..., int | Sequence[int]]
MAX_CLUSTER = 16
MAX_SHARED = 227 * 1024  # of a block, on any GPU so far


class Appended(NamedTuple):
    """A result of fixed capacity that a kernel appended to.

    data: `[capacity, …]`, zeros from `count` on. count: int32, how many there are, at
    most the capacity. overflowed: whether there would have been more.
    """

    data: jax.Array
    count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
    overflowed: jax.Array


def kernel_call(
    kernel: Kernel,
    *arrays: Any,
    out: Out,
    scalars: Scalars = (),
    grid: Sizes,
    block: int | Sequence[int] | None = None,
    cluster: int | Sequence[int] | None = None,
    shared_memory: int | None = None,
    cooperative: bool = False,
    order: Sequence[int] | None = None,
    aliases: Mapping[int, int] | None = None,
    append: int | Sequence[int] = (),
    tensor_maps: Mapping[int, TensorMap] | None = None,
    vjp: Callable[..., Any] | None = None,
    sharding: str | None = None,
    batch: str | None = None,
    after: Sequence[Any] = (),
    fallback: Callable[..., Any] | None = None,
    debug: bool = False,
) -> Any:
    """Runs a CUDA kernel on arrays, in a jit or outside of one.

    The kernel's parameters are, in this order: the arrays, as pointers; the results, as
    pointers, without those that are aliased; the scalars, by value. `order` says
    otherwise.

    A scalar is a Python or NumPy number, compiled into the launch, or a traced or
    concrete jax array without dimensions. The kernel then loads that where it loaded
    its parameter, so new values need no compilation, no copy to the host and no new
    capture (a kernel in machine code, or one that takes the parameter's address, is
    refused). An array without dimensions among `arrays` is a pointer, `const T*`, which
    every kernel can have.

    Args:
        kernel: what runs: `from_cuda`, `from_ptx`, `from_cubin`.
        *arrays: JAX or NumPy arrays, in rows as NumPy lays them out.
        out: `jax.ShapeDtypeStruct`s (or arrays like the results), one or a sequence; or
            a function of the arrays' shapes, each with `.shape` and `.dtype`, that
            returns such. What the kernel does not write holds anything.
        scalars: a sequence; or a mapping from parameters, by number or name, the
            arrays and results taking the other ones in their order; or a function of
            the arrays' shapes that returns a sequence of numbers.
        grid: blocks in x, y, z; or a function of the arrays' shapes that returns them.
        block: threads in x, y, z; `None` takes what the kernel's sidecar or its PTX
            (`.reqntid`) says.
        cluster: blocks of a cluster in x, y, z (compute capability 9.0 and newer).
        shared_memory: bytes of dynamic shared memory for a block, also beyond 48 KiB;
            `None` takes what the kernel's sidecar says, or 0.
        cooperative: all blocks run at once, so that they may wait for each other.
        order: for each of arrays, results and scalars, counted through, the number of
            its parameter. A result that is appended to has its counter behind it.
        aliases: which array becomes which result, by their numbers: updated in place,
            as one parameter. XLA copies the array first unless it was donated.
        append: the results that the kernel appends to. Their first dimension is their
            capacity. Each has a second parameter, `unsigned int*`: a counter, 0 before
            every launch, which the kernel adds to for a place.
            `kvblock::append` of `kvblock/append_buffer.cuh` writes nothing beyond the
            capacity.
        tensor_maps: arrays and results, counted through, that travel by value as
            tensor maps (`const __grid_constant__ CUtensorMap`).
        vjp: the derivative: a function of (arrays, results, cotangents) that returns a
            cotangent for each array, `None` for those that have none; it may call
            kernels. Scalars have none.
        sharding: how arrays and results are cut over a mesh: one letter or word for
            each dimension, as in `"i j, j -> i"`; the same word is cut alike. Each
            device runs the kernel on its part, so a grid that depends on shapes must be
            a function of them, and so must scalars. Without it, and outside of
            `jax.shard_map`, sharded arrays are gathered.
        batch: what `jax.vmap` does: `"x"`, `"y"`, `"z"`: one launch whose blocks have
            the member as this index; the kernel finds its member of every array and
            result one after the other. `"sequential"`: a launch for each member.
            `None`: an error.
        after: arrays that are waited for, and nothing else: what computes them runs
            before this kernel does, also in a captured graph.
        fallback: a function of arrays and scalars that computes the same with JAX,
            where there is no NVIDIA GPU; a result that is appended to is
            `(data, count)` there.
        debug: waits for the kernel, so that an error of its names it; no capture.

    Returns:
        The results, as `out` has them: one, or a tuple. Each in `append` is an
        `Appended`.

    Raises:
        TypeError, ValueError: arguments that do not fit each other, the kernel or any
            GPU, while tracing.
        NotImplementedError: a derivative without `vjp`, `jax.vmap` without `batch`, or
            another platform without `fallback`.

    Example:
        ```python
        # (const float* x, float* y, float a, int n)
        axpy = kernels.from_cuda(source, "axpy")
        y = kernels.kernel_call(
            axpy, x, out=x, scalars=(a, x.size), grid=-(-x.size // 256), block=256
        )
        ```
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(
            f"{WHERE}: kernel must be a Kernel, got {type(kernel).__name__}; "
            "from_cuda, from_ptx and from_cubin make one"
        )
    ready = [_array(f"array {i}", a) for i, a in enumerate(arrays)]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ready]
    appended = integers_of("append", append)
    aliases = _by_number("aliases", aliases, "{0: 0} makes array 0 result 0")
    maps = _by_number("tensor_maps", tensor_maps, "{0: TensorMap(...)} for array 0")
    for name, function in (("vjp", vjp), ("fallback", fallback)):
        if function is not None and not callable(function):
            raise TypeError(f"{WHERE}: {name} must be a function, got {function!r}")
    threads = _block(kernel, block)
    results = results_of(out, shapes)
    for item, each in maps.items():
        if not isinstance(each, TensorMap):
            raise TypeError(
                f"{WHERE}: tensor_maps must have a TensorMap for each item, got "
                f"{each!r} for item {item}"
            )
        if not 0 <= item < len(ready) + len(results):
            raise ValueError(
                f"{WHERE}: tensor_maps names item {item}; there are "
                f"{plural(len(ready), 'array')} and {plural(len(results), 'result')} "
                "behind them"
            )
    integers_of("aliases", list(aliases.values()))
    for array, result in aliases.items():
        check_alias(shapes, results, array, result)
    if len({*aliases.values()}) != len(aliases):
        raise ValueError(
            f"{WHERE}: aliases must give each array a result of its own, got {aliases}"
        )
    before = len(ready) + len(results) - len(aliases) + len(appended)
    if not isinstance(after, (tuple, list)):
        raise TypeError(
            f"{WHERE}: after must be a sequence of arrays, got {type(after).__name__}"
        )
    waits = [
        jax.lax.stop_gradient(_array(f"after[{i}]", x)) for i, x in enumerate(after)
    ]
    values, hot, numbers = _scalars(kernel, scalars, before, order)
    fixed = not callable(grid) and math.prod(sizes_of("grid", grid)) > 1
    if sharding is not None and fixed:
        raise ValueError(
            f"{WHERE}: with sharding= every device has a part of the arrays, so grid "
            f"must be a function of their shapes, got {grid!r}"
        )
    call = Call(
        kernel=kernel,
        arrays=len(ready),
        scalars=values,
        out=by_code(out) if callable(out) else results,
        append=appended,
        aliases=tuple(sorted(aliases.items())),
        order=numbers,
        grid=by_code(grid) if callable(grid) else sizes_of("grid", grid),
        block=threads,
        cluster=_cluster(cluster),
        shared_memory=_shared_memory(kernel, shared_memory),
        cooperative=bool(cooperative),
        maps=tuple(sorted(maps.items(), key=lambda item: item[0])),
        batch=_batch(batch),
        sharding=_sharding(sharding, len(ready), len(results)),
        after=tuple(x.ndim for x in waits),
        fallback=by_code(fallback),
        debug=bool(debug),
    )
    run = _run(call) if vjp is None else _with_vjp(call, vjp)
    made = run(*ready, *hot, *waits)
    several = isinstance(out, (tuple, list)) or (callable(out) and len(made) != 1)
    return made if several else made[0]


def _run(call: Call) -> Callable[..., tuple[Any, ...]]:
    def run(*operands: Any) -> tuple[Any, ...]:
        made: list[Any] = []
        rest = iter(bind(call, *operands))
        for x in rest:
            appended = len(made) in call.append
            made.append(_appended(x, next(rest)) if appended else x)
        return tuple(made)

    return run


def _appended(data: Any, counter: Any) -> Appended:
    """A kernel counts on where there is no room."""
    capacity = jnp.uint32(data.shape[0])
    count = jnp.minimum(counter, capacity).astype(jnp.int32)
    return Appended(data, count, counter > capacity)


def _with_vjp(call: Call, vjp: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    run = jax.custom_vjp(_run(call))

    def forward(*operands: Any) -> Any:
        results = _run(call)(*operands)
        return results, (operands, results)

    def backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
        operands, results = kept
        arrays = operands[: call.arrays]
        one = len(results) == 1
        given = vjp(
            arrays,
            results[0] if one else results,
            cotangents[0] if one else cotangents,
        )
        parts = list(given) if isinstance(given, (tuple, list)) else [given]
        if len(parts) != len(arrays):
            raise ValueError(
                f"{WHERE}: vjp of {call.kernel} must return a cotangent for each of "
                f"{len(arrays)} arrays, got {len(parts)}"
            )
        return (*parts, *[None] * (len(operands) - len(arrays)))

    run.defvjp(forward, backward)
    return run


# ---- arguments -----------------------------------------------------------------------


def _array(name: str, given: Any) -> Any:
    if isinstance(given, (bool, int, float)):
        raise TypeError(
            f"{WHERE}: {name} is {given!r}; numbers go into scalars=, or as "
            "jnp.asarray(…) if the kernel reads it through a pointer"
        )
    return jnp.asarray(check_array(WHERE, name, given))


def _is_traced(value: Any) -> bool:
    return isinstance(value, jax.Array)


def _scalars(
    kernel: Kernel, scalars: Any, before: int, order: Sequence[int] | None
) -> tuple[Any, list[Any], tuple[int, ...] | None]:
    """The values compiled in, those that are operands, and the order of all items."""
    numbers = None if order is None else integers_of("order", order)
    if callable(scalars):
        return by_code(scalars), [], numbers
    if isinstance(scalars, Mapping):
        if numbers is not None:
            raise ValueError(f"{WHERE}: scalars by name or number need no order=")
        at = [kernel.number_of(WHERE, name) for name in scalars]
        given = list(scalars.values())
        rest = [n for n in range(before + len(given)) if n not in at]
        numbers = (*rest, *at)
    else:
        given = list(scalars) if isinstance(scalars, (tuple, list)) else [scalars]
    at_number = parameter_numbers(kernel, before + len(given), numbers)
    values: list[Packed | None] = []
    hot = []
    for i, value in enumerate(given):
        number = at_number[before + i]
        if _is_traced(value):
            if value.ndim:
                raise ValueError(
                    f"{WHERE}: {kernel.say(number)} of {kernel} must be a number or an "
                    f"array without dimensions, got shape {value.shape}"
                )
            values.append(None)
            hot.append(value)
        else:
            values.append(Packed.of(kernel, number, value))
    return tuple(values), hot, numbers


def _block(kernel: Kernel, block: Any) -> tuple[int, int, int]:
    if block is None:
        block = kernel.block
    if block is None:
        raise ValueError(
            f"{WHERE}: block must say how many threads a block of {kernel} has; its "
            "sidecar does not"
        )
    sizes = sizes_of("block", block)
    if kernel.block_is_fixed and sizes != kernel.block:
        raise ValueError(
            f"{WHERE}: a block of {kernel} has {kernel.block} threads, as its PTX "
            f"demands (.reqntid), got {sizes}"
        )
    threads, most = math.prod(sizes), kernel.max_threads or MAX_THREADS
    if threads > min(most, MAX_THREADS):
        why = "" if kernel.max_threads is None else ", as its launch bounds say"
        raise ValueError(
            f"{WHERE}: a block of {kernel} has at most {min(most, MAX_THREADS)} "
            f"threads{why}, got {sizes}, {threads}"
        )
    return sizes


def _cluster(cluster: Any) -> tuple[int, int, int] | None:
    if cluster is None:
        return None
    sizes = sizes_of("cluster", cluster)
    if math.prod(sizes) > MAX_CLUSTER:
        raise ValueError(
            f"{WHERE}: a cluster has at most {MAX_CLUSTER} blocks, got {sizes}"
        )
    return sizes


def _shared_memory(kernel: Kernel, given: int | None) -> int:
    size = kernel.shared_memory if given is None else given
    size = check_integer(WHERE, "shared_memory", size, "it is in bytes")
    if not 0 <= size <= MAX_SHARED:
        raise ValueError(
            f"{WHERE}: shared_memory must be 0 to {MAX_SHARED} bytes, got {size}"
        )
    return size


def _by_number(name: str, given: Any, fix: str) -> dict[int, Any]:
    """What there is for arrays and results, by their numbers."""
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{WHERE}: {name} must be a mapping, got {given!r}; {fix}")
    found = dict(given or {})
    integers_of(name, list(found))
    return found


def _batch(batch: str | None) -> str | None:
    if batch is not None and batch not in (*AXES, SEQUENTIAL):
        raise ValueError(
            f"{WHERE}: batch must be 'x', 'y', 'z', 'sequential' or None, got {batch!r}"
        )
    return batch


def _sharding(rule: str | None, arrays: int, results: int) -> str | None:
    if rule is None:
        return None
    sides = [side.split(",") for side in rule.split("->")]
    if len(sides) != 2 or len(sides[0]) != arrays or len(sides[1]) != results:
        raise ValueError(
            f"{WHERE}: sharding must be like 'i j, j -> i' with words for each of "
            f"{arrays} arrays and {results} results, got {rule!r}"
        )
    return rule
