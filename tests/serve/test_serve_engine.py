"""Greedy tokens are those of float64 over the whole text, whatever the engine does."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama_engines import (
    BEGINNING,
    VOCABULARY,
    Greedy,
    Guesses,
    ask,
    check_books,
    prompts,
)
from llama_files import TinyModel
from serve import engine as engine_module
from serve.engine import Engine
from serve.models import SLICE, LoadedModel, _checksums, load_model, random_model
from tier_stores import MemoryStore

from jax_kvblock.cache.copy_lines import CopyError

pytestmark = pytest.mark.usefixtures("exact_products")

# One thing at a time, then all at once. `small`: too few blocks for those that run.
SMALL = {"num_blocks": 16, "max_tokens": 100, "max_batch": 4}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one at a time, in chunks": {"max_batch": 1, "max_tokens_per_step": 8},
    "drafts": {"draft_tokens": 5},
    "several steps at once": {"decode_steps": 4},
    "several steps, few blocks": {**SMALL, "decode_steps": 7, "host_bytes": 1 << 22},
    "small": SMALL,
    "tiers": {**SMALL, "host_bytes": 1 << 22},
    "little room below": {**SMALL, "host_bytes": 1 << 14},
    "a store": {**SMALL, "host_bytes": 1 << 14, "store": MemoryStore},
    "all": {
        **SMALL,
        "host_bytes": 1 << 22,
        "draft_tokens": 5,
        "max_tokens_per_step": 32,
    },
}
# What CI asks each time: trees of drafts, several steps, a store, all at once.
OFTEN = ("drafts", "several steps, few blocks", "a store", "all")
HAPPENED = {
    "drafts": ("drafted_tokens", "accepted_tokens"),
    "several steps, few blocks": ("preemptions", "offloaded_preemptions"),
    "small": ("preemptions",),
    "tiers": ("preemptions", "offloaded_preemptions"),
    "a store": ("preemptions", "offloaded_preemptions"),
    "all": (
        *("preemptions", "offloaded_preemptions", "accepted_tokens", "cached_tokens"),
    ),
}


def places(engine: Engine) -> list[int]:
    """Where all lies that a program is given in each step, but for the weights."""
    runner = engine._runner
    given = [engine._manager.pool.data, runner._last, *runner._buffers.values()]
    return [array.unsafe_buffer_pointer() for array in given]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.often if name in OFTEN else ())
        for name in ENGINES
    ],
)
def test_greedy_tokens_are_those_of_the_dense_model(
    name: str,
    tiny: tuple[TinyModel, LoadedModel],
    greedy: Greedy,
    lowered: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine says what the dense model says, twice, and keeps its books."""
    given = {"num_blocks": 64, "block_size": 8, "max_tokens": 128, **ENGINES[name]}
    texts = list(zip(prompts(), [*[30] * 7, 36], strict=True))
    guesses = Guesses([prompt + greedy.after(prompt, n) for prompt, n in texts])
    monkeypatch.setattr(engine_module, "PromptLookup", guesses)
    if "store" in given:
        given["store"] = store = given["store"]()
    engine = Engine(tiny[1], **given)
    engine.compile()
    programs, where = engine.stats()["programs"], places(engine)
    for turn in range(2):  # the second one finds what the first has left
        lowered.clear()
        # The last one ends alone, so that steps of one row are among the others.
        asked = [(prompt, n, ask(engine, prompt, n)) for prompt, n in texts]
        engine.run()
        for prompt, count, stream in asked:
            greedy.check(prompt, stream, count)
        check_books(engine)
        if "host_bytes" not in given:  # whose copies are programs of their own
            assert not lowered
        assert engine.stats()["cached_tokens"] > 0 or turn == 0
    stats = engine.stats()
    most = 4 if engine._scheduler.steps == 1 else 6
    most *= 1 if jax.default_backend() == "cpu" else 2  # greedy ones, too
    assert stats["programs"] == programs <= most
    assert places(engine) == where
    for count in HAPPENED.get(name, ()):
        assert stats[count] > 0, count  # type: ignore[literal-required]
    if "store" in given:  # the host has no room for all that comes back
        assert store.blocks and engine.tiers.stats()["store"]["blocks_out"] > 0
    if "draft_tokens" in given:  # some were accepted that have to be moved
        assert any(rows != [*range(1, len(rows) + 1)] for rows in guesses.accepted)
    assert stats["new_tokens"] == 2 * (7 * 30 + 36)
    engine.stop()


