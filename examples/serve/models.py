"""A model to serve: `load_model` reads one, `random_model` makes a tiny one."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from smollm2 import tiny

from serve import config, interface, weights
from serve.chat import check_messages
from serve.config import Config, UnknownModelError
from serve.hub_tokenizer import of_folder
from serve.safetensors_folder import SafetensorsFolder
from serve.weights import Params, load_params

DTYPES = ("float32", "bfloat16")
SLICE = 1 << 20  # numbers that are looked at together


@dataclass(frozen=True)
class LoadedModel:
    """What an engine runs.

    Attributes:
        name: for people.
        config: what shapes it.
        params: as `load_params` returns them.
        tokenizer: its own.
        dtype: of its weights, and of keys and values.
    """

    name: str
    config: Config
    params: Params
    tokenizer: interface.Tokenizer
    dtype: Any

    @property
    def max_tokens(self) -> int:
        return self.config.max_tokens

    @cached_property
    def revision(self) -> str:
        """Of shape and of every weight: another model has another one.

        Blocks are kept by it, whatever the model's name.
        """
        digest = hashlib.blake2b(repr(self.config).encode(), digest_size=16)
        paths, _ = jax.tree_util.tree_flatten_with_path(self.params)
        for path, x in paths:
            digest.update(f"{path} {x.shape} {x.dtype}".encode())
            digest.update(np.asarray(_checksums(x)).tobytes())
        return digest.hexdigest()


@partial(jax.jit, static_argnames="most")
def _checksums(x: jax.Array, most: int = SLICE) -> jax.Array:
    """uint32 `[2]`, of all bits and where they are; where the array lies.

    Each number is mixed with its place, as MurmurHash3 ends, and all are summed: the
    same on every device, in whatever order, and for slices of any size (`most`), which
    bound the memory that it takes. Nobody is kept from making two alike.
    """
    flat, size = x.reshape(-1), min(most, x.size)
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize]

    def mixed(y: jax.Array) -> jax.Array:
        y = (y ^ (y >> 16)) * np.uint32(0x85EBCA6B)
        y = (y ^ (y >> 13)) * np.uint32(0xC2B2AE35)
        return y ^ (y >> 16)

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        # The last slice begins earlier, with numbers that were summed before.
        begin = jnp.minimum(i * np.uint32(most), np.uint32(x.size - size))
        # Else XLA widens or copies all of them before the loop.
        whole, begin = jax.lax.optimization_barrier((flat, begin))
        part = jax.lax.dynamic_slice_in_dim(whole, begin, size).view(unsigned)
        place = begin + jax.lax.iota(np.uint32, size)
        new = place >= i * np.uint32(most)
        once = mixed(part.astype(np.uint32) + mixed(place))
        twice = mixed(once ^ np.uint32(0x9E3779B9))
        return sums + jnp.stack([y.sum(where=new) for y in (once, twice)])

    slices = np.uint32(-(-x.size // most))
    return jax.lax.fori_loop(np.uint32(0), slices, add, jnp.zeros(2, np.uint32))


def load_model(path: str | Path | None = None, dtype: str = "float32") -> LoadedModel:
    """Read a model of the Llama family.

    Args:
        path: a GGUF file, or a folder with `config.json`, `*.safetensors` and
            `tokenizer.json`; None for SmolLM2-135M-Instruct, which is downloaded once
            (93 MB).
        dtype: "float32", or "bfloat16", which is faster where several rows are
            computed at once.

    Raises:
        FileNotFoundError: if something is missing.
        UnknownModelError: for another kind of model; it says what is not served.
        ModuleNotFoundError: where a package is not installed; it says which.

    Example:
        >>> model = load_model("models/TinyLlama-1.1B.Q8_0.gguf")
    """
    if dtype not in DTYPES:
        raise ValueError(f"load_model: dtype must be one of {DTYPES}, got {dtype!r}")
    given = None if path is None else Path(path)
    if given is not None and not given.exists():
        raise FileNotFoundError(f"load_model: {given} is missing")
    try:
        if given is not None and given.is_dir():
            return _of_folder(given, dtype)
        return _of_gguf(given, dtype)
    except UnknownModelError as error:
        raise UnknownModelError(f"load_model: {given or 'SmolLM2'}: {error}") from None


def _of_folder(path: Path, dtype: str) -> LoadedModel:
    source = SafetensorsFolder(path)
    shape = source.config()
    tokenizer = of_folder(path, source.given)
    name = path.resolve().name
    return _loaded(name, source, shape, tokenizer, dtype)


def _of_gguf(path: Path | None, dtype: str) -> LoadedModel:
    for package in ("gguf", "tokenizers"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(
                f"{package} reads models in GGUF files; pip install {package}"
            )
    from smollm2.weights import fetch

    from serve import gguf_tokenizer
    from serve.gguf_file import GGUFFile, open_gguf

    file = path or fetch()
    source = GGUFFile(open_gguf(file))
    tokenizer = gguf_tokenizer.of_gguf(source.field)
    return _loaded(file.stem, source, source.config(), tokenizer, dtype)


def _loaded(
    name: str,
    source: weights.Source,
    shape: Config,
    tokenizer: interface.Tokenizer,
    dtype: str,
) -> LoadedModel:
    params = load_params(source, shape, dtype)
    return LoadedModel(name, shape, params, tokenizer, jnp.dtype(dtype))


# ---- a model that needs no file ------------------------------------------------------


class ByteTokenizer:
    """A token is a byte; the last one ends a text."""

    vocab_size = tiny.VOCABULARY
    end_tokens = frozenset({tiny.VOCABULARY - 1})

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of bytes."""
        kept = bytes(i for i in ids if i not in self.end_tokens)
        return kept.decode(errors="replace")

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A line for each turn, and the beginning of the answer's.

        Raises:
            ValueError: for messages that are wrong.
        """
        turns = check_messages(messages)
        lines = [f"{turn['role']}: {turn['content']}\n" for turn in turns]
        return self.encode("".join(lines) + "assistant: ")


def random_model(seed: int = 0, max_tokens: int = 2048) -> LoadedModel:
    """A tiny model with random weights, in float32: nothing to download."""
    given, of = tiny.random_params(seed), tiny.CONFIG
    layers = [
        {
            **{name: x[i] for name, x in given["layers"].items() if x.ndim == 2},
            **{name: given["layers"][name][i] for name in weights.ALONE},
            **{
                name: jnp.concatenate([given["layers"][part][i] for part in parts])
                for name, parts in weights.TOGETHER.items()
            },
        }
        for i in range(of.num_layers)
    ]
    shape = Config(
        num_layers=of.num_layers,
        width=of.width,
        num_heads=of.num_heads,
        num_kv_heads=of.num_kv_heads,
        head_dim=of.head_dim,
        vocab_size=tiny.VOCABULARY,
        norm_eps=of.norm_eps,
        inv_freq=config.frequencies(of.rope_base, of.head_dim),
        interleaved=True,
        max_tokens=max_tokens,
    )
    params = {**given, "layers": layers}
    dtype = np.dtype(np.float32)
    return LoadedModel(f"random-{seed}", shape, params, ByteTokenizer(), dtype)
