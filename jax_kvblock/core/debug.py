"""`debug_checks`: data that is wrong becomes an error.

What only the device knows cannot raise while a call is traced. Under `debug_checks` it
is looked at on the host: at once where a call runs outside of jit, and inside of jit by
a callback that fails the program.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ENVIRONMENT = "KVBLOCK_DEBUG_CHECKS"

# A part of the key of every cache of jit: what was traced without checks is traced
# again with them.
_checking = jax.make_user_context(
    os.environ.get(ENVIRONMENT, "").lower() in ("1", "true", "on", "yes")
)


@contextlib.contextmanager
def debug_checks(enable: bool = True) -> Iterator[None]:
    """Makes data that is wrong an error, with its place and value.

    Block ids, slots, lengths, starts and traced layers have a meaning whatever they
    are: what is out of range reads zeros, is not seen or not written. Under this
    context manager `paged_attention`, `append_kv`, `rope_append`, `gather_kv` and the
    functions that gather, scatter, copy and transfer blocks look at them on the host;
    −1 stays padding. `flash_attention` looks at tile lists and at scales of 8 bits,
    selectors at rows that are short of tau or unknown (NaN), and
    `context_parallel_attention` and the functions that lay sequences out at boundaries
    of packed documents. Outside of jit an IndexError or ValueError comes from the call,
    before it runs. Inside of it (also in scan, vmap and shard_map) the program fails:
    `jax.errors.JaxRuntimeError`, which ends with the same text, comes from the program
    or, at the latest, from `block_until_ready` on its results. A pool that was donated
    to it is lost. Where the compiler itself cuts a program over several devices, or
    over an axis beside a shard_map's, some of them may wait for one that has failed: a
    CPU then ends the process, after a minute.

    It is of this thread. A function that was compiled without checks is compiled again
    with them; off, nothing is added to a program. On, each call waits for the host, and
    a program cannot be exported. The environment variable KVBLOCK_DEBUG_CHECKS=1 turns
    checks on for a whole process.

    Args:
      enable: False turns checks off inside.

    Example:
      >>> with debug_checks():
      ...     out = jax.block_until_ready(step(pool, q, tables, lens))
    """
    with _checking(bool(enable)):
        yield


def enabled() -> bool:
    return bool(_checking.value)


def check(function: Callable[..., None], *static: Any, **arrays: Any) -> None:
    """Calls `function(*static, **arrays)` with NumPy arrays, where checks are on.

    An array that is None is not passed.
    """
    if not enabled():
        return
    given = {name: a for name, a in arrays.items() if a is not None}
    look = functools.partial(_look, function, static)
    if any(isinstance(a, jax.core.Tracer) for a in given.values()):
        jax.debug.callback(look, **given)
    else:
        look(**given)


def checked(function: Callable[..., None], x: Any, *static: Any, name: str) -> Any:
    """x, and where checks are on not before `function(*static, name=x)` has looked.

    So what waits for x is not begun where data is wrong. A collective has to, of which
    some devices would wait for those that have failed. That is inside of a shard_map
    over all axes, where each device looks itself; elsewhere x does not wait.
    """
    check(function, *static, **{name: x})
    mesh = jax.sharding.get_abstract_mesh()
    manual = mesh.axis_names and {*mesh.manual_axes} == {*mesh.axis_names}
    if not enabled() or not isinstance(x, jax.core.Tracer) or not manual:
        return x

    # What has no effect is allowed in every transform; whose program has one, as that
    # of `check`, fails by JaxRuntimeError.
    def same(x: Any) -> np.ndarray:
        _look(function, static, **{name: x})
        return np.asarray(x)

    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(same, kind, x, vmap_method="sequential")


def after(looked_at: Sequence[jax.Array], arrays: Sequence[Any]) -> list[Any]:
    """The same arrays, where checks are on not before integers were looked at.

    These are not all the smallest there is, which no compiler knows; it would see
    through a barrier.
    """
    if not enabled():
        return list(arrays)
    least = [(x == jnp.iinfo(x.dtype).min).all() for x in looked_at]
    never = functools.reduce(jnp.logical_or, least)
    return [jnp.where(never, jnp.zeros_like(a), a) for a in arrays]


def _look(function: Callable[..., None], static: Any, **arrays: Any) -> None:
    function(*static, **{n: np.asarray(jax.device_get(a)) for n, a in arrays.items()})


# ---- what is looked at ---------------------------------------------------------------


def first_bad(bad: np.ndarray) -> tuple[int, ...] | None:
    """The first index at which an array is true."""
    if not bad.any():
        return None
    return tuple(map(int, np.unravel_index(int(bad.argmax()), bad.shape)))


def place(name: str, index: tuple[int, ...]) -> str:
    """An element as messages call it."""
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def check_range(
    where: str, name: str, x: np.ndarray, low: int, high: int, what: str, fix: str = ""
) -> None:
    """All of x from `low` to `high`, which are `what`."""
    at = first_bad((x < low) | (x > high))
    if at is None:
        return
    range_ = f"{low} to {high}" if high >= low else "there are none"
    raise IndexError(
        f"{where}: {place(name, at)} is {int(x[at])}, outside of {what}, {range_}{fix}"
    )


def check_ids(where: str, name: str, ids: np.ndarray, count: int, what: str) -> None:
    """Ids of one of `count`, or −1."""
    at = first_bad((ids < -1) | (ids >= count))
    if at is not None:
        raise IndexError(
            f"{where}: {place(name, at)} is {int(ids[at])}, and {what} are 0 to "
            f"{count - 1}; pass -1 for none"
        )


def check_unique(where: str, name: str, ids: np.ndarray) -> None:
    """No id twice, but for those below 0."""
    order = np.argsort(ids, kind="stable")
    again = (ids[order][1:] == ids[order][:-1]) & (ids[order][1:] >= 0)
    if again.any():
        second = int(order[1:][again].min())
        first = int(np.flatnonzero(ids == ids[second])[0])
        raise ValueError(
            f"{where}: {name}[{first}] and {name}[{second}] are both "
            f"{int(ids[second])}; which of two would be written is not defined"
        )


def check_written(
    where: str,
    name: str,
    count: int,
    what: str,
    layers: int,
    *,
    ids: np.ndarray,
    layer: np.ndarray | None = None,
) -> None:
    """Places that are written, each once, and a traced layer."""
    check_read(where, name, count, what, layers, ids=ids, layer=layer)
    check_unique(where, name, ids)


def check_read(
    where: str,
    name: str,
    count: int,
    what: str,
    layers: int,
    *,
    ids: np.ndarray,
    layer: np.ndarray | None = None,
) -> None:
    """Places that are read, and a traced layer."""
    check_ids(where, name, ids, count, what)
    if layer is not None:
        check_range(where, "layer", layer, 0, layers - 1, "the pool's layers")
