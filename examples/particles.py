"""Particles: an emitter, gravity, drag and integration, four graphs composed to one.

The emitter appends to a buffer those particles of the last frame that are still alive,
and new ones. How many there are then stays on the device: the count flows to the other
kernels, which update the particles in place. `particles.cu` has the kernels, and where
there is no NVIDIA GPU the functions below compute the same with JAX.

A whole animation runs in one jit, and once more frame by frame by an `Engine`, with
another gravity in each frame. Both must be what float64 on the host says, particle by
particle, and without compiling anything again.

    pip install 'jax_kvblock[kernels]'    # NVRTC, which compiles without a GPU, too
    python examples/particles.py
    python examples/particles.py --picture docs/particles.svg
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from draw_particles import Panel, lives, picture

from jax_kvblock import kernels
from jax_kvblock.graphs import BlockBuilder, Engine, EngineBlock, Graph

SOURCE = Path(__file__).with_name("particles.cu")
THREADS = 256

# A particle is a row of eight float32; its number says which it is, wherever it lies.
POSITION, VELOCITY, AGE, NUMBER = slice(0, 3), slice(3, 6), 6, 7
ROWS = "float32[n, 8]"
# Center and radius of the sphere that they start on; their velocity, and its spread.
CONFIG = np.array([0, 0, 0, 0.05, 0, 6, 0, 2], np.float32)

CAPACITY, RATE, FRAMES = 2048, 16, 256
DELTA_TIME, LIFETIME = 1 / 64, 1.5  # so an age is exact, and a life is 96 frames
LIFE_FRAMES = int(LIFETIME / DELTA_TIME)
DRAG = 0.4
WORLDS, DRAWN_RATE = ((9.81, 0.4), (3.7, 0.4), (-2.5, 2.0)), 3  # of the picture


# ---- what the kernels compute, in JAX ------------------------------------------------


def random_bits(bits: jax.Array) -> jax.Array:
    """A hash of uint32."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)


@jax.jit
def born(config: jax.Array, seed: Any, numbers: jax.Array) -> jax.Array:
    """The particles of these numbers, uint32[n], as they start: float32[n, 8]."""
    key = random_bits(jnp.asarray(seed).astype(jnp.uint32))
    draws = random_bits(key ^ (4 * numbers[:, None] + jnp.arange(3, dtype=jnp.uint32)))
    height, angle, away = jnp.moveaxis((draws >> 8).astype(jnp.float32) / 2**24, 1, 0)
    height, angle = 2 * height - 1, 2 * jnp.pi * angle
    side = jnp.sqrt(1 - height**2)
    outward = jnp.stack([side * jnp.cos(angle), height, side * jnp.sin(angle)], axis=1)
    position = config[0:3] + config[3] * outward
    velocity = config[4:7] + config[7] * jnp.sqrt(away)[:, None] * outward
    age, number = jnp.zeros_like(height), numbers.astype(jnp.float32)
    return jnp.column_stack([position, velocity, age, number])


def emit(
    config: jax.Array,
    last: jax.Array,
    count: jax.Array,
    rate: jax.Array,
    first: jax.Array,
    seed: jax.Array,
    lifetime: jax.Array,
    capacity: int,
) -> tuple[jax.Array, jax.Array]:
    """Who is alive, then new ones, up to the capacity; and how many there would be."""
    old, new = jnp.arange(len(last)), jnp.arange(capacity, dtype=jnp.uint32)
    numbers = jnp.asarray(first).astype(jnp.uint32) + new
    rows = jnp.concatenate([last, born(config, seed, numbers)])
    alive = (old < count) & (last[:, AGE] < lifetime)
    kept = jnp.concatenate([alive, new < rate])
    places = jnp.where(kept, jnp.cumsum(kept) - 1, capacity)
    particles = jnp.zeros((capacity, 8), jnp.float32).at[places].set(rows, mode="drop")
    return particles, jnp.sum(alive) + rate


