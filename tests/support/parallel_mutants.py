"""Small mistakes of index arithmetic in attention and blocks over several devices."""

from __future__ import annotations

from mutant_list import Mutant, test

PARALLEL_ROOM = "jax_kvblock/parallel"

LAYERS = f"{PARALLEL_ROOM}/layers.py"
PARALLEL = (
    Mutant(
        "a layer gathers where it is to go round",
        LAYERS,
        'strategy="ring" if ring else config.strategy,',
        'strategy="all_gather" if ring else config.strategy,',
        test("test_parallel_layers", "test_a_ring_is_a_ring"),
    ),
    Mutant(
        "a layer goes round whatever its strategy is",
        LAYERS,
        'strategy="ring" if ring else config.strategy,',
        'strategy="ring",',
        test("test_parallel_layers", "sends_as_the_function_does"),
    ),
    Mutant(
        "a config's RING is any strategy",
        LAYERS,
        'asked = {"strategy": "ring"} if ring else {}',
        "asked = {}",
        test("test_parallel_layers", "test_a_ring_is_a_ring"),
    ),
    Mutant(
        "a layer has no softcap",
        LAYERS,
        '"softcap": config.softcap,',
        '"softcap": None,',
        test("test_parallel_layers", "softcap_and_scale"),
    ),
    Mutant(
        "a layer takes any kernels",
        LAYERS,
        '"implementation": config.implementation,',
        '"implementation": None,',
        test("test_parallel_layers", "who_serves"),
    ),
    Mutant(
        "a layer knows of no compiler options",
        LAYERS,
        "compiler_options=config.compiler_options,",
        "compiler_options=False,",
        test("test_parallel_layers", "compiler_options_are"),
    ),
    Mutant(
        "several axes are gathered in the mesh's order",
        f"{PARALLEL_ROOM}/axes.py",
        "a, axis_name, axis=axis, tiled=True, axis_index_groups=groups",
        "a, _in_mesh_order(axis_name, axis_size('', axis_name))[0], axis=axis, "
        "tiled=True, axis_index_groups=groups",
        test("test_context_meshes", "another_order"),
    ),
    Mutant(
        "explicit axes beside a shard_map are let by",
        f"{PARALLEL_ROOM}/axes.py",
        "        if named:\n",
        "        if False:\n",
        test("test_context_meshes", "explicit_axis_beside"),
    ),
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
