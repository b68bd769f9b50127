/* A linear over few rows: fp32 sums, rounded once to bf16 behind the bias and, where asked, a relu that lets NaN through. On
   CPUs with AVX512_BF16; with MATRIX_UNITS on those of AMX.

   Before: a call of a library, which looks itself up and lays out what it multiplies, for as long as it multiplies. After:
   the product alone, of rows as they lie and a weight in panels (`lay_out`, once an update). */

#include <stdlib.h>

#include "kernel.h"

#ifdef MATRIX_UNITS
#include "matrix_tiles.h"
#else
#define TALL 4 /* few rows are what this is for */
#include "tiles.h"
int has_tiles(void) { return 1; } /* its own: registers */
#endif

#define ROOMY(n, by) (((n) + (by)-1) / (by) * (by))

typedef struct {
  const Low *x, *panels, *bias; /* x [rows, inputs], elements of a row side by side; bias: null for none */
  Low *out;                     /* [rows, outputs] without gaps */
  int64_t rows, x_row, inputs, outputs, relu;
} Linear;

/* Columns of a panel, and inputs at a time. */
int64_t panel(void) { return PANEL; }
int64_t deep(void) { return DEEP; }

/* A weight [outputs, inputs] without gaps, as panels [PANEL columns][pairs of inputs], zeros behind the last ones. */
void lay_out(const Low *weight, int64_t outputs, int64_t inputs, Low *to) {
  const int64_t whole = ROOMY(inputs, DEEP), pairs = ROOMY(inputs, 2);
  for (int64_t n = 0; n < outputs; n += PANEL, to += whole * PANEL) {
    pair_columns(weight + n * inputs, inputs, inputs, outputs - n, PANEL, to);
    memset(to + pairs * PANEL, 0, (whole - pairs) * PANEL * sizeof(Low));
  }
}

/* Rows as tiles read them, of whole DEEP inputs, and of whole tiles of rows where a tile reads these: where they lie, or in
   memory of the thread, which lasts as long as it lives: taken anew, it would cost what the product does. Null where there
   is none. */
static const Low *readable(const Linear *p, int64_t *row) {
  static __thread Low *memory = 0;
  static __thread int64_t held = 0;
  if (p->inputs % DEEP == 0 && (DEEP == 2 || p->rows % 16 == 0)) return p->x;
  const int64_t whole = ROOMY(p->inputs, DEEP), wanted = ROOMY(p->rows, 16) * whole;
  if (held < wanted) {
    free(memory);
    memory = aligned_alloc(64, ROOMY(wanted * sizeof(Low), 64));
    held = memory ? wanted : 0;
    if (!memory) return 0;
  }
  for (int64_t i = 0; i < p->rows; i++) {
    memcpy(memory + i * whole, p->x + i * p->x_row, p->inputs * sizeof(Low));
    memset(memory + i * whole + p->inputs, 0, (whole - p->inputs) * sizeof(Low));
  }
  *row = whole;
  return memory;
}

INLINE void put_out(__m512 sums[TALL][BROAD], const Linear *p, int64_t row, int64_t column, int64_t rows) {
  for (int j = 0; j < BROAD; j++) {
    const int64_t at = column + 16 * j;
    const __mmask16 there = (__mmask16)first(p->outputs - at);
    const __m256i low = p->bias ? _mm256_maskz_loadu_epi16(there, p->bias + at) : _mm256_setzero_si256();
    const __m512 bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16));
    for (int i = 0; i < rows; i++) {
      __m512 sum = _mm512_add_ps(sums[i][j], bias);
      if (p->relu) sum = _mm512_max_ps(_mm512_setzero_ps(), sum); /* of a NaN and a number the second */
      _mm256_mask_storeu_epi16(p->out + (row + i) * p->outputs + at, there, (__m256i)_mm512_cvtneps_pbh(sum));
    }
  }
}

/* Returns 1 where there is no memory. */
int linear(const Linear *p) {
  const int64_t whole = ROOMY(p->inputs, DEEP);
  int64_t x_row = p->x_row;
  const Low *x = readable(p, &x_row), *at = p->panels;
  if (!x) return p->rows > 0;
#ifdef MATRIX_UNITS
  const Tiles before = borrow_tiles();
#endif
  for (int64_t column = 0; column < p->outputs; column += PANEL, at += whole * PANEL)
    for (int64_t row = 0; row < p->rows; row += TALL) {
      const int64_t left = p->rows - row, rows = left < TALL ? left : TALL;
      __m512 sums[TALL][BROAD];
      tile_of(sums, x + row * x_row, x_row, DEEP, at, whole / DEEP, rows, BROAD);
      put_out(sums, p, row, column, rows);
    }
#ifdef MATRIX_UNITS
  return_tiles(&before);
#endif
  return 0;
}
