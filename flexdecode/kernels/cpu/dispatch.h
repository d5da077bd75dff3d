// The instruction sets compiled into this library, and the choice among them.
#pragma once

#include <string>
#include <vector>

#include "pieces.h"

namespace flex {

#define FLEX_DECLARE(isa) const Kernels* kernels_##isa();
FLEX_ISAS(FLEX_DECLARE)
#undef FLEX_DECLARE

// Whether this machine can run code of that name.
inline bool runs_here(const std::string& isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (isa == "avx512bf16") return runs_here("avx512") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (isa == "avx512") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
  }
  if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
  return true;
}

// In the order of preference, those that run here.
inline std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
#define FLEX_ADD(isa) if (runs_here(#isa)) found.push_back(kernels_##isa());
  FLEX_ISAS(FLEX_ADD)
#undef FLEX_ADD
  return found;
}

}  // namespace flex
