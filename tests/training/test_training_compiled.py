"""Products are tensor cores' of 8 bits in what NVIDIA GPUs run, all three of a layer.

They are compiled for one by a CUDA plugin of JAX, where no GPU is, and on a GPU
for it.
"""

from __future__ import annotations

import gpu_products
import jax
import jax.numpy as jnp
import pytest
from cuda_plugin import needs_plugin, run
from messages import check

from jax_kvblock.core import ffi
from jax_kvblock.training import count_products


@needs_plugin
def test_without_a_gpu():
    printed = run(gpu_products.__file__, *gpu_products.CASES)
    want = list(map(gpu_products.wanted, gpu_products.CASES))
    want += [f"{name}: laid otherwise 0" for name in gpu_products.BOTH_ORDERS]
    want += [f"{name}: rounded True" for name in gpu_products.ONE_ROW]
    want += [f"{name}: weights {n}" for name, (_, n) in gpu_products.MODELS.items()]
    for name in gpu_products.AS_JIT_IS:
        want.append(f"{name}, as jit is: {gpu_products.CASES[name][1]} 0")
    assert printed.splitlines() == want


def compiled_here(name, **options):
    if name == gpu_products.NORM_KERNEL and (9, 0) not in ffi.gpu_capabilities():
        pytest.skip("the kernel of norms runs on GPUs of compute capability 9.0")
    return gpu_products.compile_for(jax.devices()[0], name, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpu_products.CASES)
def test_on_a_gpu(name):
    compiled = compiled_here(name)
    assert gpu_products.line_of(name, compiled) == gpu_products.wanted(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpu_products.AS_JIT_IS)
def test_on_a_gpu_as_jit_is(name):
    """XLA's own kernels of 8 bits may take part, too; nothing is multiplied wider."""
    count = count_products(compiled_here(name, of_library=False))
    assert count == (gpu_products.CASES[name][1], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpu_products.BOTH_ORDERS)
def test_nothing_of_8_bits_is_transposed_on_a_gpu(name):
    assert gpu_products.laid_otherwise(compiled_here(name)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpu_products.ONE_ROW)
def test_one_row_is_rounded_on_a_gpu(name):
    """XLA multiplies it number by number, and would leave out what rounds."""
    compiled = gpu_products.compile_for(jax.devices()[0], name)
    assert gpu_products.are_rounded(name, compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpu_products.MODELS)
def test_weights_of_models_in_the_trainer_on_a_gpu(name):
    assert count_products(compiled_here(name)).narrow == gpu_products.MODELS[name][1]


LIBRARY = """
HloModule a, is_scheduled=true

%fused (p: f8e4m3fn[8,8], q: f8e5m2[8,8]) -> f32[8,8] {
  %p = f8e4m3fn[8,8]{1,0} parameter(0)
  %q.1 = f8e5m2[8,8]{1,0} parameter(1)
  ROOT %dot.2 = f32[8,8]{1,0} dot(%p, %q.1), lhs_contracting_dims={1}
}

%mixed (p: f8e4m3fn[8,8], q: bf16[8,8]) -> f32[8,8] {
  %p = f8e4m3fn[8,8]{1,0} parameter(0)
  %q.1 = bf16[8,8]{1,0} parameter(1)
  ROOT %dot.2 = f32[8,8]{1,0} dot(%p, %q.1), lhs_contracting_dims={1}
}

ENTRY %main (p: f8e4m3fn[8,8], q: f8e5m2[8,8]) -> f32[8,8] {
  %p = f8e4m3fn[8,8]{1,0} parameter(0)
  %a = f32[8,8]{1,0} custom-call(%p), custom_call_target="__cublas$lt$matmul$f8"
  %b = f32[8,8]{1,0} custom-call(%p), custom_call_target="__cublas$lt$matmul"
  %c = f32[8,8]{1,0} custom-call(%p), custom_call_target="__cublas$gemm"
  ROOT %d = f32[8,8]{1,0} custom-call(%p), custom_call_target="kvblock_attention"
}
"""


def test_products_are_counted_by_what_they_read():
    assert count_products(LIBRARY) == (2, 3)


def test_what_is_not_compiled_is_refused():
    f = jax.jit(lambda x: x @ x)
    for kind, given in {
        "PjitFunction": f,
        "Lowered": f.lower(jnp.ones((4, 4))),
        "str": f.lower(jnp.ones((4, 4))).as_text(),
        "NoneType": None,
    }.items():
        refused = lambda given=given: count_products(given)  # noqa: E731
        words = f"a compiled program|got {kind}|.compile()"
        check("count_products", TypeError, words, refused)


@pytest.mark.cpu
@pytest.mark.parametrize("name", gpu_products.MODELS)
def test_codes_of_models_in_the_trainer(name):
    """Each product has two operands of 8 bits; none is left out."""
    make, n = gpu_products.MODELS[name]
    f, shapes = make()
    text = jax.jit(f).lower(*shapes).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert sum(line.count("xf8E") == 2 for line in products) == n


@pytest.mark.cpu
def test_on_a_cpu_all_are_wide():
    make, n = gpu_products.CASES["delayed"]
    f, shapes = make()
    assert count_products(jax.jit(f).lower(*shapes).compile()) == (0, n)
