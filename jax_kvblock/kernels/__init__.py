"""CUDA kernels of one's own in a jit."""

from jax_kvblock.kernels.kernel import Kernel, from_cubin, from_cuda, from_ptx
from jax_kvblock.kernels.kernel_call import Appended, kernel_call
from jax_kvblock.kernels.ptx import Parameter
from jax_kvblock.kernels.tensor_map import TensorMap

__all__ = [
    "Appended",
    "Kernel",
    "Parameter",
    "TensorMap",
    "from_cubin",
    "from_cuda",
    "from_ptx",
    "kernel_call",
]