def gravity(
    particles: jax.Array, strength: jax.Array, delta_time: jax.Array, count: jax.Array
) -> jax.Array:
    """Pulls along -y."""
    pulled = particles.at[:, 4].add(-strength * delta_time)
    return up_to(count, pulled, particles)


def drag(
    particles: jax.Array,
    coefficient: jax.Array,
    delta_time: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """Slows down, in proportion to the velocity."""
    slowed = particles.at[:, VELOCITY].multiply(jnp.exp(-coefficient * delta_time))
    return up_to(count, slowed, particles)


def integrate(
    particles: jax.Array, delta_time: jax.Array, count: jax.Array
) -> jax.Array:
    """Moves on and grows older."""
    moved = particles.at[:, POSITION].add(particles[:, VELOCITY] * delta_time)
    return up_to(count, moved.at[:, AGE].add(delta_time), particles)


def up_to(count: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """New rows for the particles that there are; the kernels touch no others."""
    return jnp.where(jnp.arange(len(old))[:, None] < count, new, old)


# ---- the graphs ----------------------------------------------------------------------


def sphere_emitter(capacity: int) -> Graph:
    """Config float32[8], Last float32[n, 8] to Particles float32[capacity, 8].

    Count says how many of the last frame's rows are particles. Rate new ones have the
    numbers from First on.
    """
    builder = BlockBuilder("SphereEmitter")
    node = builder.add_kernel(
        kernels.from_cuda(SOURCE, "emit"),
        block=THREADS,
        grid=lambda config, last: -(-len(last) // THREADS),
        scalars={"capacity": capacity},
        fallback=emit,
    )
    builder.input("Config", node.in_("config"), "float32[8]")
    builder.input("Last", node.in_("last"), ROWS)
    pins = node.out("particles"), node.out("counter")
    builder.append_output("Particles", *pins, capacity, "float32[8]")
    for name in ("Count", "Rate", "First", "Seed", "Lifetime"):
        builder.input_scalar(name, node.in_(name.lower()))
    return builder.commit()


def update(
    name: str, entry: str, fallback: Callable[..., Any], scalars: dict[str, str]
) -> Graph:
    """Particles float32[n, 8], updated in place by a kernel, as many as Count says.

    scalars: the kernel's parameters, by the names that they get.
    """
    builder = BlockBuilder(name)
    node = builder.add_kernel(
        kernels.from_cuda(SOURCE, entry),
        block=THREADS,
        grid=lambda particles: -(-len(particles) // THREADS),
        fallback=fallback,
    )
    builder.input("Particles", node.in_("particles"), ROWS)
    builder.output("Particles", node.out("particles"), ROWS)
    for own, parameter in scalars.items():
        builder.input_scalar(own, node.in_(parameter))
    return builder.commit()


def particle_system(capacity: int = CAPACITY) -> Graph:
    """One frame: EmitterConfig float32[8], Last float32[n, 8] to Particles.

    Particles float32[capacity, 8], zeros behind Particles Count, int32.
    """
    step = {"DeltaTime": "delta_time", "Count": "count"}
    force = {"Strength": "strength", **step}
    slowing = {"Coefficient": "coefficient", **step}
    builder = BlockBuilder("ParticleSystem")
    emitter = builder.add_child(sphere_emitter(capacity))
    pull = builder.add_child(update("GravityForce", "gravity", gravity, force))
    slow = builder.add_child(update("DragForce", "drag", drag, slowing))
    move = builder.add_child(update("Integrate", "integrate", integrate, step))

    builder.connect_children(emitter, "Particles", pull, "Particles")
    builder.connect_children(pull, "Particles", slow, "Particles")
    builder.connect_children(slow, "Particles", move, "Particles")
    for child in (pull, slow, move):
        builder.connect_children(emitter, "Particles Count", child, "Count")
        builder.expose_parameter("DeltaTime", child, "DeltaTime", DELTA_TIME)

    builder.expose_input("EmitterConfig", emitter, "Config")
    builder.expose_input("Last", emitter, "Last")
    defaults = {"Count": 0, "Rate": RATE, "First": 0, "Seed": 0, "Lifetime": LIFETIME}
    for name, default in defaults.items():
        builder.expose_parameter(name, emitter, name, default)
    builder.expose_parameter("Gravity", pull, "Strength", 9.81)
    builder.expose_parameter("DragCoeff", slow, "Coefficient", DRAG)

    builder.expose_output("Particles", move, "Particles")
    for beside in ("Particles Count", "Particles Overflowed"):
        builder.expose_output(beside, emitter, beside)
    return builder.commit()


# ---- running it ----------------------------------------------------------------------


@partial(jax.jit, static_argnums=0)
def animate(
    graph: Graph, pulls: jax.Array, drag: jax.Array, rate: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """All frames, one for each gravity in `pulls`, float32[frames].

    Returns:
        The particles after each, float32[frames, n, 8], and how many there are, int32.
    """

    def frame(last: tuple, now: tuple) -> tuple[tuple, tuple]:
        (rows, count), (number, pull) = last, now
        made = graph(
            CONFIG,
            rows,
            Count=count,
            Rate=rate,
            First=number * rate,
            Gravity=pull,
            DragCoeff=drag,
        )
        kept = made["Particles"], made["Particles Count"]
        return kept, kept

    nobody = jnp.zeros((CAPACITY, 8)), jnp.int32(0)
    _, frames = jax.lax.scan(frame, nobody, (jnp.arange(len(pulls)), pulls))
    return frames


def play(block: EngineBlock, pulls: np.ndarray) -> tuple[np.ndarray, int]:
    """The same, frame by frame: the last particles, float32[n, 8], how many there are.

    Count is an array that is on the device, and stays there.
    """
    last, count = jnp.zeros((CAPACITY, 8)), jnp.int32(0)
    for number, pull in enumerate(pulls.tolist()):
        block.set(Count=count, First=number * RATE, Gravity=pull)
        made = block(CONFIG, last)
        last, count = made["Particles"], made["Particles Count"]
    return np.asarray(last), int(count)


# ---- whether it is right -------------------------------------------------------------


def require(condition: bool, message: str) -> None:
    """Leave with exit code 1 and a message unless the condition holds."""
    if not condition:
        raise SystemExit(f"particles failed: {message}")


def in_order(rows: np.ndarray, count: int) -> np.ndarray:
    """The particles by their numbers: a GPU appends them in any order."""
    rows = np.asarray(rows)[:count]
    return rows[np.argsort(rows[:, NUMBER])]


def newborn() -> np.ndarray:
    """The start of every particle that is ever born, in their order, float64[n, 8]."""
    numbers = np.arange(FRAMES * RATE, dtype=np.uint32)
    return np.asarray(born(CONFIG, 0, numbers), np.float64)


def reference(pulls: np.ndarray) -> np.ndarray:
    """Who is alive after all frames, float64[n, 8].

    Everybody ever born moves until the end; those who came last are alive.
    """
    rows = newborn()
    for number, pull in enumerate(pulls.tolist()):
        here = rows[: (number + 1) * RATE]
        here[:, 4] -= pull * DELTA_TIME
        here[:, VELOCITY] *= np.exp(-DRAG * DELTA_TIME)
        here[:, POSITION] += here[:, VELOCITY] * DELTA_TIME
        here[:, AGE] += DELTA_TIME
    return rows[-LIFE_FRAMES * RATE :]


def closed_form(start: np.ndarray, pull: float, time: float) -> np.ndarray:
    """Where a particle is after a time, with gravity and drag: v' = -g - c v."""
    final = np.array([0, -pull / DRAG, 0])
    fading = (1 - np.exp(-DRAG * time)) / DRAG
    return start[POSITION] + final * time + (start[VELOCITY] - final) * fading


def check_animation(graph: Graph, pulls: np.ndarray) -> np.ndarray:
    """One jit: counts are exact, particles those of float64; returns the last ones."""
    rows, counts = animate(graph, pulls, jnp.float32(DRAG), jnp.int32(RATE))
    wanted = np.minimum(np.arange(1, FRAMES + 1), LIFE_FRAMES) * RATE
    require(np.array_equal(counts, wanted), f"the counts are {np.asarray(counts)}")
    rows = np.asarray(rows[-1])
    require(not rows[wanted[-1] :].any(), "there is something behind the last particle")
    last = in_order(rows, wanted[-1])
    far = np.abs(last - reference(pulls)).max()
    require(far < 1e-4, f"a particle is {far:.2g} from where float64 has it")
    print(
        f"one jit: {FRAMES} frames, {wanted[-1]:,} particles alive, {CAPACITY:,} at "
        f"most; each within {far:.1g} of float64"
    )
    return last


def check_engine(graph: Graph, pulls: np.ndarray, animated: np.ndarray) -> None:
    """Frame by frame: the same. A shorter DeltaTime comes nearer to the closed form."""
    with Engine() as engine:
        block = engine.register(graph)
        last = in_order(*play(block, pulls))
        alike = np.array_equal(last[:, NUMBER], animated[:, NUMBER])
        require(alike, "other particles are alive than in one jit")
        far = np.abs(last - animated).max()
        require(far < 1e-4, f"the engine's particles are {far:.2g} from the jit's")
        state = block.debug_info
        require(state.append_counts == {"Particles": len(last)}, f"it says {state}")
        print(
            f"engine:  {engine.launches} frames, {engine.cold_rebuilds} compilation, "
            f"{engine.hot_updates} new values; the same particles within {far:.1g}; "
            f"{state.state.value}"
        )
        away = []
        for steps in (64, 128):
            block.set(DeltaTime=1 / steps)
            rows, count = play(block, np.full(steps, 9.81))
            one = in_order(rows, count)[0]  # number 0, which is a second old
            wanted = closed_form(newborn()[0], 9.81, 1.0)
            away.append(float(np.linalg.norm(one[POSITION] - wanted)))
        first, second = away
        require(1.9 < first / second < 2.1, f"errors of a second's path are {away}")
        require(engine.cold_rebuilds == 1, "a new value compiled the graph again")
        print(
            f"physics: after a second at DeltaTime 1/64 a particle is {first:.3f} m "
            f"from the closed form, at 1/128 {second:.3f} m; nothing compiled again"
        )


def draw(graph: Graph) -> str:
    """The picture: fewer particles, in three worlds."""
    panels = []
    for pull, drag_coeff in WORLDS:
        pulls = np.full(FRAMES, pull, np.float32)
        frames = animate(graph, pulls, jnp.float32(drag_coeff), jnp.int32(DRAWN_RATE))
        rows, counts = map(np.asarray, frames)
        title = f"Gravity {pull:g}, DragCoeff {drag_coeff:g}"
        ours = lives(rows, counts, DRAWN_RATE, LIFE_FRAMES, (0, 3, NUMBER))
        panels.append(Panel(title.replace("-", "−"), ours))
    return picture(panels, DRAWN_RATE, LIFETIME)


def main() -> None:
    """Run; the exit code is 1 if a particle is missing, or is where it should not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, help="an animated .svg to write")
    options = parser.parse_args()
    print(f"running on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    graph = particle_system()
    require(graph == particle_system(), "the graph is another one when built again")
    print(f"graph:   {' → '.join(node.name for node in graph.nodes)}")
    swinging = 9.81 * np.cos(np.arange(FRAMES, dtype=np.float32) / 20)
    check_engine(graph, swinging, check_animation(graph, swinging))
    if options.picture is not None:
        options.picture.write_text(draw(graph), encoding="utf-8")
        print(f"wrote {options.picture}")


if __name__ == "__main__":
    main()
