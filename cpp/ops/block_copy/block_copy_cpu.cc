// block_copy on the CPU.
//
// A simplified copy is an odometer of outer dims over "planes" of the last two dims. Planes are
// grouped into chunks of about 256 KiB that the calling thread and any lent threads take from one
// counter, so the call never waits for a thread that has not started. Long aligned runs are written
// past the cache when the copy is larger than it: without that, every line written is first read.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "host/block_copy_check.h"
#include "kvblock/block_copy.h"

namespace kvblock {
namespace {

constexpr int64_t kChunkBytes = 256 << 10;
constexpr int64_t kStreamBytes = 8 << 20;  // beyond this the result will not stay in cache

// One plane: `rows` runs of `count` units, the addresses of one row after the other `step` apart.
struct Plane {
  int64_t rows, count;
  int64_t src_step, dst_step;      // between rows
  int64_t src_stride, dst_stride;  // between units
};

using CopyPlane = void (*)(const Plane&, const char* src, char* dst);

template <typename Unit>
void CopyUnits(const Plane& p, const char* src, char* dst) {
  for (int64_t r = 0; r < p.rows; ++r, src += p.src_step, dst += p.dst_step) {
    const char* s = src;
    char* d = dst;
    for (int64_t i = 0; i < p.count; ++i, s += p.src_stride, d += p.dst_stride) {
      std::memcpy(d, s, sizeof(Unit));
    }
  }
}

// Runs of a few bytes: a constant size lets the compiler use plain moves.
template <int kBytes>
void CopyShortRuns(const Plane& p, const char* src, char* dst) {
  for (int64_t r = 0; r < p.rows; ++r, src += p.src_step, dst += p.dst_step) {
    std::memcpy(dst, src, kBytes);
  }
}

template <int kUnitBytes>
void CopyRuns(const Plane& p, const char* src, char* dst) {
  const size_t bytes = static_cast<size_t>(p.count) * kUnitBytes;
  for (int64_t r = 0; r < p.rows; ++r, src += p.src_step, dst += p.dst_step) {
    std::memcpy(dst, src, bytes);
  }
}

#if defined(__SSE2__)
void StreamRuns(const Plane& p, const char* src, char* dst) {
  for (int64_t r = 0; r < p.rows; ++r, src += p.src_step, dst += p.dst_step) {
    const __m128i* s = reinterpret_cast<const __m128i*>(src);
    __m128i* d = reinterpret_cast<__m128i*>(dst);
    int64_t i = 0;
    for (; i + 4 <= p.count; i += 4) {
      const __m128i a = _mm_load_si128(s + i), b = _mm_load_si128(s + i + 1);
      const __m128i c = _mm_load_si128(s + i + 2), e = _mm_load_si128(s + i + 3);
      _mm_stream_si128(d + i, a);
      _mm_stream_si128(d + i + 1, b);
      _mm_stream_si128(d + i + 2, c);
      _mm_stream_si128(d + i + 3, e);
    }
    for (; i < p.count; ++i) _mm_stream_si128(d + i, _mm_load_si128(s + i));
  }
  _mm_sfence();
}
#endif

template <int... kSizes>
CopyPlane ShortRunCopier(int64_t bytes, std::integer_sequence<int, kSizes...>) {
  CopyPlane found = nullptr;
  (void)((bytes == kSizes + 1 && (found = &CopyShortRuns<kSizes + 1>)) || ...);
  return found;
}

CopyPlane ChooseCopier(const Plane& p, int64_t unit, int64_t total_bytes) {
  const bool run = p.src_stride == unit && p.dst_stride == unit;
  const int64_t bytes = p.count * unit;
  if (!run && p.count > 1) {
    switch (unit) {
      case 1: return &CopyUnits<uint8_t>;
      case 2: return &CopyUnits<uint16_t>;
      case 4: return &CopyUnits<uint32_t>;
      case 8: return &CopyUnits<uint64_t>;
      default: return &CopyUnits<unsigned char[16]>;
    }
  }
#if defined(__SSE2__)
  if (unit == 16 && bytes >= 64 && total_bytes >= kStreamBytes) return &StreamRuns;
#endif
  if (CopyPlane f = ShortRunCopier(bytes, std::make_integer_sequence<int, 64>())) return f;
  switch (unit) {
    case 1:
      return &CopyRuns<1>;
    case 2:
      return &CopyRuns<2>;
    case 4:
      return &CopyRuns<4>;
    case 8:
      return &CopyRuns<8>;
    default:
      return &CopyRuns<16>;
  }
}

void ZeroPlane(const Plane& p, int64_t unit, char* dst) {
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t i = 0; i < p.count; ++i) {
      std::memset(dst + r * p.dst_step + i * p.dst_stride, 0, unit);
    }
  }
}

