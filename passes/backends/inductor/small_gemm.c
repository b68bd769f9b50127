/* out = a b, or relu(... + bias) if requested: a [rows, depth], b [depth, columns], out [rows, columns] row-major; all
   bf16. Sums are fp32 and rounded once; subnormal elements count as zero. Elements of a are a_row and a_column apart,
   those of b likewise; of each operand, one of the two strides is 1.

   small_gemm_template.py hands this file to Inductor, which compiles it as C++ for the host CPU. Without AVX512_BF16,
   or if out of memory, plain loops do the same. */

#include "low_precision.h"
#include "thread_scratch.h"

typedef struct {
  const Low *a, *b, *bias; /* bias: null for none */
  Low *out;
  int64_t rows, columns, depth, a_row, a_column, b_row, b_column;
  int relu;
} Product;

static void multiply_by_loops(const Product *p) {
  for (int64_t i = 0; i < p->rows; i++)
    for (int64_t j = 0; j < p->columns; j++) {
      float sum = p->bias ? widen(p->bias[j]) : 0.0f;
      for (int64_t k = 0; k < p->depth; k++)
        sum += widen(p->a[i * p->a_row + k * p->a_column]) * widen(p->b[k * p->b_row + j * p->b_column]);
      p->out[i * p->columns + j] = narrow(p->relu && sum < 0.0f ? 0.0f : sum);
    }
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(PLAIN_LOOPS)
#define TALL 4 /* made for few rows */
#include "gemm_tiles.h"

/* `rows` up to TALL and, unless `whole`, a part of PANEL columns of the result. If the compiler knows both, the sums
   stay in registers, and no store is masked. */
INLINE void block(const Product *p, const Low *a, int64_t a_row, int64_t a_pair, const Low *b, int64_t row,
                  int64_t column, int64_t rows, int whole) {
  __m512 sums[TALL][BROAD];
  for (int j = 0; j < BROAD; j++) {
    const __mmask16 there = whole ? 0xffff : (__mmask16)first(p->columns - column - 16 * j);
    const __m256i bias = p->bias ? _mm256_maskz_loadu_epi16(there, p->bias + column + 16 * j) : _mm256_setzero_si256();
    for (int i = 0; i < TALL; i++)
      sums[i][j] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bias), 16));
  }
  tile(sums, a + row * a_row, a_row, a_pair, b, (p->depth + 1) / 2, rows, BROAD);
#pragma GCC unroll 4
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < BROAD; j++) {
      const __m512 sum = p->relu ? _mm512_max_ps(_mm512_setzero_ps(), sums[i][j]) : sums[i][j];
      const __m256i low = (__m256i)_mm512_cvtneps_pbh(sum);
      Low *to = p->out + (row + i) * p->columns + column + 16 * j;
      if (whole)
        _mm256_storeu_si256((__m256i *)to, low);
      else
        _mm256_mask_storeu_epi16(to, (__mmask16)first(p->columns - column - 16 * j), low);
    }
}

static void multiply(const Product *p) {
  const int64_t pairs = (p->depth + 1) / 2, padded = (p->rows + 31) / 32 * 32;
  const int as_it_lies = p->a_column == 1 && p->depth % 2 == 0;
  const int64_t panel = 2 * pairs * PANEL;
  Low *memory = own_memory(panel + (as_it_lies ? 0 : 2 * pairs * padded));
  if (!memory) {
    multiply_by_loops(p);
    return;
  }
  const Low *a = p->a;
  int64_t a_row = p->a_row, a_pair = 2;
  if (!as_it_lies) {
    Low *own = memory + panel;
    if (p->a_row == 1)
      pair_rows(p->a, p->a_column, p->depth, p->rows, padded, own);
    else
      pair_columns(p->a, p->a_row, p->depth, p->rows, padded, own);
    a = own, a_row = 2, a_pair = 2 * padded;
  }
  for (int64_t column = 0; column < p->columns; column += PANEL) {
    const int64_t left = p->columns - column;
    if (p->b_column == 1)
      pair_rows(p->b + column, p->b_row, p->depth, left, PANEL, memory);
    else
      pair_columns(p->b + column * p->b_column, p->b_column, p->depth, left, PANEL, memory);
    for (int64_t row = 0; row < p->rows; row += TALL) {
      const int64_t rows = p->rows - row < TALL ? p->rows - row : TALL;
      if (left >= PANEL && rows == TALL)
        block(p, a, a_row, a_pair, memory, row, column, TALL, 1);
      else
        block(p, a, a_row, a_pair, memory, row, column, rows, 0);
    }
  }
}

#else

static void multiply(const Product *p) { multiply_by_loops(p); }

#endif
