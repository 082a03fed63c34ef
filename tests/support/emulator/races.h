// What the emulator tells the race checker (races.cc): who does what to shared memory, and who
// waits for whom. Without KVBLOCK_CHECK_RACES nothing is told.
#pragma once

#include <cstdint>
#include <vector>

namespace emulator::races {

// What those who arrive at a barrier have done, and what they had done when the last phase ended.
struct Handover {
#if KVBLOCK_CHECK_RACES
  std::vector<uint32_t> told, known, told_fenced, known_fenced;
#endif
};

// What works for a thread, or products for a warp, while it goes on. It does so in groups, whose
// ends can be waited for.
enum class Engine { kCopies, kStores, kProducts };
enum class Access { kRead, kWrite, kAtomic, kBarrier };

// Something that an engine does.
struct Event {
  int agent = 0;
  uint32_t time = 0;
};

inline int running = -1;  // the thread whose accesses count

#if KVBLOCK_CHECK_RACES
#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread")))

void BeginCluster(int ctas, int threads);  // each
int EnterCta(int rank);                    // whose memory is used from now on; which it was

// The running thread, but with an event: arrives; has waited.
void Release(Handover& handover);
void Release(Handover& handover, Event event);
void Acquire(const Handover& handover);
void Complete(Handover& handover);  // all have arrived
void Fence();  // what the running thread knows of, bulk copies and products may read

// The running thread uses memory. It starts something that does, whose group ends, or of which so
// many groups may still be under way.
void Touch(Access access, const volatile void* at, int bytes);
void Start(Engine engine, Access access, const void* at, int bytes);
void Commit(Engine engine);
void Await(Engine engine, int pending);
Event Latest(Engine engine);

// All lanes of a warp start a product, together; true: this one says what it reads, by Start.
bool StartProduct();
// A copy whose end `barrier` counts.
Event StartBulkLoad(uint32_t barrier, const void* to, int bytes);
void StartRead(Event load, const void* from, int bytes);  // which reads shared memory, too
#else
#define EMULATOR_UNSEEN

inline void BeginCluster(int, int) {}
inline int EnterCta(int) { return 0; }
inline void Release(Handover&) {}
inline void Release(Handover&, Event) {}
inline void Acquire(const Handover&) {}
inline void Complete(Handover&) {}
inline void Fence() {}
inline void Touch(Access, const volatile void*, int) {}
inline void Start(Engine, Access, const void*, int) {}
inline void Commit(Engine) {}
inline void Await(Engine, int) {}
inline Event Latest(Engine) { return {}; }
inline bool StartProduct() { return false; }
inline Event StartBulkLoad(uint32_t, const void*, int) { return {}; }
inline void StartRead(Event, const void*, int) {}
#endif

// While one lives, accesses are the emulator's own, and do not count. The compiler does not see
// what it will call in front of accesses, and must not think that nobody asks in between.
class Unseen {
 public:
  Unseen() : before_(running) {
    running = -1;
    asm volatile("" ::: "memory");
  }
  ~Unseen() {
    asm volatile("" ::: "memory");
    running = before_;
  }
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;

 private:
  const int before_;
};

// While one lives, the memory is that of a CTA of the cluster.
class InCta {
 public:
  explicit InCta(int rank) : before_(EnterCta(rank)) {}
  ~InCta() { EnterCta(before_); }
  InCta(const InCta&) = delete;
  InCta& operator=(const InCta&) = delete;

 private:
  const int before_;
};

}  // namespace emulator::races
