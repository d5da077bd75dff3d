// The products with integer weights compiled into this library, and those of the instruction set that is in use.
#pragma once

#include <atomic>
#include <cstring>

#include "linear.h"

namespace flex {

const char* isa_in_use();  // bindings.cpp

#define FLEX_DECLARE(isa) const LinearKernels* linear_kernels_##isa();
FLEX_ISAS(FLEX_DECLARE)
#undef FLEX_DECLARE

inline const LinearKernels& linear_kernels() {
  static std::atomic<const LinearKernels*> last{nullptr};
  const char* name = isa_in_use();
  const LinearKernels* found = last.load();
  if (found && std::strcmp(found->name, name) == 0) return *found;
#define FLEX_FIND(isa) if (std::strcmp(name, #isa) == 0) found = linear_kernels_##isa();
  FLEX_ISAS(FLEX_FIND)
#undef FLEX_FIND
  last.store(found);
  return *found;
}

}  // namespace flex
