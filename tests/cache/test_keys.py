"""Keys: BLAKE3 as others compute it, chained, the same in every process."""

from __future__ import annotations

import subprocess
import sys

import blake3
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvblock import BlockSpec, _native
from jax_kvblock.cache import Namespace

SPEC = BlockSpec(2, 2, 16, 4, 8, jnp.bfloat16)
NAMESPACE = Namespace("a model", SPEC)
# Around a block of the hash, a chunk, and trees of two, three, four and more chunks.
SIZES = [
    *range(0, 131),
    *(n * 1024 + d for n in (1, 2, 3, 4, 5, 7, 8, 16) for d in (-1, 0, 1)),
]


@pytest.mark.parametrize("keyed", [False, True])
def test_the_hash_is_blake3(keyed: bool, rng: np.random.Generator) -> None:
    for size in SIZES:
        data, key = rng.bytes(size), rng.bytes(32) if keyed else None
        assert _native.blake3(data, key) == blake3.blake3(data, key=key).digest(), size


@pytest.mark.parametrize("size", [0, 31, 33])
def test_keys_of_hashes_are_of_32_bytes(size: int) -> None:
    with pytest.raises(ValueError, match=f"key must be of 32 bytes, got {size}"):
        _native.blake3(b"", bytes(size))


def test_a_chain_as_the_document_describes_it(rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 50_000, 16 * 5 + 3).astype(np.int32)
    line = "jax_kvblock keys 1\nbfloat16 2 2 16 4 8\na model"
    digest = blake3.blake3(line.encode()).digest()
    assert NAMESPACE.digest == digest
    message = (
        (7).to_bytes(8, "little") + b"=french" + (3).to_bytes(8, "little") + b"abc"
    )
    key = blake3.blake3(message, key=digest).digest()
    assert NAMESPACE.root("french", "abc") == key
    wanted = []
    for block in range(5):
        message = tokens[16 * block : 16 * block + 16].astype("<i4").tobytes()
        key = blake3.blake3(message, key=key).digest()
        wanted.append(key)
    assert NAMESPACE.keys(tokens, adapter="french", salt="abc") == wanted


def test_what_keys_depend_on() -> None:
    tokens = range(16)
    names = [
        NAMESPACE,
        Namespace("another", SPEC),
        Namespace("a model", SPEC.replace(dtype=jnp.float16)),
        Namespace("a model", SPEC.replace(num_layers=3)),
        Namespace("a model", SPEC.replace(head_dim=16)),
        Namespace("a model", SPEC, num_kv_heads=8),
    ]
    keys = {name.keys(tokens)[0] for name in names}
    roots = [{}, {"adapter": ""}, {"adapter": "x"}, {"salt": "x"}, {"salt": "=x"}]
    keys |= {NAMESPACE.keys(tokens, **root)[0] for root in roots}
    assert len(keys) == len(names) + len(roots) - 1


def test_what_they_do_not_depend_on() -> None:
    tokens = range(16)
    key = NAMESPACE.keys(tokens)
    universal = Namespace("a model", SPEC.replace(layout="universal"))
    shard = Namespace("a model", SPEC.replace(num_kv_heads=1), num_kv_heads=4)
    assert universal.keys(tokens) == key and shard.keys(tokens) == key
    assert NAMESPACE.keys(tokens, salt="x") == NAMESPACE.keys(tokens, salt=b"x")


def test_a_shards_heads_name_what_it_alone_keeps() -> None:
    spec = SPEC.replace(num_kv_heads=2)
    shard = Namespace("a model", spec, num_kv_heads=8)
    named = [shard.of_heads(range(first, first + 2)) for first in range(7)]
    assert len({shard.digest, *named}) == 8 and {len(name) for name in named} == {32}
    other = Namespace("another", spec, num_kv_heads=8)
    assert other.of_heads(range(2)) != named[0]
    assert shard.is_shard and not NAMESPACE.is_shard
    assert not Namespace("a model", SPEC, num_kv_heads=4).is_shard


@pytest.mark.parametrize(
    "heads", [range(3), range(7, 9), range(-1, 1), range(0, 4, 2), range(0)], ids=str
)
def test_heads_that_are_no_shards(heads: range) -> None:
    shard = Namespace("a model", SPEC.replace(num_kv_heads=2), num_kv_heads=8)
    with pytest.raises(ValueError, match="heads must be 2 in a row of 8, got range"):
        shard.of_heads(heads)
    with pytest.raises(TypeError, match="heads must be a range, got 2; range"):
        shard.of_heads(2)  # type: ignore[arg-type]


def test_another_process_finds_the_same() -> None:
    program = (
        "import jax.numpy as jnp\n"
        "from jax_kvblock import BlockSpec\n"
        "from jax_kvblock.cache import Namespace\n"
        "spec = BlockSpec(2, 2, 16, 4, 8, jnp.bfloat16)\n"
        "print(Namespace('a model', spec).keys(range(40))[-1].hex())"
    )
    run = [sys.executable, "-P", "-c", program]
    said = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert said.strip() == NAMESPACE.keys(range(40))[-1].hex()


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        iter([1, 2, 3]),
        np.array([1, 2, 3], np.uint8),
        np.array([1, 0, 2, 0, 3], np.int32)[::2],
        jnp.array([1, 2, 3]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_tokens_of_any_kind(tokens: object) -> None:
    small = Namespace("a model", SPEC.replace(block_size=3))
    assert small.keys(tokens) == small.keys(np.array([1, 2, 3], np.int32))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [
        ("abc", TypeError, "tokens must be integers, got str"),
        ([1.5], TypeError, "tokens must be integers, got an array of float64"),
        ([True], TypeError, "tokens must be integers, got an array of bool"),
        ([[1, 2]], ValueError, r"one sequence, got shape \(1, 2\)"),
        ([[1], [2, 3]], ValueError, "got sequences of several lengths; open a table"),
        ([2**31], ValueError, "must fit 32 bits"),
        ([-(2**31) - 1], ValueError, "must fit 32 bits"),
    ],
)
def test_what_are_no_tokens(tokens: object, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        NAMESPACE.keys(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((3, SPEC), TypeError, "model must be a str, got 3"),
        (("", SPEC), ValueError, "model must not be empty"),
        (("\ud800", SPEC), ValueError, "Namespace: model must be text that UTF-8 has"),
        (("x", 3), TypeError, "spec must be a BlockSpec, got 3"),
        (("x", SPEC, 6), ValueError, "multiple of the 4 of spec, got 6"),
        (("x", SPEC, 0), ValueError, "multiple of the 4 of spec, got 0"),
        (("x", SPEC, 4.5), TypeError, "num_kv_heads must be an integer"),
    ],
)
def test_what_is_no_namespace(arguments: tuple, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        Namespace(*arguments)


def test_what_is_no_adapter_and_no_salt() -> None:
    with pytest.raises(TypeError, match="adapter must be a str or None, got 3"):
        NAMESPACE.root(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="salt must be a str or bytes, got 3"):
        NAMESPACE.root(salt=3)  # type: ignore[arg-type]
    for given in ({"adapter": "\ud800"}, {"salt": "\ud800"}):
        with pytest.raises(
            ValueError, match=r"must be text that .*, got '\\ud800' with"
        ):
            NAMESPACE.root(**given)
