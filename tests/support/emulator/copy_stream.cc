// libkvblock's streams of copies for the emulator, from the source that nvcc compiles; and what
// tests call.
#include "ops/copy_stream/copy_stream_cuda.cu"

extern "C" void emulator_hold(int held) {
  std::lock_guard<std::mutex> guard(streams::lock);
  streams::held = held != 0;
  streams::changed.notify_all();
}
extern "C" void emulator_old_driver(int old) { streams::old_driver = old != 0; }
extern "C" int64_t emulator_copies() {
  std::lock_guard<std::mutex> guard(streams::lock);
  return streams::copies;
}
// The n-th copy from now on fails; 0: none.
extern "C" void emulator_fail_at(int64_t n) {
  std::lock_guard<std::mutex> guard(streams::lock);
  streams::fail_at = n == 0 ? 0 : streams::copies + n;
}
extern "C" int64_t emulator_alive() {
  std::lock_guard<std::mutex> guard(streams::lock);
  return streams::alive;
}
extern "C" int emulator_last_error() { return streams::last; }
extern "C" void emulator_memory(const char* first, int64_t bytes, int type, int device) {
  std::lock_guard<std::mutex> guard(streams::lock);
  streams::memory[first] = {bytes, {static_cast<cudaMemoryType>(type), device}};
}
extern "C" void emulator_forget_memory() {
  std::lock_guard<std::mutex> guard(streams::lock);
  streams::memory.clear();
}
