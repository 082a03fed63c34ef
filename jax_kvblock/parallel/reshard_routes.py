"""Who sends which heads to whom, when a pool's heads are cut anew.

Nothing here touches an array. A `Cut` says which heads each device has. `find_routes`
cuts the heads as fine as both pools do and finds for each part a device that has it and
one that wants it. `in_rounds` puts these routes in as few rounds of permutations as
there can be.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax

NOWHERE = -1  # a first head outside of every pool: reads zeros, writes nothing


class Cut(NamedTuple):
    """How a pool's heads lie over devices.

    Attributes:
      devices: those of the pool, in its sharding's order.
      firsts: for each device, the first of its heads.
      width: how many heads each of them has.
    """

    devices: tuple[jax.Device, ...]
    firsts: tuple[int, ...]
    width: int


class Route(NamedTuple):
    """Some heads on their way: as many for each route as `grain` says.

    Attributes:
      sender, take: the device that has them, and the first among its own heads.
      receiver, put: the device that wants them, and their place among its own heads.
    """

    sender: jax.Device
    take: int
    receiver: jax.Device
    put: int


class Round(NamedTuple):
    """What all devices of a mesh do at a time, each by its number.

    Attributes:
      piece: which of the pieces that devices read travels.
      puts: for each device, the first of its heads that is written, or NOWHERE.
      pairs: sender and receiver; () where what is read stays.
    """

    piece: int
    puts: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]


class Rounds(NamedTuple):
    """All rounds, and what is read for them.

    Attributes:
      pieces: for each piece and device, the first head that is read, or NOWHERE.
      rounds: those that stay come first.
    """

    pieces: tuple[tuple[int, ...], ...]
    rounds: tuple[Round, ...]


def grain(src: Cut, dst: Cut) -> int:
    """The heads of one route: no border of either cut lies inside of it."""
    return math.gcd(src.width, dst.width)


@functools.lru_cache(maxsize=256)
def find_routes(src: Cut, dst: Cut) -> tuple[Route, ...]:
    """One route for each part of each destination device's heads.

    A device that has them itself keeps them. Else it is one of its own process if there
    is one, and of those the one that sends least so far.
    """
    width = grain(src, dst)
    owners: defaultdict[int, list[tuple[jax.Device, int]]] = defaultdict(list)
    for device, first in zip(src.devices, src.firsts, strict=True):
        for take in range(0, src.width, width):
            owners[first + take].append((device, take))
    sends: Counter[jax.Device] = Counter()
    routes = []
    for receiver, first in zip(dst.devices, dst.firsts, strict=True):
        for put in range(0, dst.width, width):

            def cost(owner: tuple[jax.Device, int], to: jax.Device = receiver) -> tuple:
                device, _ = owner
                far = device.process_index != to.process_index
                return device != to, far, sends[device]

            sender, take = min(owners[first + put], key=cost)
            sends[sender] += sender != receiver
            routes.append(Route(sender, take, receiver, put))
    return tuple(routes)


@functools.lru_cache(maxsize=256)
def in_rounds(src: Cut, dst: Cut, devices: tuple[jax.Device, ...]) -> Rounds:
    """The routes as rounds over a mesh of these devices."""
    routes = find_routes(src, dst)
    stay = _of_each_device(r for r in routes if r.sender == r.receiver)
    move = _permutations([r for r in routes if r.sender != r.receiver])
    number = {device: i for i, device in enumerate(devices)}
    pieces: list[list[int]] = []
    rounds = []
    for together in (*stay, *move):
        takes, puts = [NOWHERE] * len(devices), [NOWHERE] * len(devices)
        for route in together:
            takes[number[route.sender]] = route.take
            puts[number[route.receiver]] = route.put
        pairs = tuple(
            (number[r.sender], number[r.receiver])
            for r in together
            if r.sender != r.receiver
        )
        rounds.append(Round(_find_piece(pieces, takes), tuple(puts), pairs))
    return Rounds(tuple(map(tuple, pieces)), tuple(rounds))


def _find_piece(pieces: list[list[int]], takes: Sequence[int]) -> int:
    """The piece that serves, since a device that reads nothing may read anything.

    Where heads go to several devices, they are read once.
    """
    for i, piece in enumerate(pieces):
        both = list(zip(piece, takes, strict=True))
        if all(a == b or NOWHERE in (a, b) for a, b in both):
            pieces[i] = [max(pair) for pair in both]
            return i
    pieces.append(list(takes))
    return len(pieces) - 1


def _of_each_device(routes: Iterable[Route]) -> list[list[Route]]:
    """Rounds of routes that stay: the first of each device, then the second."""
    seen: Counter[jax.Device] = Counter()
    rounds: defaultdict[int, list[Route]] = defaultdict(list)
    for route in routes:
        rounds[seen[route.receiver]].append(route)
        seen[route.receiver] += 1
    return [rounds[i] for i in sorted(rounds)]


def _permutations(routes: Sequence[Route]) -> list[list[Route]]:
    """Rounds in which a device sends at most once and receives at most once.

    There are as many as the busiest device has routes, the fewest that there can be:
    an edge coloring of a bipartite graph, by alternating paths (König, 1916).
    """
    # For each end, (0, sender) or (1, receiver), the routes it has by their rounds.
    taken: defaultdict[tuple[int, jax.Device], dict[int, Route]] = defaultdict(dict)
    chosen: dict[Route, int] = {}

    def ends(route: Route) -> tuple[tuple[int, jax.Device], tuple[int, jax.Device]]:
        return (0, route.sender), (1, route.receiver)

    def free(end: tuple[int, jax.Device]) -> int:
        return next(i for i in itertools.count() if i not in taken[end])

    for route in routes:
        sender, receiver = ends(route)
        here, there = free(sender), free(receiver)
        # From the receiver on, swap these two rounds: then `here` is free there, too.
        path, end, step = [], receiver, here
        while step in taken[end]:
            path.append(taken[end].pop(step))
            end = next(e for e in ends(path[-1]) if e != end)
            del taken[end][step]
            step = here + there - step
        for moved in path:
            chosen[moved] = here + there - chosen[moved]
        chosen[route] = here
        for placed in (*path, route):
            for end in ends(placed):
                taken[end][chosen[placed]] = placed
    rounds: list[list[Route]] = [
        [] for _ in range(max(chosen.values(), default=-1) + 1)
    ]
    for route, i in chosen.items():
        rounds[i].append(route)
    return rounds
