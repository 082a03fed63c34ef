"""A model in one GGUF file: its fields and tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from smollm2.weights import LAYER_WEIGHTS

from serve import config
from serve.weights import Source

# Our name for a part of a layer -> its name in the file.
LAYER_NAMES = {**LAYER_WEIGHTS, "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
OTHER_NAMES = {"embedding": "token_embd", "final_norm": "output_norm", "head": "output"}
_REQUIRED = object()


def open_gguf(path: Path) -> GGUFReader:
    """A file, open.

    Raises:
        UnknownModelError: if it is no GGUF file.
    """
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise config.UnknownModelError(
            f"{path} is no GGUF file, or damaged: {error}"
        ) from None


class GGUFFile(Source):
    """What an open file says of its model."""

    def __init__(self, reader: GGUFReader) -> None:
        self.reader = reader
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def field(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of a field; the default where the file has none."""
        found = self.reader.fields.get(name)
        if found is not None:
            return found.contents()
        if default is _REQUIRED:
            raise config.UnknownModelError(f"the field {name} is missing")
        return default

    def config(self) -> config.Config:
        divisors = None
        if "rope_freqs.weight" in self.tensors:
            divisors = self.read("rope_freqs.weight")
        return config.of_gguf(self.field, divisors)

    def name_of(self, part: str, kind: str, layer: int | None = None) -> str:
        if layer is None:
            return f"{OTHER_NAMES[part]}.{kind}"
        return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"

    def names(self) -> Iterator[str]:
        yield from (name for name in self.tensors if name != "rope_freqs.weight")

    def read(self, name: str) -> np.ndarray:
        """A tensor, dequantized to float32."""
        tensor = self.tensors[name]
        return dequantize(tensor.data, tensor.tensor_type)
