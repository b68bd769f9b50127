/* bf16 GEMM tile by tile: pairs of elements side by side, and a tile of sums in registers.

   Before: an operand in its own layout. After: `pair_rows(...)` or `pair_columns(...)`, panels that `tile` reads
   sequentially. Only where the CPU has AVX512_BF16. Sums are fp32; subnormal elements count as zero. The including file
   defines how many rows a tile has, TALL; a matrix whose rows are no multiple of it wastes some. 6 rows and BROAD
   vectors fill the registers. */

#include <immintrin.h>

#ifndef BROAD
#define BROAD 4 /* vectors of 16 columns in a tile */
#endif
#define PANEL (16 * BROAD) /* columns */

static inline __mmask32 first(int64_t count) {
  return count >= 32 ? ~(__mmask32)0 : (__mmask32)((1u << (count > 0 ? count : 0)) - 1);
}

/* Pairs of two vectors of 32, one below the other: those of the first 16 columns, then those of the others. */
static inline void interleave(__m512i one, __m512i two, __m512i *low, __m512i *high) {
  const __m512i of_low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                          37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  *low = _mm512_permutex2var_epi16(one, of_low, two);
  *high = _mm512_permutex2var_epi16(one, _mm512_add_epi16(of_low, _mm512_set1_epi16(16)), two);
}

/* Packs pairs of elements that are multiplied together side by side: to[pair][column][2], from a matrix whose columns
   are adjacent in memory. `width` is rounded up to whole vectors of 16; zeros pad the last column and an odd depth. */
static void pair_rows(const Low *from, int64_t row, int64_t depth, int64_t columns, int64_t width, Low *to) {
  for (int64_t k = 0; k < depth; k += 2)
    for (int64_t n = 0; n < width; n += 32) {
      const __mmask32 there = first(columns - n), other = k + 1 < depth ? there : 0;
      const __m512i one = _mm512_maskz_loadu_epi16(there, from + k * row + n);
      const __m512i two = _mm512_maskz_loadu_epi16(other, from + (k + 1) * row + n);
      __m512i low, high;
      interleave(one, two, &low, &high);
      _mm512_storeu_si512(to + k * width + 2 * n, low);
      if (n + 16 < width) _mm512_storeu_si512(to + k * width + 2 * n + 32, high);
    }
}

/* Transpose 16 vectors of 16 pairs: element j of vector i becomes element i of vector j. */
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

/* The same for a matrix whose rows are contiguous: a weight [columns, depth], transposed while it is read. */
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

/* Two vectors of numbers, rounded, as pairs: one above the other. */
static inline __m512i paired(const float *one, const float *other) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(other), _mm512_loadu_ps(one));
  return _mm512_permutexvar_epi16(order, both);
}

#ifndef DEEP /* step in depth: a tile of another kind has another */
#define DEEP 2

/* Tiles in registers need no setup: there is nothing to borrow. */
typedef int Tiles;
static inline Tiles borrow_tiles(void) { return 0; }
static inline void return_tiles(const Tiles *before) { (void)before; }

/* Adds to `sums` the product of `rows` rows of a, whose pairs are `a_pair` elements apart, and a panel of `broad`
   vectors. Sums of rows beyond are garbage. If the compiler knows `broad`, all sums stay in registers. */
INLINE void tile(__m512 sums[TALL][BROAD], const Low *a, int64_t a_row, int64_t a_pair, const Low *b, int64_t pairs,
                 int64_t rows, int broad) {
  const Low *at[TALL];
  for (int i = 0; i < TALL; i++) at[i] = a + (i < rows ? i : 0) * a_row;
  for (int64_t k = 0; k < pairs; k++) {
    __m512i right[BROAD];
#pragma GCC unroll 4
    for (int j = 0; j < broad; j++) right[j] = _mm512_loadu_si512(b + 2 * 16 * (k * broad + j));
#pragma GCC unroll 8
    for (int i = 0; i < TALL; i++) {
      int32_t pair;
      memcpy(&pair, at[i] + k * a_pair, sizeof pair);
      const __m512i left = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int j = 0; j < broad; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)left, (__m512bh)right[j]);
    }
  }
}

/* Only the product: in registers; or stored, with row stride `row`. */
INLINE void tile_of(__m512 sums[TALL][BROAD], const Low *a, int64_t a_row, int64_t a_pair, const Low *b, int64_t pairs,
                    int64_t rows, int broad) {
  for (int i = 0; i < TALL; i++)
    for (int j = 0; j < BROAD; j++) sums[i][j] = _mm512_setzero_ps();
  tile(sums, a, a_row, a_pair, b, pairs, rows, broad);
}

INLINE void tile_to(float *to, int64_t row, const Low *a, int64_t a_row, int64_t a_pair, const Low *b, int64_t pairs,
                    int64_t rows) {
  __m512 sums[TALL][BROAD];
  tile_of(sums, a, a_row, a_pair, b, pairs, rows, BROAD);
#pragma GCC unroll 8
  for (int i = 0; i < TALL; i++)
#pragma GCC unroll 4
    for (int j = 0; j < BROAD; j++) _mm512_storeu_ps(to + i * row + 16 * j, sums[i][j]);
}

/* Two rows of numbers with row stride `row`, transposed and rounded: to[column][2]. `count` is a multiple of 16. */
static inline void weave(const float *from, int64_t row, int64_t count, Low *to) {
  for (int64_t n = 0; n < count; n += 16) _mm512_storeu_si512(to + DEEP * n, paired(from + n, from + row + n));
}

#endif
