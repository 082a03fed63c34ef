"""Casts to 8 bits in both orders of a matrix, alone and behind an RMSNorm.

By our kernels, by XLA, and beside both a copy of as many bytes, in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from bench_attention import TURNS

from jax_kvblock.core.largest import largest_size
from jax_kvblock.training import norm as norms
from jax_kvblock.training import norm_primitive
from jax_kvblock.training import primitive as kernel
from jax_kvblock.training.cast import narrow
from jax_kvblock.training.config import FP8Format
from support import common
from support.common import OURS, Results
from support.rounds import median_of_each

KERNEL = f"{OURS}, cuda"
COPY = "ceiling, a copy in turns"
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Cast:
    rows: int
    columns: int
    dtype: str
    form: FP8Format
    matrices: int = 4  # one after the other, so that the host's time is hidden

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.columns} {self.dtype} {self.form.value}"

    @property
    def bytes(self) -> int:
        """That have to move."""
        each = jnp.dtype(self.dtype).itemsize + 2
        return self.matrices * self.rows * self.columns * each


@dataclasses.dataclass(frozen=True)
class NormCast:
    """RMSNorm, of a sum or not, and a cast in both orders."""

    rows: int
    columns: int
    with_residual: bool
    matrices: int = 4

    @property
    def name(self) -> str:
        of = "a sum" if self.with_residual else "x"
        return f"{self.rows} x {self.columns} bfloat16, of {of}"

    @property
    def bytes(self) -> int:
        each = 8 if self.with_residual else 4  # x, the residual, the sum, both orders
        return self.matrices * self.rows * self.columns * each


CASTS = (
    Cast(8192, 8192, "bfloat16", FP8Format.E4M3),
    Cast(16384, 4096, "bfloat16", FP8Format.E5M2),
    Cast(16384, 14336, "bfloat16", FP8Format.E4M3, 2),
    Cast(4096, 14336, "float32", FP8Format.E4M3),
)
NORM_CASTS = tuple(
    NormCast(16384, columns, residual)
    for columns in (2048, 4096, 8192, 14336)
    for residual in (True, False)
)


def bench(options: argparse.Namespace, results: Results) -> None:
    for cases, run in ((CASTS, time_casts), (NORM_CASTS, time_norm_casts)):
        for case in common.wanted(options, cases):
            small = dataclasses.replace(case, rows=128, columns=256, matrices=1)
            run(small if options.quick else case, results, options.quick)


def time_casts(cast: Cast, results: Results, quick: bool) -> None:
    keys = jax.random.split(jax.random.key(0), cast.matrices)
    shape = (cast.rows, cast.columns)
    matrices = [jax.random.normal(key, shape, cast.dtype) for key in keys]
    scale = jnp.float32(16)

    def by_kernel(x: Any, scale: Any) -> Any:
        made, size = kernel.narrow(x, scale, cast.form)
        return made.codes, made.transposed, size

    def by_xla(x: Any, scale: Any) -> Any:
        made, size = narrow(x, scale, cast.form)
        return made.codes, made.codes.T, size

    def apart(x: Any, scale: Any) -> Any:
        """Codes in each order from the matrix, not one from the other."""
        made, _ = narrow(x, scale, cast.form)
        turned, _ = narrow(jax.lax.optimization_barrier(x).T, scale, cast.form)
        return made.codes, turned.codes, largest_size(x)

    case = f"{cast.name} / cast"
    running, made = {}, {}
    ways = {KERNEL: by_kernel, "xla": by_xla, "xla, apart": apart}
    for who, one in ways.items():
        every = jax.jit(lambda scale, *x, one=one: [one(a, scale) for a in x])
        try:
            made[who] = every(scale, *matrices)
        except Exception as error:
            results.fail(case, who, error)
            continue
        running[who] = functools.partial(every, scale, *matrices)
    for who in set(made) - {"xla"}:
        for a, b in zip(
            jax.tree.leaves(made[who]), jax.tree.leaves(made["xla"]), strict=True
        ):
            if a.dtype.itemsize == 1:
                a, b = a.view(jnp.uint8), b.view(jnp.uint8)
            if not bool(jnp.all(a == b)):
                results.fail(case, who, "another result than plain JAX's")
                running.pop(who, None)
    del made
    _time_beside_a_copy(cast, running, results, case, quick)


def time_norm_casts(cast: NormCast, results: Results, quick: bool) -> None:
    """By our kernel, by plain JAX, and a copy of as many bytes."""
    keys = jax.random.split(jax.random.key(5), 2 * cast.matrices)
    shape = (cast.rows, cast.columns)
    drawn = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    x, residuals = drawn[: cast.matrices], drawn[cast.matrices :]
    if not cast.with_residual:
        residuals = [None] * cast.matrices
    gamma, scale = jnp.ones(cast.columns), jnp.float32(16)
    form = FP8Format.E4M3

    def wanted(total: Any, residual: Any) -> Any:
        """The sum; x itself is there."""
        return None if residual is None else total

    def by_kernel(x: Any, residual: Any) -> Any:
        (made, size), total, _ = norm_primitive.norm_narrow(
            x, residual, gamma, scale, form, EPS
        )
        return made.codes, made.transposed, size, wanted(total, residual)

    def by_xla(x: Any, residual: Any) -> Any:
        total, _, normed = norms.norm(x, residual, gamma, EPS)
        made, size = narrow(normed, scale, form)
        return made.codes, made.codes.T, size, wanted(total, residual)

    case = f"{cast.name} / norm and cast"
    running, made = {}, {}
    for who, one in {KERNEL: by_kernel, "xla": by_xla}.items():
        every = jax.jit(
            lambda x, r, one=one: [one(*pair) for pair in zip(x, r, strict=True)]
        )
        try:
            made[who] = every(x, residuals)
        except Exception as error:
            results.fail(case, who, error)
            continue
        running[who] = functools.partial(every, x, residuals)
    if KERNEL in made and "xla" in made:
        apart = _codes_apart(made[KERNEL], made["xla"])
        results.add(case, KERNEL, "codes apart", apart, "", show=False)
        if apart > 1e-5:  # where float32 adds up squares in another order
            results.fail(case, KERNEL, f"{apart:.2g} of the codes are not plain JAX's")
            running.pop(KERNEL)
    del made
    _time_beside_a_copy(cast, running, results, case, quick)


def _time_beside_a_copy(
    cast: Cast | NormCast,
    running: dict[str, Callable[[], Any]],
    results: Results,
    case: str,
    quick: bool,
) -> None:
    copied = to_copy(cast)
    copy = jax.jit(lambda arrays: [a + jnp.uint32(1) for a in arrays])
    running[COPY] = functools.partial(copy, copied)
    seconds = median_of_each(running, results, case, quick, TURNS)
    for who, found in seconds.items():
        results.add(case, who, "bandwidth", cast.bytes / found / 1e12, "TB/s")
    if KERNEL in seconds and COPY in seconds:
        over = seconds[COPY] / seconds[KERNEL]
        results.add(case, KERNEL, "over a copy", over, "")


def to_copy(cast: Cast | NormCast) -> list[jax.Array]:
    """Half of the bytes that have to move, which are read, and written as well.

    Of 4 bytes each: XLA's pass over numbers of 16 bits is a fifth slower.
    """
    words = cast.bytes // (2 * 4 * cast.matrices)
    return [jnp.zeros(words, jnp.uint32) for _ in range(cast.matrices)]


def _codes_apart(got: Any, want: Any) -> float:
    """The share of codes that differ, in either order."""
    share = jax.jit(lambda a, b: (a.view(jnp.uint8) != b.view(jnp.uint8)).mean())
    pairs = [
        (a[order], b[order]) for a, b in zip(got, want, strict=True) for order in (0, 1)
    ]
    return max(float(share(a, b)) for a, b in pairs)