// Where one side's current item and start lie, and whether they exist at all.
struct Place {
  int64_t offset = 0, table = 0;
  bool valid = true;
};

Place Locate(const kvblock_side& side, int64_t item) {
  Place place{side.offset, 0, true};
  if (side.ids != nullptr) {
    const int64_t id = side.ids[item];
    if (id < 0 || id >= side.id_limit) return {0, 0, false};
    place.offset +=
        (id / side.id_inner) * side.id_outer_stride + (id % side.id_inner) * side.id_inner_stride;
  }
  if (side.start != nullptr) {
    const int64_t start = *side.start;
    if (start < 0 || start >= side.start_limit) return {0, 0, false};
    place.offset += start * side.start_stride;
    place.table += start * side.start_table_stride;
  }
  return place;
}

class Job {
 public:
  explicit Job(const kvblock_copy& copy) : copy_(copy) {
    const int last = static_cast<int>(copy.rank) - 1;
    // The plane takes the second-last dim too, unless its rows lie in different buffers or ids are
    // looked up along it.
    const bool two = last >= 1 && copy.src.table_strides[last - 1] == 0 &&
                     copy.dst.table_strides[last - 1] == 0 &&
                     (last - 1 > 0 || (copy.src.ids == nullptr && copy.dst.ids == nullptr));
    const bool one = copy.src.table_strides[last] == 0 && copy.dst.table_strides[last] == 0 &&
                     (last > 0 || (copy.src.ids == nullptr && copy.dst.ids == nullptr));
    outer_ = !one ? last + 1 : two ? last - 1 : last;
    plane_.rows = one && two ? copy.dims[last - 1] : 1;
    plane_.count = one ? copy.dims[last] : 1;
    plane_.src_step = one && two ? copy.src.strides[last - 1] : 0;
    plane_.dst_step = one && two ? copy.dst.strides[last - 1] : 0;
    plane_.src_stride = one ? copy.src.strides[last] : copy.unit;
    plane_.dst_stride = one ? copy.dst.strides[last] : copy.unit;
    // A plane may be the whole copy: cut it, so that threads can share it.
    const int64_t row_bytes = plane_.count * copy.unit;
    rows_per_piece_ = std::clamp<int64_t>(kChunkBytes / std::max<int64_t>(row_bytes, 1), 1,
                                          std::max<int64_t>(plane_.rows, 1));
    const bool run = plane_.src_stride == copy.unit && plane_.dst_stride == copy.unit;
    if (run && plane_.rows == 1 && row_bytes > 2 * kChunkBytes) {  // one long run: make rows of it
      const int64_t per_row = kChunkBytes / copy.unit;
      tail_ = plane_.count % per_row;
      plane_.rows = plane_.count / per_row;
      plane_.count = per_row;
      plane_.src_step = plane_.dst_step = per_row * copy.unit;
      rows_per_piece_ = 1;
    }
    pieces_ = (plane_.rows + rows_per_piece_ - 1) / rows_per_piece_ + (tail_ > 0 ? 1 : 0);
    int64_t planes = 1;
    for (int k = 0; k < outer_; ++k) planes *= copy.dims[k];
    total_ = planes * pieces_;
    const int64_t piece_bytes = std::max<int64_t>(rows_per_piece_ * plane_.count * copy.unit, 1);
    per_chunk_ = std::max<int64_t>(1, kChunkBytes / piece_bytes);
    chunks_ = (total_ + per_chunk_ - 1) / per_chunk_;
    copier_ = ChooseCopier(plane_, copy.unit, NumCoordinates(copy) * copy.unit);
  }

