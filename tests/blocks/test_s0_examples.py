"""The examples of "Block and Layer Interfaces", against plain NumPy.

Each runs with NumPy, PyTorch and, on a GPU, CuPy as the library that takes the blocks.
NumPy takes the object where the others take its capsule, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvblock as kv

NUM_LAYERS, PAGE_SIZE, INNER = 4, 16, 64


@dataclasses.dataclass(frozen=True)
class Library:
    """What the examples need of an array library."""

    take: Callable[[Any], Any]
    softmax: Callable[[Any], Any]
    relu: Callable[[Any], Any]
    stack: Callable[[list[Any]], Any]
    to_numpy: Callable[[Any], np.ndarray]
    device: str


def plain_softmax(x: Any, xp: Any = np) -> Any:
    e = xp.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def plain_relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def use_numpy() -> Library:
    return Library(np.from_dlpack, plain_softmax, plain_relu, np.stack, np.array, "cpu")


def use_torch() -> Library:
    import torch

    return Library(
        lambda part: torch.from_dlpack(part.__dlpack__()),
        lambda x: torch.softmax(x, dim=-1),
        torch.relu,
        torch.stack,
        lambda x: x.cpu().numpy(),
        jax.default_backend() if torch.cuda.is_available() else "cpu",
    )


def use_cupy() -> Library:
    cupy = pytest.importorskip("cupy")
    return Library(
        cupy.from_dlpack,
        lambda x: plain_softmax(x, cupy),
        lambda x: cupy.maximum(x, 0),
        cupy.stack,
        cupy.asnumpy,
        "gpu",
    )


LIBRARIES = [
    pytest.param(use_numpy, id="numpy"),
    pytest.param(use_torch, id="torch", marks=pytest.mark.torch),
    pytest.param(use_cupy, id="cupy", marks=pytest.mark.gpu),
]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    return request.param()


@pytest.fixture
def manager(library: Library) -> kv.BlockManager:
    return kv.BlockManager(
        num_layers=NUM_LAYERS,
        page_size=PAGE_SIZE,
        inner_dim=INNER,
        num_blocks=4,
        dtype=jnp.float32,
        device=jax.devices(library.device)[0],
    )


@pytest.fixture
def blocks(manager: kv.BlockManager) -> kv.BlockList:
    return manager.allocate_blocks(4)


@pytest.fixture
def values(blocks: kv.BlockList, rng: np.random.Generator) -> np.ndarray:
    """The contents of the blocks."""
    drawn = rng.normal(size=(4, *blocks[0].shape)).astype(np.float32)
    for block, value in zip(blocks, drawn, strict=True):
        block.copy_from(value)
    return drawn


def agree(got: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_whole_block(
    library: Library, blocks: kv.BlockList, values: np.ndarray
) -> None:
    tensor = library.take(blocks[1])
    assert tuple(tensor.shape) == blocks[1].shape == (NUM_LAYERS, 2, PAGE_SIZE, INNER)
    np.testing.assert_array_equal(library.to_numpy(tensor), values[1])
    kind, index = blocks[1].__dlpack_device__()
    assert (kind, index) == (1 if library.device == "cpu" else 2, blocks[1].device_id)


def test_layer_statistics(
    library: Library, blocks: kv.BlockList, values: np.ndarray
) -> None:
    tensor = library.take(blocks[0][0])
    assert str(tensor.dtype).endswith("float32")
    expected = values[0, 0]
    agree(float(tensor.mean()), expected.mean())
    agree(float(tensor.max()), expected.max())
    agree(float(tensor.min()), expected.min())
    spread = (tensor - tensor.mean()) ** 2
    agree(float(spread.mean()), expected.var())
    array = library.to_numpy(tensor)
    quarters = np.percentile(array, [25, 50, 75])
    agree(quarters, np.percentile(expected, [25, 50, 75]))


def process_block_layers(library: Library, block: kv.Block) -> list[Any]:
    results = []
    for layer_idx in range(len(block)):
        tensor = library.take(block[layer_idx])
        results.append(library.softmax(tensor))
    return results


def test_processing_several_blocks(
    library: Library, blocks: kv.BlockList, values: np.ndarray
) -> None:
    results = []
    for block in blocks:
        results.extend(process_block_layers(library, block))
    assert len(results) == 4 * NUM_LAYERS
    expected = plain_softmax(values.reshape(-1, *values.shape[2:]))
    agree([library.to_numpy(result) for result in results], expected)


def test_processing_in_chunks(
    library: Library,
    manager: kv.BlockManager,
    blocks: kv.BlockList,
    values: np.ndarray,
) -> None:
    chunk_size = 5  # does not divide the tokens
    for block, value in zip(blocks, values, strict=True):
        for layer, expected in zip(block, value, strict=True):
            tensor = library.take(layer)
            pieces = [
                library.to_numpy(library.softmax(tensor[:, i : i + chunk_size]))
                for i in range(0, tensor.shape[1], chunk_size)
            ]
            agree(np.concatenate(pieces, axis=1), plain_softmax(expected))
            del tensor  # frees the export
            assert manager.live_exports == []


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    num_layers: int


class LayerProcessor:
    def __init__(self, model_config: ModelConfig, library: Library) -> None:
        self.model_config = model_config
        self.library = library

    def process_layer(self, layer: kv.Layer, layer_idx: int) -> Any:
        """Attention in the early layers, feedforward in the later ones."""
        tensor = self.library.take(layer)
        if layer_idx < self.model_config.num_layers // 2:
            return self.library.softmax(tensor)
        return self.library.relu(tensor)


def test_layer_processor(
    library: Library, blocks: kv.BlockList, values: np.ndarray
) -> None:
    processor = LayerProcessor(ModelConfig(NUM_LAYERS), library)
    for block, value in zip(blocks, values, strict=True):
        for layer_idx, layer in enumerate(block):
            result = processor.process_layer(layer, layer_idx)
            plain = plain_softmax if layer_idx < NUM_LAYERS // 2 else plain_relu
            agree(library.to_numpy(result), plain(value[layer_idx]))


def test_batches_of_layers(
    library: Library, blocks: kv.BlockList, values: np.ndarray
) -> None:
    all_layers = [layer for block in blocks for layer in block]
    batch_size, results = 3, []
    for i in range(0, len(all_layers), batch_size):
        tensors = [library.take(layer) for layer in all_layers[i : i + batch_size]]
        results.extend(library.softmax(library.stack(tensors)))
    expected = plain_softmax(values.reshape(-1, *values.shape[2:]))
    assert len(results) == len(expected)
    agree([library.to_numpy(result) for result in results], expected)


def test_block_access_errors(blocks: kv.BlockList) -> None:
    with pytest.raises(IndexError, match="100 is out of range"):
        blocks[0][100]
    with pytest.raises(IndexError, match="100 is out of range"):
        blocks[100]


def test_dlpack_errors(
    library: Library,
    manager: kv.BlockManager,
    blocks: kv.BlockList,
    values: np.ndarray,
) -> None:
    layer = blocks[2][1]
    with pytest.raises(BufferError, match="only its own device"):
        layer.__dlpack__(dl_device=(7, 0))
    agree(np.asarray(layer), values[2, 1])  # "fallback to other methods"
    manager.free(blocks[2])
    with pytest.raises(BufferError, match="freed"):
        library.take(layer)


def test_memory_errors(manager: kv.BlockManager, blocks: kv.BlockList) -> None:
    with pytest.raises(MemoryError, match="free some"):
        manager.allocate_blocks(1)
    manager.free(blocks[0])
    assert len(manager.allocate_blocks(1)) == 1


def process_block(library: Library, block: kv.Block) -> list[Any]:
    return [library.softmax(library.take(layer)) for layer in block]


def get_layer_info(layer: kv.Layer) -> tuple[tuple[int, ...], np.dtype]:
    return layer.shape, layer.dtype


def test_type_hints(library: Library, blocks: kv.BlockList, values: np.ndarray) -> None:
    results = process_block(library, blocks[3])
    agree(library.to_numpy(results[2]), plain_softmax(values[3, 2]))
    assert get_layer_info(blocks[0][0]) == ((2, PAGE_SIZE, INNER), np.float32)


# ---- the same in JAX -----------------------------------------------------------------


@pytest.fixture
def jax_blocks(rng: np.random.Generator) -> tuple[kv.BlockList, np.ndarray]:
    manager = kv.BlockManager(
        NUM_LAYERS, PAGE_SIZE, INNER, num_blocks=4, dtype=jnp.float32
    )
    blocks = manager.allocate_blocks(4)
    values = rng.normal(size=(4, *blocks[0].shape)).astype(np.float32)
    for block, value in zip(blocks, values, strict=True):
        block.copy_from(value)
    return blocks, values


def test_jax_takes_blocks_and_layers(
    jax_blocks: tuple[kv.BlockList, np.ndarray],
) -> None:
    blocks, values = jax_blocks
    agree(jax.nn.softmax(jnp.asarray(blocks[1][0])), plain_softmax(values[1, 0]))
    by_layer = jax.vmap(jax.nn.softmax)(jnp.asarray(blocks[2]))
    agree(by_layer, plain_softmax(values[2]))


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_jax_processes_in_batches(
    jax_blocks: tuple[kv.BlockList, np.ndarray], batch_size: int
) -> None:
    blocks, values = jax_blocks
    manager = blocks[0].manager

    @jax.jit
    def process(pool: kv.KVPool, ids: jax.Array) -> jax.Array:
        def one(block_id: jax.Array) -> jax.Array:
            block = kv.gather_blocks(pool, block_id[None], "operational")[0]
            return jax.nn.relu(block)

        return jax.lax.map(one, ids, batch_size=batch_size)

    got = process(manager.pool, blocks.ids)
    agree(got, plain_relu(values).reshape(4, NUM_LAYERS, 2, -1))
