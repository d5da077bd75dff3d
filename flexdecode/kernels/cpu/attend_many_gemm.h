// Products of 16-bit matrices that somebody else provides: bindings hand in the machine's own, where it has them.
//
// C [M, N] fp32 (+)= A [M, K] · B, where B lies in pairs of rows: [K / 2, N, 2], K even, `ldb` the N of its memory.
// Leading dimensions are in elements. Knows no torch and no vectors.
#pragma once

#include <cstdint>

namespace flex {

struct Gemm {
  using Product = void (*)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const void* a,
                           const void* b, float* c);
  Product bf16 = nullptr;  // null: this machine has none that is faster than fp32
  Product fp16 = nullptr;
  void (*done)() = nullptr;  // after the last product of a run of them, on the same thread
};

}  // namespace flex
