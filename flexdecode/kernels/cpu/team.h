// Threads that work side by side through many short phases. A phase takes microseconds, and waking threads anew for each
// would take as long; so they wait for each other by watching a number.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flex {

class Team {
 public:
  explicit Team(int64_t size) : size(size) {}
  const int64_t size;

  // Returns once all have called it. What each wrote before, all may read afterwards.
  void wait() {
    if (size == 1) return;
    const uint64_t round = round_.load(std::memory_order_relaxed);
    if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      waiting_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins > PATIENCE) std::this_thread::yield();  // the other may be waiting for this processor
      else pause();
    }
  }

  // This thread's share of [0, count): runs of equal length.
  void share(int64_t rank, int64_t count, int64_t& first, int64_t& last) const {
    first = count * rank / size;
    last = count * (rank + 1) / size;
  }

 private:
  static constexpr int PATIENCE = 1000;
  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  alignas(64) std::atomic<int64_t> waiting_{0};
  alignas(64) std::atomic<uint64_t> round_{0};
};

}  // namespace flex
