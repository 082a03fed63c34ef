"""Attention whose products are in 8 bits: quantization, and the call over it."""

from jax_kvblock.fp8.attention import fp8_attention
from jax_kvblock.fp8.config import FP8AttentionConfig
from jax_kvblock.fp8.quantize import QuantizedQKV, quantize_qkv

__all__ = ["FP8AttentionConfig", "QuantizedQKV", "fp8_attention", "quantize_qkv"]
