// Asks for rows some time before they are read, in the order in which they will be, a few lines with every few products.
//
// Memory gives its full rate only while it always has something to bring, in ascending order: its own prefetcher follows
// no other, and it gives up when requests come in bursts (docs/log.md). So all runs of keys and values to come stand in
// one list, and whatever is computed meanwhile, products or exponentials, asks for a few of their lines as it goes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vec.h"

namespace flex {
namespace FLEX_ISA {

// Caches to ask for. What is read by tiles goes to the second: a line on its way to the nearest holds one of its few places
// until memory answers, and a tile's load from the second costs no more.
constexpr int kNearest = 3, kSecond = 2;

class Ahead {
 public:
  // Rows of keys or of values: their bytes, 0 where they are not read, and how far apart they lie.
  struct Kind {
    int64_t bytes, stride;
  };

  // A list of runs of `rows` rows that is filled and read round and round, keys and values in turns; `size` a power of
  // two. Null is a run that nothing can be asked for.
  Ahead(const void* const* runs, int64_t size, int64_t rows, Kind keys, Kind values)
      : runs_(runs), mask_(size - 1), rows_(rows), kinds_{keys, values} {}

  // Runs up to number `stop`, counted from the start, may be asked for.
  void allow(int64_t stop) { stop_ = stop; }

  // Asks for the next few lines, into the nearest cache or the second one. At the end of a run it may ask for some that
  // follow it in memory.
  template <int cache = kNearest>
  FLEX_INLINE void fetch(int64_t lines) {
    const char* at = at_;
    if (__builtin_expect(at >= end_, 0)) {
      if (!next()) return;
      at = at_;
    }
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(at + 64 * i, 0, cache);
    at_ = at + 64 * lines;
  }

  // Lines that are left before run `run`, the first of a pair; less than 0 if it was asked for.
  int64_t left(int64_t run) const {
    return (std::max<int64_t>(end_ - at_, 0) + (run - run_) * (kinds_[0].bytes + kinds_[1].bytes) / 2 * rows_) / 64;
  }

  // Catches up: everything before run `run` has been asked for.
  template <int cache = kNearest>
  void until(int64_t run) {
    while (run_ < run || (run_ == run && (at_ < end_ || rest_ > 0))) {
      if (at_ >= end_ && !next()) return;
      const char* at = at_;
      for (const char* end = end_; at < end; at += 64) __builtin_prefetch(at, 0, cache);
      at_ = at;
    }
  }

 private:
  // The next rows: a whole run where its rows lie one after the other, else one row.
  FLEX_INLINE bool next() {
    while (true) {
      if (rest_ > 0) {
        --rest_;
        const Kind& kind = kinds_[(run_ - 1) & 1];
        row_ += kind.stride;
        at_ = row_;
        end_ = row_ + kind.bytes;
        return true;
      }
      if (run_ >= stop_) return false;
      const Kind& kind = kinds_[run_ & 1];
      row_ = static_cast<const char*>(runs_[run_++ & mask_]);
      if (!row_ || !kind.bytes) continue;
      const bool dense = kind.bytes == kind.stride;
      at_ = row_;
      end_ = row_ + (dense ? rows_ : 1) * kind.bytes;
      rest_ = dense ? 0 : rows_ - 1;
      return true;
    }
  }

  const void* const* runs_;
  // Volatile, or the compiler keeps them in registers through loops that have none to spare (a fifth of the time).
  const char *volatile at_ = nullptr, *volatile end_ = nullptr;
  const char* row_ = nullptr;
  int64_t mask_, rows_, run_ = 0, stop_ = 0, rest_ = 0;
  Kind kinds_[2];
};

}  // namespace FLEX_ISA
}  // namespace flex
