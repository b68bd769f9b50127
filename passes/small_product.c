/* out = a b, through relu(... + bias) where asked: a [rows, depth], b [depth, columns], out [rows, columns] in rows; all
   bf16. Sums are fp32 and rounded once; subnormal elements count as zero. Elements of a lie a_row and a_column
   apart, those of b likewise; of each operand, one of the two is 1.

   small_product.py hands this file to Inductor, which compiles it as C++ for the machine at hand. Where that lacks
   AVX512_BF16 the loops at the end say the same. */

#include <stdlib.h>

#include "kernel.h"

typedef struct {
  const Low *a, *b, *bias; /* bias: null for none */
  Low *out;
  int64_t rows, columns, depth, a_row, a_column, b_row, b_column;
  int relu;
} Product;

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(PLAIN_LOOPS)
#include <immintrin.h>

#define WIDE 64 /* columns at a time: four vectors of sums */
#define TALL 4  /* rows at a time */

static inline __mmask32 first(int64_t count) {
  return count >= 32 ? ~(__mmask32)0 : (__mmask32)((1u << (count > 0 ? count : 0)) - 1);
}

/* Pairs of elements that are multiplied together, side by side: to[pair][column][2], of a matrix whose columns are
   neighbours in memory. Zeros stand behind the last column and the last of an odd depth. */
static void pair_rows(const Low *from, int64_t row, int64_t depth, int64_t columns, int64_t width, Low *to) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t k = 0; k < depth; k += 2)
    for (int64_t n = 0; n < width; n += 32) {
      const __mmask32 there = first(columns - n), other = k + 1 < depth ? there : 0;
      const __m512i one = _mm512_maskz_loadu_epi16(there, from + k * row + n);
      const __m512i two = _mm512_maskz_loadu_epi16(other, from + (k + 1) * row + n);
      _mm512_storeu_si512(to + k * width + 2 * n, _mm512_permutex2var_epi16(one, low, two));
      _mm512_storeu_si512(to + k * width + 2 * n + 32, _mm512_permutex2var_epi16(one, high, two));
    }
}

/* Turn 16 vectors of 16 pairs: what was number j of vector i becomes number i of vector j. */
static inline void turn(__m512i *r) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

/* The same of a matrix whose rows are neighbours: a weight [columns, depth], turned as it is read. */
static void pair_columns(const Low *from, int64_t column, int64_t depth, int64_t columns, int64_t width, Low *to) {
  const int64_t pairs = (depth + 1) / 2;
  for (int64_t n = 0; n < width; n += 16)
    for (int64_t k = 0; k < pairs; k += 16) {
      __m512i r[16];
      for (int i = 0; i < 16; i++)
        r[i] = n + i < columns ? _mm512_maskz_loadu_epi16(first(depth - 2 * k), from + (n + i) * column + 2 * k)
                               : _mm512_setzero_si512();
      turn(r);
      for (int i = 0; i < 16 && k + i < pairs; i++)
        _mm512_storeu_si512(to + 2 * ((k + i) * width + n), r[i]);
    }
}

/* `rows` up to TALL and, unless `whole`, some of WIDE columns of the result; pairs of a lie a_row and a_pair pairs apart.
   With both known to the compiler the sums stay in registers, and nothing is stored behind a mask. */
INLINE void block(const Product *p, const int32_t *a, int64_t a_row, int64_t a_pair, const Low *b, int64_t row,
                  int64_t column, int64_t rows, int whole) {
  const int64_t pairs = (p->depth + 1) / 2;
  __m512 sums[TALL][WIDE / 16];
  for (int j = 0; j < WIDE / 16; j++) {
    const __mmask16 there = whole ? 0xffff : (__mmask16)first(p->columns - column - 16 * j);
    const __m256i bias = p->bias ? _mm256_maskz_loadu_epi16(there, p->bias + column + 16 * j) : _mm256_setzero_si256();
    for (int i = 0; i < TALL; i++)
      sums[i][j] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bias), 16));
  }
  const int32_t *at[TALL];
  for (int i = 0; i < TALL; i++)
    at[i] = a + (row + (i < rows ? i : 0)) * a_row;
  for (int64_t k = 0; k < pairs; k++) {
    __m512i right[WIDE / 16];
    for (int j = 0; j < WIDE / 16; j++)
      right[j] = _mm512_loadu_si512(b + 2 * (k * WIDE + 16 * j));
    for (int i = 0; i < TALL; i++) {
      int32_t pair;
      memcpy(&pair, at[i] + k * a_pair, sizeof pair);
      const __m512i left = _mm512_set1_epi32(pair);
      for (int j = 0; j < WIDE / 16; j++)
        sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)left, (__m512bh)right[j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < WIDE / 16; j++) {
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
  const int as_it_lies = p->a_column == 1 && p->depth % 2 == 0 && p->a_row % 2 == 0;
  /* Memory of the thread, for as long as it lives: taken anew, it would cost what the product does. */
  static __thread Low *memory = 0;
  static __thread int64_t held = 0;
  const int64_t panel = 2 * pairs * WIDE, wanted = panel + (as_it_lies ? 0 : 2 * pairs * padded);
  if (held < wanted) {
    free(memory);
    memory = (Low *)aligned_alloc(64, (size_t)((wanted * 2 + 63) / 64 * 64));
    held = wanted;
  }
  const int32_t *a = (const int32_t *)p->a;
  int64_t a_row = p->a_row / 2, a_pair = 1;
  if (!as_it_lies) {
    Low *own = memory + panel;
    if (p->a_row == 1)
      pair_rows(p->a, p->a_column, p->depth, p->rows, padded, own);
    else
      pair_columns(p->a, p->a_row, p->depth, p->rows, padded, own);
    a = (const int32_t *)own, a_row = 1, a_pair = padded;
  }
  for (int64_t column = 0; column < p->columns; column += WIDE) {
    const int64_t left = p->columns - column;
    if (p->b_column == 1)
      pair_rows(p->b + column, p->b_row, p->depth, left, WIDE, memory);
    else
      pair_columns(p->b + column * p->b_column, p->b_column, p->depth, left, WIDE, memory);
    for (int64_t row = 0; row < p->rows; row += TALL) {
      const int64_t rows = p->rows - row < TALL ? p->rows - row : TALL;
      if (left >= WIDE && rows == TALL)
        block(p, a, a_row, a_pair, memory, row, column, TALL, 1);
      else
        block(p, a, a_row, a_pair, memory, row, column, rows, 0);
    }
  }
}

#else

static void multiply(const Product *p) {
  for (int64_t i = 0; i < p->rows; i++)
    for (int64_t j = 0; j < p->columns; j++) {
      float sum = p->bias ? widen(p->bias[j]) : 0.0f;
      for (int64_t k = 0; k < p->depth; k++)
        sum += widen(p->a[i * p->a_row + k * p->a_column]) * widen(p->b[k * p->b_row + j * p->b_column]);
      p->out[i * p->columns + j] = narrow(p->relu && sum < 0.0f ? 0.0f : sum);
    }
}

#endif
