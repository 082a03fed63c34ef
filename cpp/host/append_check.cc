// What the append launcher checks before it launches.
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "host/message.h"
#include "kvblock/append.h"

namespace kvblock {
namespace {

int64_t BytesOf(int32_t dtype) {
  if (dtype == KVBLOCK_APPEND_F32) return 4;
  return dtype < KVBLOCK_APPEND_F32 ? 2 : 1;
}

bool IsOneOfEightBits(int32_t dtype) { return dtype >= KVBLOCK_APPEND_E4M3; }

// Whether an array of this shape has a size in bytes.
bool Addressable(std::initializer_list<int64_t> shape) {
  int64_t bytes = 4;  // no element is larger
  for (const int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return false;
  }
  return true;
}

std::string CheckSizes(const kvblock_append& a) {
  if (a.dtype < KVBLOCK_APPEND_BF16 || a.dtype > KVBLOCK_APPEND_F32) {
    return Got("dtype must be KVBLOCK_APPEND_BF16, F16 or F32", a.dtype);
  }
  if (a.cache_dtype != a.dtype &&
      (a.cache_dtype < KVBLOCK_APPEND_E4M3 || a.cache_dtype > KVBLOCK_APPEND_I8)) {
    return Got("cache_dtype must be dtype, or one of 8 bits", a.cache_dtype);
  }
  if (a.tokens < 0 || a.tokens > INT32_MAX) return Got("tokens must be 0 to 2^31 - 1", a.tokens);
  if (a.num_kv_heads < 1) return Got("num_kv_heads must be positive", a.num_kv_heads);
  if (a.num_heads < 0) return Got("num_heads must not be negative", a.num_heads);
  if (a.num_outer != 1 && a.num_outer != 2) return Got("num_outer must be 1 or 2", a.num_outer);
  if (a.head_dim < 1 || a.head_dim > KVBLOCK_APPEND_MAX_ROW / BytesOf(a.dtype)) {
    return Got("head_dim must be positive, and a row at most 2048 bytes", a.head_dim);
  }
  const int64_t rows = int64_t{a.num_heads} + int64_t{a.num_outer} * a.num_kv_heads;
  if (rows > 1 << 17) return Got("there must be at most 2^17 rows of heads to a token", rows);
  if (a.num_layers < 1 || a.num_layers > INT32_MAX) {
    return Got("num_layers must be 1 to 2^31 - 1", a.num_layers);
  }
  if (a.layers < 1 || a.layer < 0 || a.layer > a.num_layers - a.layers) {
    return "layer and layers must lie within num_layers = " + std::to_string(a.num_layers) +
           ", got " + std::to_string(a.layer) + " and " + std::to_string(a.layers);
  }
  if (a.layers > 1 && a.layer_at) return Got("layers must be 1 with layer_at", a.layers);
  if (a.layers > 1 && a.num_heads) return Got("layers must be 1 with q", a.layers);
  if (a.tokens > INT32_MAX / a.layers) return Got("tokens * layers must be below 2^31", a.tokens);
  if (a.num_blocks < 1 || a.block_size < 1 || a.num_blocks > INT32_MAX / a.block_size) {
    return "num_blocks * block_size must be 1 to 2^31 - 1, got " + std::to_string(a.num_blocks) +
           " * " + std::to_string(a.block_size);
  }
  if (a.q_token_stride != 0 && a.q_token_stride < int64_t{a.num_heads} * a.head_dim) {
    return Got("q_token_stride must be 0, or at least num_heads * head_dim", a.q_token_stride);
  }
  if (a.kv_token_stride != 0 && a.kv_token_stride < int64_t{a.num_kv_heads} * a.head_dim) {
    return Got("kv_token_stride must be 0, or at least num_kv_heads * head_dim", a.kv_token_stride);
  }
  if (!Addressable({a.tokens, a.q_token_stride}) ||
      !Addressable({a.layers, a.tokens, a.kv_token_stride})) {
    return "q_token_stride or kv_token_stride is too large to address";
  }
  return "";
}

// The last byte that the call can write lies inside of its buffer.
std::string CheckCache(const kvblock_append& a) {
  if (a.num_buffers < 1 || a.num_buffers > KVBLOCK_APPEND_MAX_BUFFERS) {
    return Got("num_buffers must be 1 to 256", a.num_buffers);
  }
  if (a.layer_table_stride != 0 && a.layer_table_stride != 1) {
    return Got("layer_table_stride must be 0 or 1", a.layer_table_stride);
  }
  if (a.layer_table_stride * (a.num_layers - 1) >= a.num_buffers) {
    return Got("num_buffers must be num_layers where each layer is a buffer", a.num_buffers);
  }
  const struct {
    const char* name;
    int64_t stride, count;
  } axes[] = {
      {"layer_stride", a.layer_stride, a.num_layers},
      {"block_stride", a.block_stride, a.num_blocks},
      {"outer_stride", a.outer_stride, a.num_outer},
      {"token_stride", a.token_stride, a.block_size},
      {"head_stride", a.head_stride, a.num_kv_heads},
      {"dim_stride", a.dim_stride, a.head_dim},
  };
  const int64_t size = BytesOf(a.cache_dtype);
  int64_t end = size;
  for (const auto& axis : axes) {
    int64_t reach;
    if (axis.stride < 0) return Got(std::string(axis.name) + " must not be negative", axis.stride);
    if (axis.stride % size != 0) {
      return Got(std::string(axis.name) + " must be a multiple of the element's size", axis.stride);
    }
    if (__builtin_mul_overflow(axis.stride, axis.count - 1, &reach) ||
        __builtin_add_overflow(end, reach, &end)) {
      return Got(std::string(axis.name) + " is too large to address", axis.stride);
    }
  }
  if (end > a.buffer_bytes) {
    return "the cache reaches " + std::to_string(end) + " bytes, past the end of a buffer of " +
           std::to_string(a.buffer_bytes);
  }
  if (a.buffers == nullptr) return "buffers is NULL";
  for (int64_t i = 0; i < a.num_buffers; ++i) {
    if (a.buffers[i] == nullptr) return Got("a buffer is NULL", i);
    if (Misaligned({a.buffers[i]}, size)) return Got("a buffer is not aligned to its elements", i);
  }
  return "";
}

std::string CheckScales(const kvblock_append& a) {
  const bool two = a.num_outer == 2;
  const bool given = a.k_scale || a.v_scale, computed = a.k_scales || a.v_scales;
  if (!IsOneOfEightBits(a.cache_dtype)) {
    return given || computed ? "scales are for caches of 8 bits" : "";
  }
  if (given == computed) return "a cache of 8 bits has k_scale, or k_scales, and one of both";
  if (given && (!a.k_scale || two != (a.v_scale != nullptr))) {
    return "k_scale and v_scale go with k and v";
  }
  if (computed && (!a.k_scales || two != (a.v_scales != nullptr))) {
    return "k_scales and v_scales go with k and v";
  }
  if (given && a.k_scale_heads != 1 && a.k_scale_heads != a.num_kv_heads) {
    return Got("k_scale_heads must be 1 or num_kv_heads", a.k_scale_heads);
  }
  if (a.v_scale && a.v_scale_heads != 1 && a.v_scale_heads != a.num_kv_heads) {
    return Got("v_scale_heads must be 1 or num_kv_heads", a.v_scale_heads);
  }
  if (!computed) return "";
  if (a.scale_layers != a.num_layers && (a.scale_layers != 1 || a.layers != 1)) {
    return Got("scale_layers must be num_layers, or 1 where one layer is written", a.scale_layers);
  }
  if (!Addressable({a.scale_layers, a.num_blocks, a.block_size, a.num_kv_heads})) {
    return "k_scales is too large to address";
  }
  return "";
}

std::string CheckRotation(const kvblock_append& a) {
  if (a.rotary_dim < 0 || a.rotary_dim % 2 != 0 || a.rotary_dim > a.head_dim) {
    return Got("rotary_dim must be even, and 0 to head_dim", a.rotary_dim);
  }
  if (a.rotary_dim > 0 && (a.inv_freq != nullptr) == (a.cos_sin != nullptr)) {
    return "rotary_dim goes with inv_freq or cos_sin, and with one of both";
  }
  if (a.rotary_dim > 0 && a.cos_sin != nullptr) {
    if (a.cos_sin_rows < (a.positions ? 1 : a.tokens)) {
      return Got("cos_sin_rows must be positive, and tokens without positions", a.cos_sin_rows);
    }
    if (!Addressable({a.cos_sin_rows, a.rotary_dim})) return "cos_sin is too large to address";
  }
  if (!std::isfinite(a.norm_eps) || a.norm_eps < 0) return "norm_eps must not be negative";
  const auto norm = [&](const void* weights, int32_t dtype) {
    return !weights || dtype == a.dtype || dtype == KVBLOCK_APPEND_F32;
  };
  if (!norm(a.q_norm, a.q_norm_dtype) || !norm(a.k_norm, a.k_norm_dtype)) {
    return "q_norm_dtype and k_norm_dtype must be dtype or KVBLOCK_APPEND_F32";
  }
  return "";
}

// Arrays without elements may have no address.
std::string CheckOperands(const kvblock_append& a) {
  if (a.tokens == 0) return "";
  if (a.num_heads && !a.q) return "q is NULL";
  if (a.num_heads && !a.q_out) return "q_out is NULL";
  if (!a.k) return "k is NULL";
  if (a.num_outer == 2 && !a.v) return "v is NULL";
  if (!a.slots) return "slots is NULL";
  if (a.rotary_dim && a.inv_freq && !a.positions) return "positions is NULL";
  if (Misaligned({a.q, a.k, a.v, a.q_out}, BytesOf(a.dtype)) ||
      Misaligned({a.q_norm}, BytesOf(a.q_norm_dtype)) ||
      Misaligned({a.k_norm}, BytesOf(a.k_norm_dtype)) ||
      Misaligned({a.slots, a.positions, a.layer_at, a.inv_freq, a.cos_sin}, 4) ||
      Misaligned({a.k_scale, a.v_scale, a.k_scales, a.v_scales}, 4)) {
    return "arrays must be aligned to their elements";
  }
  return "";
}

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_append_check(const kvblock_append* a) {
  using namespace kvblock;
  if (a == nullptr) return Message("append: the struct is NULL");
  std::string error = CheckSizes(*a);
  if (error.empty()) error = CheckCache(*a);
  if (error.empty()) error = CheckScales(*a);
  if (error.empty()) error = CheckRotation(*a);
  if (error.empty()) error = CheckOperands(*a);
  return error.empty() ? nullptr : Message("append: " + error);
}
