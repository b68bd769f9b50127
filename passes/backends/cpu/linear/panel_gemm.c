/* bf16 GEMM for few rows, or few columns: fp32 sums, rounded once, with a bias and an optional relu that
   propagates NaN. On CPUs with AVX512_BF16; with MATRIX_UNITS, on AMX.

   Before: a library call, whose dispatch and packing take as long as the matmul. After: only the matmul, of strided
   operands; or of one in panels (`lay_out`), if it is multiplied often. */

#include "low_precision.h"
#include "thread_scratch.h"

#ifdef MATRIX_UNITS
#include "amx_tiles.h"
#else
#define TALL 4 /* made for few rows */
#include "gemm_tiles.h"
int has_tiles(void) { return 1; } /* its own: registers */
#endif

#define ROOMY(n, by) (((n) + (by)-1) / (by) * (by))

typedef struct { /* out [rows, columns], contiguous, = a [rows, depth] b [depth, columns] + bias [columns] */
  const Low *a, *b, *bias; /* b: in panels where `in_panels`; bias: null for none */
  Low *out;
  int64_t rows, columns, depth;
  int64_t a_row, a_column, b_row, b_column; /* strides in elements; of each operand, one of the two is 1 */
  int64_t in_panels, relu;
  int64_t threads;
} Product;

/* Columns of a panel, and its step in depth. */
int64_t panel(void) { return PANEL; }
int64_t deep(void) { return DEEP; }

/* One panel of b, zero-padded in columns and depth. */
INLINE void lay_panel(const Low *b, int64_t row, int64_t column, int64_t depth, int64_t columns, Low *to) {
  const int64_t whole = ROOMY(depth, DEEP), pairs = ROOMY(depth, 2);
  if (column == 1)
    pair_rows(b, row, depth, columns, PANEL, to);
  else
    pair_columns(b, column, depth, columns, PANEL, to);
  memset(to + pairs * PANEL, 0, (whole - pairs) * PANEL * sizeof(Low));
}

/* A contiguous weight [outputs, inputs] as panels of its outputs. */
void lay_out(const Low *weight, int64_t outputs, int64_t inputs, Low *to) {
  for (int64_t n = 0; n < outputs; n += PANEL, to += ROOMY(inputs, DEEP) * PANEL)
    lay_panel(weight + n * inputs, 1, inputs, inputs, outputs - n, to);
}

/* Rows of a column-major matrix: transposed, 32 of its depth by 16 of its rows at a time. */
static void turn_rows(const Low *from, int64_t column, int64_t rows, int64_t depth, int64_t row, Low *to) {
  for (int64_t n = 0; n < rows; n += 16)
    for (int64_t k = 0; k < depth; k += 32) {
      const __mmask32 there = first(rows - n) & 0xffff;
      __m512i r[16];
      for (int i = 0; i < 16; i++) {
        const int64_t at = k + 2 * i;
        const __m512i one = _mm512_maskz_loadu_epi16(at < depth ? there : 0, from + at * column + n);
        const __m512i two = _mm512_maskz_loadu_epi16(at + 1 < depth ? there : 0, from + (at + 1) * column + n);
        __m512i beyond; /* of the 16 rows: zeros */
        interleave(one, two, r + i, &beyond);
      }
      turn(r);
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + (n + i) * row + k, r[i]);
    }
}

/* Rows of a in tile layout, padded in depth, and to whole tiles of rows if a tile reads these: in place, or copied to
   `own`. */
static const Low *readable(const Product *p, Low *own, int64_t *row) {
  if (p->a_column == 1 && p->depth % DEEP == 0 && (DEEP == 2 || p->rows % 16 == 0)) return p->a;
  *row = ROOMY(p->depth, 32);
  if (p->a_column != 1)
    turn_rows(p->a, p->a_column, p->rows, p->depth, *row, own);
  else
    for (int64_t i = 0; i < p->rows; i++) {
      memcpy(own + i * *row, p->a + i * p->a_row, p->depth * sizeof(Low));
      memset(own + i * *row + p->depth, 0, (*row - p->depth) * sizeof(Low));
    }
  return own;
}

INLINE __m512 widened(__m256i low) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16)); }

INLINE void put_out(__m512 sums[TALL][BROAD], const Product *p, int64_t row, int64_t column, int64_t rows) {
  for (int j = 0; j < BROAD; j++) {
    const int64_t at = column + 16 * j;
    const __mmask16 there = (__mmask16)first(p->columns - at);
    const __m256i low = p->bias ? _mm256_maskz_loadu_epi16(there, p->bias + at) : _mm256_setzero_si256();
    const __m512 bias = widened(low);
    for (int i = 0; i < rows; i++) {
      __m512 sum = _mm512_add_ps(sums[i][j], bias);
      if (p->relu) sum = _mm512_max_ps(_mm512_setzero_ps(), sum); /* of a NaN and a number the second */
      const int64_t to = (row + i) * p->columns + at;
      _mm256_mask_storeu_epi16(p->out + to, there, (__m256i)_mm512_cvtneps_pbh(sum));
    }
  }
}

typedef struct {
  const Product *p;
  const Low *a; /* as tiles read it */
  int64_t a_row;
  _Atomic int failed;
} Readable;

static void multiply(void *of, int64_t from, int64_t to) {
  Readable *r = of;
  const Product *p = r->p;
  const Low *a = r->a;
  const int64_t whole = ROOMY(p->depth, DEEP), a_row = r->a_row;
  Low *own = p->in_panels ? 0 : own_memory(whole * PANEL); /* what the caller has of it is aligned as much */
  if (!own && !p->in_panels) {
    r->failed = 1;
    return;
  }
  const Tiles before = borrow_tiles();
  for (int64_t column = from; column < to; column += PANEL) {
    const Low *b = p->b + column * (p->in_panels ? whole : p->b_column);
    if (!p->in_panels) lay_panel(b, p->b_row, p->b_column, p->depth, p->columns - column, own), b = own;
    for (int64_t row = 0; row < p->rows; row += TALL) {
      const int64_t left = p->rows - row, rows = left < TALL ? left : TALL;
      __m512 sums[TALL][BROAD];
      tile_of(sums, a + row * a_row, a_row, DEEP, b, whole / DEEP, rows, BROAD);
      put_out(sums, p, row, column, rows);
    }
  }
  return_tiles(&before);
}

/* Returns 1 if out of memory. */
int product(const Product *p) {
  if (!p->rows) return 0;
  const int64_t of_a_panel = ROOMY(p->depth, DEEP) * PANEL;
  Low *own = own_memory(of_a_panel + ROOMY(p->rows, 16) * ROOMY(p->depth, 32));
  if (!own) return 1;
  Readable r = {p, 0, p->a_row, 0};
  r.a = readable(p, own + of_a_panel, &r.a_row);
  do_parts(p->threads, p->columns, PANEL, multiply, &r);
  return r.failed;
}
