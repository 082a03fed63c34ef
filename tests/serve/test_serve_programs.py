"""A step is one program, and so are several where everybody decodes."""

from __future__ import annotations

import collections
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama_engines import Greedy, ask, check_books, prompts
from llama_files import TinyModel
from serve.engine import Engine
from serve.interface import Request
from serve.models import LoadedModel
from serve.step import step

pytestmark = pytest.mark.usefixtures("exact_products")


def dispatched(engine: Engine) -> list[list[int]]:
    """How many steps each sequence has in each program that is called from now on."""
    calls: list[list[int]] = []
    dispatch = engine._runner.dispatch

    def noted(parts: list[Any]) -> Any:
        calls.append([part.steps for part in parts])
        return dispatch(parts)

    engine._runner.dispatch = noted  # type: ignore[method-assign]
    return calls


def test_programs_of_several_steps_are_called_where_all_decode(
    tiny: tuple[TinyModel, LoadedModel], greedy: Greedy
) -> None:
    """A prompt is read alone, nobody has a step too many, and who comes gets in."""
    given = {"num_blocks": 64, "block_size": 8, "max_tokens": 128, "max_batch": 2}
    engine = Engine(tiny[1], decode_steps=4, **given)
    calls = dispatched(engine)
    first, second, third = prompts()[:3]
    long, short = ask(engine, first, 12), ask(engine, second, 6)
    engine.step()
    engine.step()
    assert calls == [[1, 1], [4, 4]]
    late = ask(engine, third, 2)  # waits: there are two places
    engine.run()
    for prompt, stream, count in (
        (first, long, 12),
        (second, short, 6),
        (third, late, 2),
    ):
        greedy.check(prompt, stream, count)
    # One token from the prompts, then 4, 1 for the shorter; the third one reads alone.
    assert calls[2] == [4, 1]
    assert sum(call[0] for call in calls if len(call) == 2) >= 9
    assert [1, 1] in calls[3:]
    assert engine.stats()["steps"] == sum(max(call) for call in calls)
    check_books(engine)
    engine.stop()


@pytest.mark.parametrize("steps", [1, 4])
def test_tokens_are_copied_to_the_host_before_they_are_read(
    steps: int,
    tiny: tuple[TinyModel, LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy begins with its step, not when the host wants the tokens."""
    engine = Engine(tiny[1], num_blocks=64, block_size=8, decode_steps=steps)
    asked: list[jax.Array] = []
    array = type(jnp.zeros(1))
    copy = array.copy_to_host_async

    def noted(self: jax.Array) -> None:
        asked.append(self)
        copy(self)

    monkeypatch.setattr(array, "copy_to_host_async", noted)
    stream = ask(engine, prompts()[1], 9)
    while stream.finish_reason is None:
        engine.step()
        for flight in engine._flights:
            assert any(flight.tokens is tokens for tokens in asked)
    assert len(asked) >= 1 + 8 // steps
    engine.stop()


def test_a_text_ends_within_a_program(
    tiny: tuple[TinyModel, LoadedModel], greedy: Greedy
) -> None:
    prompt = prompts()[1]
    tokens = greedy.after(prompt, 9)
    at = next(i for i in range(3, 9) if tokens[i] not in tokens[:i])
    engine = Engine(tiny[1], num_blocks=64, block_size=8, decode_steps=8)
    request = Request(prompt=prompt, max_new_tokens=40, stop_tokens=(tokens[at],))
    beside = ask(engine, prompts()[5], 30)
    stream = engine.submit(request)
    engine.run()
    events = list(stream)
    assert [e.token_id for e in events if e.token_id is not None] == tokens[: at + 1]
    assert events[-1].finish_reason == "stop"
    greedy.check(prompts()[5], beside, 30)
    check_books(engine)
    engine.stop()


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_step_is_one_program(
    drafts: int, tiny: tuple[TinyModel, LoadedModel], tmp_path: Path
) -> None:
    """Beside it one that puts what it is given in its place, and no operation alone."""
    engine = Engine(tiny[1], num_blocks=64, max_batch=4, draft_tokens=drafts)
    engine.compile()
    for i in range(3):
        ask(engine, [5, 6, 7] * 4, 40, temperature=0.5 * i, seed=i)
    for _ in range(3):
        engine.step()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(4):
            engine.step()
    (found,) = tmp_path.glob("**/*.xplane.pb")
    called = collections.Counter(
        event.name
        for plane in jax.profiler.ProfileData.from_file(str(found)).planes
        for line in plane.lines
        for event in line.events
        if event.name.startswith("PjitFunction(")
    )
    assert set(called) == {"PjitFunction(program)", "PjitFunction(_moved_to)"}
    assert len(set(called.values())) == 1, called
    engine.run()
    engine.stop()


def test_a_program_of_several_steps_takes_the_memory_of_one(
    tiny: tuple[TinyModel, LoadedModel],
) -> None:
    """The pool that its loop carries is the one that was given."""
    model = tiny[1]
    engine = Engine(model, num_blocks=4096, block_size=16, max_batch=4, decode_steps=4)
    pool, runner = engine._manager.pool, engine._runner
    assert pool.data.nbytes > 1 << 24

    def memory(steps: int) -> Any:
        fit = (s for s in runner._shapes if s.steps == steps and s.rows == s.places)
        shape = next(fit)
        program = functools.partial(step, config=model.config, shape=shape)
        buffer = np.zeros(shape.size, np.int32)
        last = np.zeros(shape.most_outputs, np.int32)
        lowered = jax.jit(program, donate_argnums=0).lower(
            pool, model.params, last, buffer
        )
        return lowered.compile().memory_analysis()

    one, several = memory(1), memory(4)
    assert several.alias_size_in_bytes >= pool.data.nbytes
    more = several.temp_size_in_bytes - one.temp_size_in_bytes
    assert more < pool.data.nbytes / 8
    engine.stop()
