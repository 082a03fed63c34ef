"""Steps on the device: the programs, and what they are called with.

A program is given its numbers in the same memory in each step. On a GPU XLA keeps it as
a CUDA graph, which has to be changed wherever an array has come to lie elsewhere.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import BlockManager, KVPool
from serve.batch import Batch, Shape
from serve.fill import fill
from serve.models import LoadedModel
from serve.scheduler import Part
from serve.step import step


class Runner:
    """Runs a model's steps over a manager's pool.

    Attributes:
        num_programs: that were traced.

    Args:
        model: what computes.
        manager: of the pool, which each step is given and gives back.
        shapes: of the steps, by rows; `step_shapes` makes some.
        fuse_layers: as for `step`.
    """

    def __init__(
        self,
        model: LoadedModel,
        manager: BlockManager,
        shapes: list[Shape],
        fuse_layers: bool = True,
    ) -> None:
        self._params, self._manager, self._shapes = model.params, manager, shapes
        self.num_programs = 0
        config = model.config

        def program(
            pool: KVPool, params: Any, last: Any, buffer: Any, *, shape: Shape
        ) -> tuple[KVPool, tuple[jax.Array, ...]]:
            self.num_programs += 1  # Python runs this when JAX traces, not later
            how = {"config": config, "shape": shape, "fuse_layers": fuse_layers}
            return step(pool, params, last, buffer, **how)

        self._program = program
        self._start()

    def compile(self, closing: Callable[[], bool] = lambda: False) -> bool:
        """Compile all programs now, by steps without rows.

        Args:
            closing: asked before each; where it says so, the rest is left out.

        Returns:
            Whether all are compiled.
        """
        for shape in self._shapes:
            if closing():
                return False
            self._call(Batch(shape))
        jax.block_until_ready(self._tokens)
        return True

    def dispatch(self, parts: list[Part]) -> tuple[list[tuple[Part, int]], jax.Array]:
        """Have a step computed, without waiting for it.

        Returns:
            The parts behind which a token comes, each with its first output, and the
            token behind each output, of each step if parts have several. These are
            copied to the host as soon as they are there.
        """
        num_rows = sum(part.num_rows for part in parts)
        greedy = all(part.sequence.request.temperature == 0 for part in parts)
        several = any(part.steps > 1 for part in parts)
        fit = (
            each
            for each in self._shapes
            if each.rows >= num_rows
            and each.greedy in (None, greedy)
            and (each.steps > 1) == several
        )
        batch = Batch(next(fit))
        outputs = fill(batch, parts)
        return outputs, self._call(batch)

    def reset(self) -> None:
        """A pool as new, whatever a step that failed has made of the old one."""
        manager = self._manager
        manager.pool = KVPool.zeros(manager.spec, manager.num_blocks)
        self._start()

    def _start(self) -> None:
        """No step has been: its tokens, and places for what a step is given."""
        most = self._shapes[0].most_outputs
        self._tokens, self._last = self._zeros(most), self._zeros(most)
        self._buffers = {s.size: self._zeros(s.size) for s in self._shapes}

    def _call(self, batch: Batch) -> jax.Array:
        """Returns the tokens of all steps of the batch, on their way to the host."""
        size = batch.shape.size
        with jax.transfer_guard_host_to_device("allow"):  # it is meant to be one
            self._last, self._buffers[size] = _moved_to(
                (self._last, self._buffers[size]), (self._tokens, batch.buffer)
            )
        self._tokens, *of_steps = self._manager.update(
            self._program,
            self._params,
            self._last,
            self._buffers[size],
            shape=batch.shape,
            static_argnames="shape",
        )
        tokens = of_steps[0] if of_steps else self._tokens
        # Begun when they are asked for, the copy would take longer than a short step.
        tokens.copy_to_host_async()
        return tokens

    def _zeros(self, size: int) -> jax.Array:
        # On the pool's device for good, as what a step returns: else the first step of
        # each shape would be compiled twice.
        return jax.device_put(np.zeros(size, np.int32), self._manager.pool.sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _moved_to(places: tuple[jax.Array, ...], given: Any) -> tuple[jax.Array, ...]:
    """What is given, in the memory of the places."""
    return tuple(old.at[:].set(new) for old, new in zip(places, given, strict=True))


def step_shapes(
    dtype: Any, max_batch: int, width: int, drafts: int, most_rows: int, steps: int = 1
) -> list[Shape]:
    """Of an engine's programs, by rows; arguments are those of `row_sizes`, `Shape`.

    steps: of decoding, of a program; there are those with one as well.
    """
    known = (None,) if jax.default_backend() == "cpu" else (True, False)
    return [
        Shape(rows, max_batch, width, drafts, greedy, count)
        for rows in row_sizes(dtype, max_batch, drafts, most_rows)
        for greedy in known
        for count in sorted({1, steps if rows <= max_batch else 1})
    ]


def row_sizes(dtype: Any, max_batch: int, drafts: int, most: int) -> list[int]:
    """Rows of the programs, few: those of a step take the next larger one.

    For one that decodes, for all, for all with drafts, and for chunks of prompts; none
    is more than eight times the one before, so that the end of a prompt, or a question
    behind a prefix that is found, is not computed as a whole chunk is. On a CPU, XLA
    multiplies fewer than 4 rows of bfloat16 ten times as slowly as 4.
    """
    least = 4 if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else 1
    sizes = {least, max_batch, max_batch * (1 + drafts), most}
    wanted = sorted(size for size in sizes if least <= size <= most)
    for small, large in itertools.pairwise(wanted):
        while large > 8 * small:
            large = -(-large // 8)
            sizes.add(large)
    return sorted(size for size in sizes if least <= size <= most)
