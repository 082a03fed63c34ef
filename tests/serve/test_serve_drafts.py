"""Trees of drafts, where they come from, and which of their rows are right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import llama_files  # noqa: F401  where `serve` is
import numpy as np
import pytest
from serve.drafts import LONGEST_PAUSE, Draft, PromptLookup
from serve.step import accept, move

from jax_kvblock import BlockSpec, KVPool


def test_what_followed_the_same_tokens_comes_again() -> None:
    text = [5, 1, 2, 3, 4, 9, 8, 1, 2, 3]
    assert PromptLookup(text).propose(4) == Draft((4, 9, 8, 1), (0, 1, 2, 3))
    assert PromptLookup(text).propose(2) == Draft((4, 9), (0, 1))
    assert PromptLookup(text).propose(0) is None
    assert PromptLookup([1, 2, 3, 4]).propose(4) is None
    assert PromptLookup([7]).propose(4) is None
    grown = PromptLookup(text[:6])
    assert grown.propose(4) is None
    grown.extend(text[6:])
    assert grown.propose(4) == Draft((4, 9, 8, 1), (0, 1, 2, 3))


def test_the_longest_same_tokens_count_and_the_newest_come_first() -> None:
    text = [1, 2, 7, 7, 5, 1, 2, 8, 0, 3, 1, 2]
    assert PromptLookup(text).propose(5) == Draft((8, 0, 3, 7, 7), (0, 1, 2, 0, 4))
    text = [9, 1, 2, 7, 7, 5, 1, 2, 8, 0, 3, 9, 1, 2]
    assert PromptLookup(text).propose(3) == Draft((7, 7, 5), (0, 1, 2))
    # Chains that begin alike share rows.
    text = [1, 2, 7, 6, 0, 1, 2, 7, 5, 3, 1, 2]
    assert PromptLookup(text).propose(4) == Draft((7, 5, 3, 6), (0, 1, 2, 1))


def test_drafts_pause_where_they_are_wrong() -> None:
    lookup = PromptLookup([1, 2, 3] * 4)
    pauses = []
    for _ in range(8):
        assert lookup.propose(3) is not None
        lookup.learn(0)
        pauses.append(0)
        while lookup._pause:
            assert lookup.propose(3) is None
            pauses[-1] += 1
    assert pauses == [1, 3, 7, 15, 31, *[LONGEST_PAUSE] * 3]
    assert lookup.propose(3) is not None
    lookup.learn(2)
    assert lookup.propose(3) is not None


TREE = Draft((10, 11, 12, 20, 21, 13), (0, 1, 2, 0, 4, 2))


def test_rows_see_their_ancestors() -> None:
    assert TREE.depths == [0, 1, 2, 3, 1, 2, 3]
    masks = [0b1, 0b11, 0b111, 0b1111, 0b10001, 0b110001, 0b1000111]
    assert TREE.masks == masks


@pytest.mark.parametrize(
    ("after", "tokens"),
    [
        ((0, 0, 0, 0, 0, 0, 0), [0]),
        ((10, 0, 12, 0, 0, 0, 0), [10, 0]),
        ((10, 11, 12, 5, 0, 0, 0), [10, 11, 12, 5]),
        ((10, 11, 13, 0, 0, 0, 7), [10, 11, 13, 7]),
        ((20, 11, 12, 13, 21, 9, 0), [20, 21, 9]),
    ],
)
def test_drafts_are_right_as_far_as_the_model_says_the_same(
    after: tuple[int, ...], tokens: list[int]
) -> None:
    assert TREE.accept(after) == tokens


def test_the_device_and_the_host_accept_the_same_rows(rng: np.random.Generator) -> None:
    accepted = jax.jit(accept, static_argnums=3)
    for _ in range(300):
        size = int(rng.integers(1, 8))
        draft = Draft(
            tuple(rng.integers(3, size=size).tolist()),
            tuple(int(rng.integers(row)) for row in range(1, size + 1)),
        )
        pairs = [*zip(draft.parents, draft.tokens, strict=True)]
        if len({*pairs}) < size:
            continue  # twins: a lookup makes none
        after = rng.integers(3, size=size + 1)
        tokens, behind, parents = np.full((3, 8), -1)
        tokens[: size + 1] = [0, *draft.tokens]
        behind[: size + 1] = after
        parents[: size + 1] = [-1, *draft.parents]
        found = np.asarray(accepted(tokens, behind, parents, 7))
        assert found[: size + 1].sum() == len(draft.accept(after.tolist()))


def test_slots_move_to_slots_and_nothing_else_changes(rng: np.random.Generator) -> None:
    spec = BlockSpec(3, 2, 4, 2, 8, "float32")
    data = rng.standard_normal((6, *spec.block_shape)).astype(np.float32)
    source, target = np.array([5, 6, 7, 9, 0]), np.array([4, 5, -1, 22, -1])
    moved = jax.jit(move)(KVPool.wrap(jnp.asarray(data), spec), source, target)
    wanted = data.copy()
    for old, new in zip(source, target, strict=True):
        if new >= 0:
            wanted[new // 4, :, :, new % 4] = data[old // 4, :, :, old % 4]
    assert np.asarray(moved.data).tobytes() == wanted.tobytes()
