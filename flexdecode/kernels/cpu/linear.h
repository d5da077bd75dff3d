// What a product of activations with an integer matrix is given, and the kernels that compute it. Knows no torch.
//
// A matrix is cut into tiles of 32 rows (the last is filled up), and lies in memory in the order in which it is read:
//   int4: codes[tile][word][row], a word of 32 bits holding 8 columns of one row. Its low half holds the even columns
//         0 2 4 6, its high half the odd ones 1 3 5 7, four bits each, so that a shift by 4 s brings columns 2 s and
//         2 s + 1 to the bottom of the two halves: a pair for a bf16 dot product.
//   int8: codes[tile][column][row].
//   scales[tile][group][row], and offsets likewise: w = (code - 8 + offset) · scale.
// A register's lane is a row, so nothing is ever summed across lanes and groups may have any size.
#pragma once

#include <cstdint>

namespace flex {

constexpr int TILE = 32;       // rows of a tile
constexpr int MOST_ROWS = 8;   // rows of activations that one pass over a tile serves,
constexpr int TALL_ROWS = 32;  // and where tile registers multiply, whose blocks of rows are of
constexpr int TALL_BLOCK = 16;
constexpr int64_t COLUMNS = 32;  // of activations that are laid out in one piece, where a matrix has no groups

enum class Float { fp32, bf16, fp16 };

inline int64_t bytes_of(Float type) { return type == Float::fp32 ? 4 : 2; }

enum class Offsets { none, int8, fp32 };

struct Int4Matrix {
  const uint32_t* codes;
  const void* scales;  // fp16 or fp32
  bool half_scales;
  const void* offsets;
  Offsets offset_type;
  int64_t n, k;
  int64_t groups, words;  // of a row; of a group, the last of which may be filled up
};

struct Int8Matrix {
  const int8_t* codes;
  const float* scales;  // [tile][row]
  int64_t n, k;
};

// Rows of activations as the caller holds them. Where they are to be alike, a row's bits are the same however many there are;
// else sums are in the order that is quickest for as many.
struct Rows {
  const void* x;
  int64_t stride;  // elements from row to row
  Float type;
  int64_t count;
  bool alike;
};

// The same as the kernels read them: x[column][row] in fp32, or x[pair of columns][row] in bf16, with `padded` rows (see
// padded_rows), columns filled up as the matrix's are; sums[group][row], the sums of the activations. More than MOST_ROWS
// padded rows are for tile registers: bf16 x[32 columns][row][column].
struct Prepared {
  float* x;
  float* sums;
  int padded;
  bool alike;
};

// Where results go: y = x @ w.T + bias, rounded to `type`; with `add`, y += factor · that, rounded again.
struct Out {
  void* y;
  int64_t stride;
  Float type;
  int64_t rows;
  const float* bias;  // or null
  bool add;
  float factor;
};

// A matrix of floats as a checkpoint holds it: [n][k], rows of `stride` elements, of one type with the activations.
struct DenseMatrix {
  const void* w;
  int64_t n, k, stride;
};

struct PointKernels;  // point.h

struct LinearKernels {
  const char* name;
  const PointKernels* point;
  // Up to how many rows of activations these kernels are quicker than turning the matrix to floats for torch.
  int64_t (*few_rows)(Float);
  // Rows of activations for one pass over the matrix: MOST_ROWS or TALL_ROWS.
  int64_t (*pass4)(const Int4Matrix&, const Rows&);
  int64_t (*pass8)(const Int8Matrix&, const Rows&);
  void (*prepare4)(const Int4Matrix&, const Rows&, const Prepared&, int64_t first_group, int64_t last_group);
  void (*prepare8)(const Int8Matrix&, const Rows&, const Prepared&, int64_t first_column, int64_t last_column);
  // Computes the outputs of tiles [first, last).
  void (*int4)(const Int4Matrix&, const Prepared&, Float type, const Out&, int64_t first, int64_t last);
  void (*int8)(const Int8Matrix&, const Prepared&, Float type, const Out&, int64_t first, int64_t last);
  // Rows as the caller holds them; tiles are 32 rows of the matrix here, too.
  void (*dense)(const DenseMatrix&, const Rows&, const Out&, int64_t first, int64_t last);
  // Writes w (int8: its codes) of tiles [first, last) transposed: [k][column of the tiles], rows of `stride` elements.
  void (*dequantize4)(const Int4Matrix&, int64_t first, int64_t last, void* out, int64_t stride, Float type);
  void (*dequantize8)(const Int8Matrix&, int64_t first, int64_t last, void* out, int64_t stride, Float type);
};

// The numbers of rows for which kernels are compiled, of at most `pass`.
inline int padded_rows(int64_t rows, int64_t pass) {
  if (pass > MOST_ROWS) return static_cast<int>((rows + TALL_BLOCK - 1) / TALL_BLOCK * TALL_BLOCK);
  return rows <= 4 ? static_cast<int>(rows) : rows <= 6 ? 6 : MOST_ROWS;
}

}  // namespace flex
