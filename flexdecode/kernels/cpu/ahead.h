// Asks for rows some time before they are read, in the order in which they will be, a few lines with every few products.
//
// Memory gives its full rate only while it always has something to bring, in ascending order: its own prefetcher follows
// no other, and it gives up when requests come in bursts (docs/log.md). So all rows of keys and values to come stand in
// one list, and whatever is computed meanwhile, products or exponentials, asks for a few of their lines as it goes.
#pragma once

#include <cstdint>

#include "vec.h"

namespace flex {
namespace FLEX_ISA {

class Ahead {
 public:
  // A list of row pointers that is filled and read round and round; `size` a power of two. Rows of keys and of values
  // come in alternating runs of `run`, of `k_bytes` and `v_bytes` each; 0 bytes where they are not read.
  Ahead(const char* const* rows, int64_t size, int64_t run, int64_t k_bytes, int64_t v_bytes)
      : rows_(rows), mask_(size - 1), run_(run), k_bytes_(k_bytes), v_bytes_(v_bytes) {}

  // Rows up to number `stop`, counted from the start, may be asked for.
  void allow(int64_t stop) { stop_ = stop; }

  FLEX_INLINE void fetch(int64_t lines) {
    if (end_ - at_ < 64 * lines) return slowly(lines);
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(at_ + 64 * i);
    at_ += 64 * lines;
  }

  // Lines that are left before row `row`, the first of a run.
  int64_t left(int64_t row) const { return row_ <= row ? (end_ - at_ + (row - row_) * (k_bytes_ + v_bytes_) / 2) / 64 : 0; }

  // Catches up: everything before row `row`, the first of a run, has been asked for.
  void until(int64_t row) {
    while (row_ < row || (row_ == row && at_ < end_)) {
      if (row_ >= stop_ && at_ >= end_) return;
      slowly(1);
    }
  }

 private:
  FLEX_INLINE void slowly(int64_t lines) {
    for (int64_t i = 0; i < lines; ++i) {
      while (at_ >= end_) {
        if (row_ >= stop_) return;
        next();
      }
      __builtin_prefetch(at_);
      at_ += 64;
    }
  }

  // The next rows of a run, as many as lie one after the other.
  void next() {
    const int64_t bytes = row_ / run_ % 2 ? v_bytes_ : k_bytes_;
    at_ = end_ = rows_[row_ & mask_];
    do end_ += bytes, ++row_;
    while (row_ % run_ && rows_[row_ & mask_] == end_);
  }
  const char* const* rows_;
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t mask_, run_, k_bytes_, v_bytes_, row_ = 0, stop_ = 0;
};

}  // namespace FLEX_ISA
}  // namespace flex
