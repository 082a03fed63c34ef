"""A model in a folder: `config.json`, `*.safetensors`, `tokenizer.json`."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from serve import config
from serve.weights import Source

# Our name for a part of a layer -> its name in the files.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
OTHER_NAMES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
}
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Tensor(NamedTuple):
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # of its bytes in the file
    end: int


class SafetensorsFolder(Source):
    """A folder, whose files are mapped into memory when a tensor is read.

    Raises:
        FileNotFoundError: if `config.json` or the weights are missing.
        UnknownModelError: if a file is none of this kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.given = read_json(path / "config.json")
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{path} has no *.safetensors files")
        self.tensors = {name: t for file in files for name, t in _header(file)}

    def config(self) -> config.Config:
        return config.of_hub(self.given)

    def name_of(self, part: str, kind: str, layer: int | None = None) -> str:
        if layer is None:
            return f"{OTHER_NAMES[part]}.{kind}"
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"

    def names(self) -> Iterator[str]:
        # Old files have the frequencies, too, which the config tells.
        yield from (name for name in self.tensors if "rotary_emb" not in name)

    @property
    def tied(self) -> bool:
        return bool(self.given.get("tie_word_embeddings", False))

    def read(self, name: str) -> np.ndarray:
        """A tensor, as float32."""
        tensor = self.tensors[name]
        if tensor.dtype not in DTYPES:
            raise config.UnknownModelError(
                f"{tensor.file}: {name} must be one of {', '.join(DTYPES)}, got "
                f"{tensor.dtype}"
            )
        data = np.memmap(tensor.file, np.uint8, "r")[tensor.start : tensor.end]
        dtype = jnp.dtype(DTYPES[tensor.dtype])
        return data.view(dtype).reshape(tensor.shape).astype(np.float32)


def _header(file: Path) -> Iterator[tuple[str, _Tensor]]:
    """The format: 8 bytes with the length of the JSON that follows, then all data."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise config.UnknownModelError(f"{file} is no safetensors file, or cut off")
        try:
            header = json.loads(opened.read(length))
        except (ValueError, RecursionError):
            raise config.UnknownModelError(f"{file} is no safetensors file") from None
    if not isinstance(header, dict):
        raise config.UnknownModelError(f"{file} is no safetensors file")
    for name, about in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (first, last) = _described(file, name, about)
        start, end = 8 + length + first, 8 + length + last
        if end > size:
            raise config.UnknownModelError(f"{file} is cut off: {name} is missing")
        yield name, _Tensor(file, dtype, shape, start, end)


def _described(
    file: Path, name: str, about: Any
) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """What a header says of a tensor: its dtype, shape, and where its bytes are."""
    about = about if isinstance(about, dict) else {}
    dtype, shape, place = map(about.get, ("dtype", "shape", "data_offsets"))
    right = isinstance(dtype, str) and _are_counts(shape) and _are_counts(place)
    if right and len(place) == 2:
        held = place[1] - place[0]
        known = DTYPES.get(dtype)
        if held == (math.prod(shape) * jnp.dtype(known).itemsize if known else held):
            return dtype, tuple(shape), tuple(place)
    raise config.UnknownModelError(
        f"{file} is damaged: {name} must have a dtype, a shape, and data_offsets of as "
        f"many bytes, got {dtype!r}, {shape!r} and {place!r}"
    )


def _are_counts(given: Any) -> bool:
    """Whether it is a list of numbers from 0 on."""
    return isinstance(given, list) and all(type(x) is int and x >= 0 for x in given)


def read_json(path: Path) -> dict[str, Any]:
    """An object of a JSON file.

    Raises:
        FileNotFoundError: if there is none.
        UnknownModelError: if it holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise config.UnknownModelError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise config.UnknownModelError(f"{path} must hold an object")
    return found
