"""Writing into the cache: rotary embeddings, norms, quantization and the append itself.

It imports `blocks` and `core`.
"""

from jax_kvblock.append.append import append_kv, rope_append
from jax_kvblock.append.scales import KVScales

__all__ = ["KVScales", "append_kv", "rope_append"]
