#include "ops/block_copy/block_copy_cpu_box.h"

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define KVBLOCK_AVX 1
#define KVBLOCK_TARGET_AVX __attribute__((target("avx2")))
#endif

namespace kvblock {
namespace {

template <typename Run>
inline __attribute__((always_inline)) void ForEachRun(const Box& box, const char* src, char* dst,
                                                      Run run) {
  const BoxDim a = box.dims[0], b = box.dims[1], c = box.dims[2];
  for (int64_t i = 0; i < a.count; ++i, src += a.src, dst += a.dst) {
    const char* s1 = src;
    char* d1 = dst;
    for (int64_t j = 0; j < b.count; ++j, s1 += b.src, d1 += b.dst) {
      const char* s = s1;
      char* d = d1;
      for (int64_t k = 0; k < c.count; ++k, s += c.src, d += c.dst) run(s, d);
    }
  }
}

// A constant size lets the compiler use plain moves.
template <int kBytes>
void CopyShort(const Box& box, const char* src, char* dst) {
  ForEachRun(box, src, dst, [](const char* s, char* d) { std::memcpy(d, s, kBytes); });
}

void CopyLong(const Box& box, const char* src, char* dst) {
  const size_t bytes = static_cast<size_t>(box.bytes);
  ForEachRun(box, src, dst, [bytes](const char* s, char* d) { std::memcpy(d, s, bytes); });
}

#if defined(KVBLOCK_AVX)
// Runs of whole 64-byte lines. Not by ForEachRun: a lambda does not inherit the target.
template <bool kStream>
struct Lines {
  int64_t bytes;
  KVBLOCK_TARGET_AVX inline __attribute__((always_inline)) void operator()(const char* s,
                                                                           char* d) const {
    for (int64_t i = 0; i < bytes; i += 64) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + i));
      const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + i + 32));
      __m256i* to = reinterpret_cast<__m256i*>(d + i);
      if (kStream) {
        _mm256_stream_si256(to, x);
        _mm256_stream_si256(to + 1, y);
      } else {
        _mm256_storeu_si256(to, x);
        _mm256_storeu_si256(to + 1, y);
      }
    }
  }
};

template <bool kStream, int kBytes>
KVBLOCK_TARGET_AVX void CopyLines(const Box& box, const char* src, char* dst) {
  const Lines<kStream> run{kBytes ? kBytes : box.bytes};
  const BoxDim a = box.dims[0], b = box.dims[1], c = box.dims[2];
  for (int64_t i = 0; i < a.count; ++i, src += a.src, dst += a.dst) {
    const char* s1 = src;
    char* d1 = dst;
    for (int64_t j = 0; j < b.count; ++j, s1 += b.src, d1 += b.dst) {
      const char* s = s1;
      char* d = d1;
      for (int64_t k = 0; k < c.count; ++k, s += c.src, d += c.dst) run(s, d);
    }
  }
  if (kStream) _mm_sfence();
}
#endif

template <int... kSizes>
CopyBox ShortCopier(int64_t bytes, std::integer_sequence<int, kSizes...>) {
  CopyBox found = nullptr;
  (void)((bytes == kSizes + 1 && (found = &CopyShort<kSizes + 1>)) || ...);
  return found;
}

}  // namespace

CopyBox ChooseCopyBox(int64_t bytes, [[maybe_unused]] int64_t alignment,
                      [[maybe_unused]] bool stream) {
#if defined(KVBLOCK_AVX)
  // Whole lines past the cache: 28-48 GB/s for llama-8b on two Zen 3 cores, 20 by way of it.
  if (bytes % 64 == 0 && __builtin_cpu_supports("avx2")) {
    if (stream && alignment % 64 == 0) {
      switch (bytes) {
        case 128: return &CopyLines<true, 128>;
        case 256: return &CopyLines<true, 256>;
        default: return &CopyLines<true, 0>;
      }
    }
    switch (bytes) {
      case 128: return &CopyLines<false, 128>;
      case 256: return &CopyLines<false, 256>;
      default: return &CopyLines<false, 0>;
    }
  }
#endif
  if (CopyBox f = ShortCopier(bytes, std::make_integer_sequence<int, 64>())) return f;
  return &CopyLong;
}

void ZeroBox(const Box& box, char* dst) {
  const size_t bytes = static_cast<size_t>(box.bytes);
  ForEachRun(box, nullptr, dst, [bytes](const char*, char* d) { std::memset(d, 0, bytes); });
}

}  // namespace kvblock
