// One instruction set's products with weights, and the small operators between them. Compiled once for each, with FLEX_ISA naming it.
#include "linear_dense.h"
#include "linear_tiles.h"
#include "point_rows.h"

#define FLEX_JOIN2(a, b) a##b
#define FLEX_JOIN(a, b) FLEX_JOIN2(a, b)
#define FLEX_TEXT2(a) #a
#define FLEX_TEXT(a) FLEX_TEXT2(a)

namespace flex {

const LinearKernels* FLEX_JOIN(linear_kernels_, FLEX_ISA)() {
  static const PointKernels point = {FLEX_ISA::norm, FLEX_ISA::add, FLEX_ISA::gate, FLEX_ISA::turn, FLEX_ISA::keep};
  static const LinearKernels kernels = {FLEX_TEXT(FLEX_ISA), &point,          FLEX_ISA::few_rows, FLEX_ISA::pass4,    FLEX_ISA::pass8,       FLEX_ISA::lay_out4,
                                        FLEX_ISA::lay_out8,  FLEX_ISA::product4, FLEX_ISA::product8, FLEX_ISA::dense, FLEX_ISA::dequantize4, FLEX_ISA::dequantize8};
  return &kernels;
}

}  // namespace flex
