// One instruction set's kernels. Compiled once for each, with FLEX_ISA naming it and the compiler's flags choosing it.
#include "attend_few.h"
#include "attend_many.h"

#define FLEX_JOIN2(a, b) a##b
#define FLEX_JOIN(a, b) FLEX_JOIN2(a, b)
#define FLEX_TEXT2(a) #a
#define FLEX_TEXT(a) FLEX_TEXT2(a)

namespace flex {

const Kernels* FLEX_JOIN(kernels_, FLEX_ISA)() {
  static const Kernels kernels = {FLEX_TEXT(FLEX_ISA), FLEX_ISA::piece, FLEX_ISA::merge, FLEX_ISA::scratch_floats,
                                  FLEX_ISA::many, FLEX_ISA::many_scratch_floats};
  return &kernels;
}

}  // namespace flex