  int64_t chunks() const { return chunks_; }
  bool Finished() const { return done_.load(std::memory_order_acquire) == chunks_; }

  void Work() {
    for (int64_t c; (c = next_.fetch_add(1, std::memory_order_relaxed)) < chunks_;) {
      RunChunk(c * per_chunk_, std::min((c + 1) * per_chunk_, total_));
      done_.fetch_add(1, std::memory_order_release);
    }
  }

 private:
  void RunChunk(int64_t begin, int64_t end) const {
    for (int64_t index = begin; index < end;) {
      const int64_t plane = index / pieces_;
      const int64_t stop = std::min((plane + 1) * pieces_, end);
      RunPieces(plane, index - plane * pieces_, stop - plane * pieces_);
      index = stop;
    }
  }

  void RunPieces(int64_t plane_index, int64_t first, int64_t last) const {
    int64_t coord[KVBLOCK_MAX_RANK] = {};
    for (int k = outer_ - 1; k >= 0; --k) {
      coord[k] = plane_index % copy_.dims[k];
      plane_index /= copy_.dims[k];
    }
    Place src = Locate(copy_.src, coord[0]), dst = Locate(copy_.dst, coord[0]);
    if (!dst.valid) return;
    for (int k = 0; k < outer_; ++k) {
      src.offset += coord[k] * copy_.src.strides[k];
      src.table += coord[k] * copy_.src.table_strides[k];
      dst.offset += coord[k] * copy_.dst.strides[k];
      dst.table += coord[k] * copy_.dst.table_strides[k];
    }
    Plane part = plane_;
    const int64_t row = first * rows_per_piece_;
    part.rows = std::min(last * rows_per_piece_, plane_.rows) - row;
    char* d = static_cast<char*>(copy_.dst.buffers[dst.table]) + dst.offset;
    const char* s = nullptr;
    if (src.valid) s = static_cast<const char*>(copy_.src.buffers[src.table]) + src.offset;
    if (part.rows > 0) Move(part, s, row, d);
    if (tail_ > 0 && last == pieces_) {
      part.rows = 1;
      part.count = tail_;
      Move(part, s, plane_.rows, d);
    }
  }

  void Move(const Plane& part, const char* s, int64_t row, char* d) const {
    d += row * part.dst_step;
    if (s == nullptr) {
      ZeroPlane(part, copy_.unit, d);
    } else {
      copier_(part, s + row * part.src_step, d);
    }
  }

  const kvblock_copy copy_;
  Plane plane_{};
  CopyPlane copier_ = nullptr;
  int outer_ = 0;                                       // dims that the odometer turns
  int64_t rows_per_piece_ = 1, tail_ = 0, pieces_ = 1;  // how a plane is cut
  int64_t total_ = 0, per_chunk_ = 1, chunks_ = 0;
  std::atomic<int64_t> next_{0}, done_{0};
};

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_copy_cpu(const kvblock_copy* copy, int64_t num_threads,
                                        kvblock_schedule schedule, void* context) {
  if (const char* error = kvblock_copy_check(copy)) return error;
  if (kvblock::NumCoordinates(*copy) == 0) return nullptr;
  auto job = std::make_shared<kvblock::Job>(kvblock::Simplify(*copy, 16));
  const int64_t helpers =
      schedule ? std::clamp<int64_t>(num_threads, 1, job->chunks()) - 1 : 0;
  using Held = std::shared_ptr<kvblock::Job>;  // keeps the job alive for a task that starts late
  for (int64_t i = 0; i < helpers; ++i) {
    schedule(
        context,
        [](void* data) {
          std::unique_ptr<Held> held(static_cast<Held*>(data));
          (*held)->Work();
        },
        new Held(job));
  }
  job->Work();
  while (!job->Finished()) std::this_thread::yield();
  return nullptr;
}
