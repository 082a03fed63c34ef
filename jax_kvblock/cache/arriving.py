"""How blocks of the tiers below come into the pool: parts, each by way of one room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import numpy as np

from jax_kvblock.cache import programs
from jax_kvblock.cache.below import Arrival, Below, Placed
from jax_kvblock.cache.copies import Cut
from jax_kvblock.cache.tickets import Part, Stage
from jax_kvblock.objects.manager import BlockManager


def whole_blocks(
    manager: BlockManager,
    below: Below,
    place: Callable[..., Placed],
    ids: np.ndarray,
    came: Callable[[], None] | None = None,
) -> Part:
    """Blocks at once, as many as a room holds.

    Args:
      place: says where they lie, in the thread that copies up; given `room`, where
        the store reads to the device.
      came: called when the program that writes them into the pool is dispatched.
    """
    cut = Cut.whole(manager.spec)

    def bring() -> Arrival:
        # In one job: the next ones' blocks may land where these did.
        room = below.rooms.take() if below.reads_to_device else None
        try:
            placed = place(room=room)
        except BaseException:
            if room is not None:
                below.rooms.give_back(room)
            raise
        return below.bring(placed, cut, below.rooms.take() if room is None else room)

    def take(room: jax.Array) -> jax.Array:
        read = programs.write_blocks(manager, ids, room)
        if came is not None:
            came()
        return read

    def start() -> list[Stage]:
        with below.in_order:  # not between the jobs of others' layers
            arriving = below.up.submit(bring)
        # Who reads the blocks below holds them until the copy has ended.
        return [Stage(arriving, take, 0, below.rooms.give_back)]

    return Part(0, start)


def layers_of_some(
    manager: BlockManager, below: Below, keys: Sequence[bytes], ids: np.ndarray
) -> Part:
    """As many blocks as a room holds, layer by layer, wherever they lie."""
    spec = below.host.spec

    def start() -> list[Stage]:
        with below.in_order:
            placed = below.up.submit(below.place, keys)
            room = below.up.submit(below.rooms.take)
            return [of_layer(placed, room, layer) for layer in range(spec.num_layers)]

    def of_layer(placed: Future[Placed], room: Future[jax.Array], layer: int) -> Stage:
        cut, last = Cut.layer(spec, layer), layer == spec.num_layers - 1
        at = layer * len(ids)
        arriving = below.up.submit(_bring, below, placed, cut, room, at * cut.nbytes)
        first = at * cut.nbytes // spec.dtype.itemsize
        return Stage(
            arriving,
            lambda room: programs.write_layer(manager, layer, ids, room, first),
            layer,
            _ended(below, placed) if last else None,
        )

    return Part(0, start)


def layers_of_all(
    manager: BlockManager, below: Below, placed: Placed, ids: np.ndarray, chunk: int
) -> list[Part]:
    """Blocks that are in host memory: the first layer of all, then the second.

    chunk: how many whole blocks a room holds; of one layer it holds those of more.
    """
    spec = below.host.spec
    size = 1 << ((chunk * spec.num_layers).bit_length() - 1)  # few programs' shapes
    parts = [slice(first, first + size) for first in range(0, len(ids), size)]
    below.count_out(len(ids))

    def part_of(layer: int, part: slice) -> Part:
        some: Future[Placed] = Future()
        some.set_result(Placed(placed.hold, placed.slots[part]))

        def take(room: jax.Array) -> jax.Array:
            return programs.write_layer(manager, layer, ids[part], room, 0)

        def start() -> list[Stage]:
            arriving = below.up.submit(_bring, below, some, Cut.layer(spec, layer))
            return [Stage(arriving, take, layer, below.rooms.give_back)]

        return Part(layer, start)

    return [part_of(layer, part) for layer in range(spec.num_layers) for part in parts]


def _bring(
    below: Below,
    placed: Future[Placed],
    cut: Cut,
    room: Future[jax.Array] | None = None,
    first: int = 0,
) -> Arrival:
    """In the thread that copies up."""
    source = placed.result()  # an earlier job's, which has ended
    array = below.rooms.take() if room is None else room.result()
    return below.bring(source, cut, array, first)


def _ended(
    below: Below, placed: Future[Placed]
) -> Callable[[jax.Array, jax.Array], None]:
    """What follows the last program that reads a room: nobody copies from there."""

    def end(room: jax.Array, read: jax.Array) -> None:
        below.rooms.give_back(room, read)
        placed.result().hold.release()

    return end
