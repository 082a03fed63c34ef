"""Small mistakes of index arithmetic in attention and blocks over several devices."""

from __future__ import annotations

from mutant_list import Mutant, test

PARALLEL_ROOM = "jax_kvblock/parallel"

PARALLEL = (
    Mutant(
        "a zigzag's second chunks begin one too early",
        f"{PARALLEL_ROOM}/sequence.py",
        "jnp.where(late, 2 * size - 1 - device, device)",
        "jnp.where(late, 2 * size - 2 - device, device)",
        test("test_sequence_layouts", "test_whole_sequences"),
    ),
    Mutant(
        "in a ring's zigzag all rows see a later device's keys",
        f"{PARALLEL_ROOM}/pieces.py",
        "rows = Piece(jnp.where(late, q1.first, q0.first),",
        "rows = Piece(q0.first,",
        test("test_context_parallel", "test_deterministic and ring"),
    ),
    Mutant(
        "of gathered chunks a device's own first one is taken, too",
        f"{PARALLEL_ROOM}/others.py",
        "again + (again >= place).astype(jnp.int32)",
        "again + (again > place).astype(jnp.int32)",
        test("test_context_parallel", "test_deterministic and all_gather"),
    ),
    Mutant(
        "of gathered chunks the first rows see one too many",
        f"{PARALLEL_ROOM}/others.py",
        "low = jnp.where(slot < place, there, 0)",
        "low = jnp.where(slot <= place, there, 0)",
        test("test_context_parallel", "test_deterministic and all_gather"),
    ),
    Mutant(
        "a group's second chunks begin a device late",
        f"{PARALLEL_ROOM}/ulysses.py",
        "late = device >= group",
        "late = device > group",
        test("test_context_parallel", "test_numbers_of_heads and ulysses_ring"),
    ),
    Mutant(
        "heads that move are put where they were taken",
        f"{PARALLEL_ROOM}/reshard_routes.py",
        "puts[number[route.receiver]] = route.put",
        "puts[number[route.receiver]] = route.take",
        test("test_reshard", "test_by_collectives and both"),
    ),
    Mutant(
        "gradients of a row that two pieces took are sent as one's",
        f"{PARALLEL_ROOM}/gathered.py",
        "part(last, last > first)",
        "part(last, last < first)",
        test("test_context_parallel", "never_read and all_gather and tuned"),
    ),
    Mutant(
        "engines send gradients to the device that is as far ahead",
        f"{PARALLEL_ROOM}/gathered.py",
        "self._here.send(parts, -step % size)",
        "self._here.send(parts, step)",
        test("test_context_parallel", "never_read and all_gather and tuned"),
    ),
    Mutant(
        "rows that engines sent are taken from one device before",
        f"{PARALLEL_ROOM}/gathered.py",
        "behind = (here.place - order // length)",
        "behind = (here.place - 1 - order // length)",
        test("test_context_parallel", "never_read and all_gather and tuned"),
    ),
)
