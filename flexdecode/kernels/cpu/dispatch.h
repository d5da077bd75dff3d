// The instruction sets compiled into this library, and the choice among them.
#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "pieces.h"

namespace flex {

#define FLEX_DECLARE(isa) const Kernels* kernels_##isa();
FLEX_ISAS(FLEX_DECLARE)
#undef FLEX_DECLARE

#if defined(__x86_64__) && defined(__linux__)
// Whether there are tile registers with bf16 and the system lets this process use them, which it must be asked for once.
inline bool has_tiles() {
  constexpr long kAskPermission = 0x1023, kTileData = 18;  // arch_prctl(2): ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16) && (d & kTiles) && syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
}
#else
inline bool has_tiles() { return false; }
#endif

// Whether this machine can run code of that name.
inline bool runs_here(const std::string& isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (isa == "amx") return runs_here("avx512bf16") && has_tiles();
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