def test_what_was_read_is_on_disk_at_the_next_start(
    tmp_path: Path, tiny: tuple[TinyModel, LoadedModel], greedy: Greedy
) -> None:
    pytest.importorskip("lmdb")
    pytest.importorskip("xxhash")
    given = {"num_blocks": 32, "block_size": 8, "max_tokens": 128}
    given |= {"host_bytes": 1 << 22, "disk": tmp_path, "disk_bytes": 4 << 20}
    prompt = prompts()[5]
    found = []
    for _ in range(2):
        engine = Engine(tiny[1], **given)
        stream = ask(engine, prompt, 20)
        engine.run()
        greedy.check(prompt, stream, 20)
        found.append(stream.num_cached_tokens)
        check_books(engine)
        engine.stop()
    assert found == [0, len(prompt) // 8 * 8]
    with pytest.raises(ValueError, match="a disk lies below host memory"):
        Engine(tiny[1], **{**given, "host_bytes": 0})


def test_what_was_read_is_on_disk_before_the_engine_stops(
    tmp_path: Path, tiny: tuple[TinyModel, LoadedModel]
) -> None:
    """An idle server may be killed."""
    pytest.importorskip("lmdb")
    pytest.importorskip("xxhash")
    given = {"num_blocks": 32, "block_size": 8, "max_tokens": 128}
    given |= {"host_bytes": 1 << 22, "disk": tmp_path, "disk_bytes": 4 << 20}
    engine = Engine(tiny[1], **given)
    engine.start()
    prompt = prompts()[5]
    for _ in ask(engine, prompt, 20):
        pass
    wanted, until = (len(prompt) + 20 - 1) // 8, time.monotonic() + 60

    def kept() -> int:
        assert engine.tiers is not None
        return engine.tiers.stats()["store"]["blocks_in"]

    while kept() < wanted and time.monotonic() < until:
        time.sleep(0.01)
    assert kept() == wanted
    engine.stop()


def test_an_engine_stops_where_blocks_cannot_be_kept(
    tiny: tuple[TinyModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny[1], **SMALL, host_bytes=1 << 14, store=MemoryStore())
    ask(engine, prompts()[5], 4)
    engine.run()

    def broken() -> None:
        raise CopyError("no copy")

    monkeypatch.setattr(engine.tiers, "flush", broken)
    engine.stop()
    assert engine.stopped
    with pytest.raises(RuntimeError):  # its threads have ended
        engine.tiers.below.down.submit(print)


def test_a_model_of_the_same_name_finds_nothing_of_another(tmp_path: Path) -> None:
    for package in ("lmdb", "xxhash", "gguf", "tokenizers"):
        pytest.importorskip(package)
    given = {"num_blocks": 32, "block_size": 8, "max_tokens": 128}
    given |= {"host_bytes": 1 << 22, "disk": tmp_path / "kv", "disk_bytes": 4 << 20}
    prompt, found = prompts()[5], []
    for seed in (0, 1, 0):
        TinyModel.draw("llama", seed).write_gguf(tmp_path / "model.gguf")
        engine = Engine(load_model(tmp_path / "model.gguf"), **given)
        stream = ask(engine, prompt, 4)
        engine.run()
        engine.stop()
        found.append(stream.num_cached_tokens)
    assert found == [0, 0, len(prompt) // 8 * 8]


def test_a_models_revision_is_of_every_number() -> None:
    model, seen = random_model(max_tokens=128), set()
    rng = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(model.params)
    for place, x in enumerate(leaves):
        at = tuple(rng.integers(0, n) for n in x.shape)
        for changed in (x.at[at].add(1), jnp.flip(x, 0)):
            others = [*leaves[:place], changed, *leaves[place + 1 :]]
            other = dataclasses.replace(model, params=jax.tree.unflatten(tree, others))
            alike = np.array_equal(changed, x)
            assert (other.revision == model.revision) == alike
            seen.add(other.revision)
    assert len(seen) > len(leaves)
    again = dataclasses.replace(model, params=jax.tree.map(jnp.copy, model.params))
    assert again.revision == model.revision


def test_sums_of_weights_take_little_memory() -> None:
    """By slices, whose size changes no sum."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
        x = jnp.arange(-500, 501).astype(dtype).reshape(7, 143)
        sums = {tuple(_checksums(x, most).tolist()) for most in (64, 91, 1001, 4096)}
        assert len(sums) == 1 and 0 not in sums.pop()
    assert _checksums(jnp.zeros((0, 3))).tolist() == [0, 0]
    large = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    needed = _checksums.lower(large).compile().memory_analysis()
    assert needed.temp_size_in_bytes <= 12 * SLICE < large.size


OPTIONS = {
    "block_size": (4, 16),
    "max_batch": (1, 8),
    "max_tokens_per_step": (8, 64),
    "num_blocks": (0, 40),  # 0: as few as the longest needs
    "ahead": ((), (("draft_tokens", 7),), (("decode_steps", 5),)),
    "host_bytes": (0, 1 << 16, 1 << 22),
}
ALL = list(itertools.product(*OPTIONS.values()))
# Every fourteenth: so each two options meet with each two values.
CHOSEN = ALL[::14]


def _id(chosen: tuple[Any, ...]) -> str:
    """Of a test: its options' values."""
    named = (dict(each) if isinstance(each, tuple) else each for each in chosen)
    return "-".join(map(str, named))


def test_each_two_options_meet() -> None:
    def pairs(chosen: list[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
        return {
            pair
            for each in chosen
            for pair in itertools.combinations(enumerate(each), 2)
        }

    assert pairs(CHOSEN) == pairs(ALL)


@pytest.mark.parametrize("chosen", CHOSEN, ids=_id)
def test_greedy_tokens_with_all_options(
    chosen: tuple[Any, ...],
    tiny: tuple[TinyModel, LoadedModel],
    greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guesses = Guesses([prompt + greedy.after(prompt, 14) for prompt in prompts()])
    monkeypatch.setattr(engine_module, "PromptLookup", guesses)
    given = dict(zip(OPTIONS, chosen, strict=True))
    given |= given.pop("ahead")
    longest = -(-(61 + 14) // given["block_size"])
    given["num_blocks"] = max(given["num_blocks"], longest)
    engine = Engine(tiny[1], max_tokens=61 + 14, **given)
    random = np.random.default_rng(ALL.index(chosen))
    asked = []
    for prompt in [prompts()[i] for i in random.permutation(8)]:
        asked.append((prompt, ask(engine, prompt, most=14, priority=len(asked) % 2)))
        for _ in range(random.integers(4)):
            engine.step()
    engine.run()
    for prompt, stream in asked:
        greedy.check(prompt, stream, 14)
    check_books(engine)
    engine.stop()


def test_a_prompt_is_computed_once_for_all_who_begin_with_it(
    tiny: tuple[TinyModel, LoadedModel], greedy: Greedy
) -> None:
    """Also by those that come while the first one computes it: they wait for that."""
    engine = Engine(tiny[1], num_blocks=64, block_size=8, max_tokens=128)
    texts = [[*BEGINNING, i] for i in range(6)]
    asked = [ask(engine, text) for text in texts]
    engine.step()
    assert engine.stats()["running"] == 1
    engine.run()
    assert [stream.num_cached_tokens for stream in asked] == [0] + [40] * 5
    stats = engine.stats()
    assert stats["cached_tokens"] == 200 and stats["prompt_tokens"] == 6 * 41
    for text, stream in zip(texts, asked, strict=True):
        greedy.check(text, stream, 12)
    engine.stop()


def test_a_beginning_comes_back_from_host_memory(
    tiny: tuple[TinyModel, LoadedModel], greedy: Greedy
) -> None:
    engine = Engine(tiny[1], num_blocks=16, block_size=8, host_bytes=1 << 22)
    first = ask(engine, BEGINNING)
    engine.run()
    assert engine.tiers is not None
    engine.tiers.offload(engine.cache.namespace.keys(BEGINNING)).wait()
    engine.cache.clear()
    again = ask(engine, [*BEGINNING, 7])
    engine.run()
    assert first.num_cached_tokens == 0 and again.num_cached_tokens == 40
    greedy.check([*BEGINNING, 7], again, 12)
    check_books(engine)
    engine.stop()


def test_what_arrives_gets_a_row_beside_those_that_read(
    tiny: tuple[TinyModel, LoadedModel], greedy: Greedy
) -> None:
    """All but its last token comes from below, in a step whose rows others fill."""
    engine = Engine(
        tiny[1],
        num_blocks=64,
        block_size=8,
        max_batch=3,
        max_tokens=128,
        max_tokens_per_step=4,
        host_bytes=1 << 22,
    )
    assert engine.tiers is not None
    ask(engine, BEGINNING, 1)
    engine.run()
    engine.tiers.offload(engine.cache.namespace.keys(BEGINNING)).wait()
    engine.cache.clear()
    random = np.random.default_rng(6)
    texts = [random.integers(VOCABULARY, size=n).tolist() for n in (1, 60)]
    texts.append([*BEGINNING, 7])
    asked = [ask(engine, text, n) for text, n in zip(texts, (20, 2, 2), strict=True)]
    engine.run()
    assert asked[2].num_cached_tokens == 40
    for text, stream in zip(texts, asked, strict=True):
        greedy.check(text, stream, stream.request.max_new_tokens)
    check_books(engine)
    engine.stop()


def test_the_first_in_order_is_never_put_back(
    tiny: tuple[TinyModel, LoadedModel], greedy: Greedy
) -> None:
    """Priority first, then who came first: the others make way."""
    engine = Engine(tiny[1], num_blocks=14, block_size=8, max_batch=4, max_tokens=100)
    random = np.random.default_rng(5)
    texts = [random.integers(VOCABULARY, size=20).tolist() for _ in range(4)]
    asked = [
        ask(engine, text, most=40, priority=priority)
        for text, priority in zip(texts, (0, 0, 5, 0), strict=True)
    ]
    ended: list[int] = []
    while engine.step():
        for i, stream in enumerate(asked):
            if stream.finish_reason is not None and i not in ended:
                ended.append(i)
    assert ended[:2] == [2, 0] and set(ended) == {0, 1, 2, 3}
    assert engine.stats()["preemptions"] > 0
    for text, stream in zip(texts, asked, strict=True):
        greedy.check(text, stream, 40)
    engine.stop()


def test_who_comes_back_holds_up_nobody(
    tiny: tuple[TinyModel, LoadedModel],
    greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One made way, and its blocks are on their way back; another goes on meanwhile."""
    engine = Engine(
        tiny[1], num_blocks=22, block_size=8, max_batch=3, max_tokens=100,
        host_bytes=1 << 22,
    )  # fmt: skip
    assert engine.tiers is not None
    begun, gate = threading.Event(), threading.Event()
    bring = engine.tiers.below.bring

    def held(*given: Any) -> Any:
        begun.set()
        assert gate.wait(60)
        return bring(*given)

    monkeypatch.setattr(engine.tiers.below, "bring", held)
    random = np.random.default_rng(5)
    texts = [random.integers(VOCABULARY, size=20).tolist() for _ in range(3)]
    counts, priorities = (40, 40, 75), (5, 0, 3)
    asked = [
        ask(engine, text, most=most, priority=priority)
        for text, most, priority in zip(texts, counts, priorities, strict=True)
    ]
    _, parked, goes_on = asked
    while goes_on.finish_reason is None:
        engine.step()  # then nothing of who has made way is left on the device
        engine.tiers.make_room(engine.cache.manager.num_free_blocks)
    assert begun.is_set() and parked.finish_reason is None
    gate.set()
    engine.run()
    assert engine.stats()["offloaded_preemptions"] > 0
    for text, stream, most in zip(texts, asked, counts, strict=True):
        greedy.check(text, stream, most)
    check_books(engine)
    engine.stop()


def test_what_cannot_be_brought_back_is_computed_again(
    tiny: tuple[TinyModel, LoadedModel],
    greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy that fails is the trouble of one request, and not for long."""
    engine = Engine(
        tiny[1], num_blocks=22, block_size=8, max_batch=3, max_tokens=100,
        host_bytes=1 << 22,
    )  # fmt: skip
    assert engine.tiers is not None
    bring, failed = engine.tiers.below.bring, []

    def broken(*given: Any) -> Any:
        if not failed:
            failed.append(given)
            raise CopyError("no copy")
        return bring(*given)

    monkeypatch.setattr(engine.tiers.below, "bring", broken)
    random = np.random.default_rng(5)
    texts = [random.integers(VOCABULARY, size=20).tolist() for _ in range(3)]
    asked = [ask(engine, text, most=40) for text in texts]
    while engine.step():
        engine.tiers.make_room(engine.cache.manager.num_free_blocks)
    engine.run()
    assert failed and engine.stats()["failed"] == 0
    for text, stream in zip(texts, asked, strict=True):
        greedy.check(text, stream, 40)
    check_books(engine)
    engine.stop()
