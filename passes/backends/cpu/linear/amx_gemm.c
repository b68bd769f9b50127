/* bf16 GEMM on the CPU's matrix units (AMX): fp32 sums, rounded once, bias included; optionally cast to fp32 again.

   Before: oneDNN's GEMM, whose call takes longer than a small matmul, and which transposes column-major operands first;
   and then a cast. After: both operands in panels that tiles read sequentially, on huge pages; a panel of a stays in
   the L1 cache, a block of b in L2; the cast uses non-temporal stores. jit_compiler.py compiles this file. Blocking:
   Goto, van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008. */

#include "low_precision.h"
#define LARGE_PAGES
#include "thread_scratch.h"
#include "amx_tiles.h"

#define SIDE 32            /* rows and columns whose sums the units hold at once: two tiles by two */
#define STEP (SIDE * DEEP) /* elements of a panel for DEEP of the depth: two tiles */
#define NEAR 256           /* depth of a block: a panel of a, 16 KiB */
#define LOW_ROWS 128       /* rows whose partial sums are held between depth blocks */
#define BLOCK 384          /* columns of b at a time */
#define MOST_DEPTH 6144    /* packed at once; if there are more, SOME_DEPTH and DEEP_ROWS */
#define SOME_DEPTH 2048
#define DEEP_ROWS 256
#define OF_A (1 << 22)     /* elements of a that are packed at once */
#define ROOMY(n, by) (((n) + (by)-1) / (by) * (by))

typedef struct { /* out [rows, columns], contiguous, = a [rows, depth] b [depth, columns] + bias [columns] */
  const Low *a, *b, *bias; /* bias: null for none */
  float *of_a;             /* written: [rows], what each row of a adds up to, where its columns lie in rows; or null.
                              Rounded once, too. */
  Low *out;
  int64_t rows, columns, depth;
  int64_t a_row, a_column, b_row, b_column; /* strides in elements; one of the two of each is 1 */
  int64_t threads;
} Product;

/* -- panels ------------------------------------------------------------------------------------------------------ */

/* Rows of an operand with contiguous depth, as panels of 32: tiles of 16 rows by 32 of the depth, transposed if they
   are columns of b, of which tiles hold pairs of the depth. */
INLINE void lay_lines(const Low *from, int64_t line, int64_t lines, int64_t depth, int turned, Low *to) {
  const int64_t steps = ROOMY(depth, DEEP) / DEEP;
  for (int64_t n = 0; n < ROOMY(lines, SIDE); n += 16)
    for (int64_t s = 0; s < steps; ++s) {
      const __mmask32 there = first(depth - s * DEEP);
      Low *tile = to + (n / SIDE * steps + s) * STEP + n % SIDE * DEEP;
      __m512i r[16];
      for (int i = 0; i < 16; ++i)
        r[i] = n + i < lines ? _mm512_maskz_loadu_epi16(there, from + (n + i) * line + s * DEEP)
                             : _mm512_setzero_si512();
      if (turned) turn(r);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + i * DEEP, r[i]);
    }
}

/* The same for an operand whose rows are adjacent: pairs of the depth, transposed if they are rows of a. Adds the sum
   of each row to `sums`, unless that is null. */
INLINE void lay_depth(const Low *from, int64_t one_deeper, int64_t lines, int64_t depth, int turned, float *sums,
                      Low *to) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  const int64_t steps = ROOMY(depth, DEEP) / DEEP;
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t n = 0; n < lines; n += SIDE) {
      const __mmask32 there = first(lines - n);
      Low *tile = to + (n / SIDE * steps + s) * STEP;
      __m512i low[16], high[16];
      for (int i = 0; i < 16; ++i) {
        const int64_t k = s * DEEP + 2 * i;
        const __m512i one = _mm512_maskz_loadu_epi16(k < depth ? there : 0, from + k * one_deeper + n);
        const __m512i two = _mm512_maskz_loadu_epi16(k + 1 < depth ? there : 0, from + (k + 1) * one_deeper + n);
        interleave(one, two, low + i, high + i);
      }
      if (sums) {
        __m512 left = _mm512_load_ps(sums + n), right = _mm512_load_ps(sums + n + 16);
        for (int i = 0; i < 16; ++i) {
          left = _mm512_dpbf16_ps(left, (__m512bh)low[i], ones);
          right = _mm512_dpbf16_ps(right, (__m512bh)high[i], ones);
        }
        _mm512_store_ps(sums + n, left);
        _mm512_store_ps(sums + n + 16, right);
      }
      if (turned) turn(low), turn(high);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + i * DEEP, low[i]);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + STEP / 2 + i * DEEP, high[i]);
    }
}

/* Blocks of NEAR in depth, each with all of its panels. */
INLINE void lay_out(const Low *from, int64_t line, int64_t one_deeper, int64_t lines, int64_t depth, int of_b,
                    float *sums, Low *to) {
  for (int64_t k = 0; k < depth; k += NEAR, to += NEAR * ROOMY(lines, SIDE)) {
    const int64_t deep = depth - k < NEAR ? depth - k : NEAR;
    if (one_deeper == 1)
      lay_lines(from + k, line, lines, deep, of_b, to);
    else
      lay_depth(from + k * one_deeper, one_deeper, lines, deep, !of_b, sums, to);
  }
}

/* -- sums ---------------------------------------------------------------------------------------------------------- */

/* Four consecutive tiles of sums, of two panels; added to the old sums unless `fresh`. `ahead` is prefetched into the
   L2 cache meanwhile. */
INLINE void sum_up(float *sums, const Low *a, const Low *b, int64_t steps, int fresh, const Low *ahead) {
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    _tile_loadd(2, sums + 512, 64);
    _tile_loadd(3, sums + 768, 64);
  }
  for (int64_t s = 0; s < steps; ++s, a += STEP, b += STEP, ahead += 2 * DEEP) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + STEP / 2, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + STEP / 2, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _mm_prefetch((const char *)ahead, _MM_HINT_T1);
    _mm_prefetch((const char *)(ahead + DEEP), _MM_HINT_T1);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

INLINE const float *row_of(const float *sums, int64_t i) { return sums + i / 16 * 512 + i % 16 * 16; }

INLINE __m512 widen_half(__m512i low, int half) {
  const __m256i part = half ? _mm512_extracti64x4_epi64(low, 1) : _mm512_castsi512_si256(low);
  return (__m512)widen_all((Halves)part);
}

INLINE void put_out(const Product *p, const float *sums, int64_t row, int64_t column) {
  const int64_t rows = p->rows - row < SIDE ? p->rows - row : SIDE, columns = p->columns - column;
  const __mmask32 there = first(columns);
  const __m512i added = p->bias ? _mm512_maskz_loadu_epi16(there, p->bias + column) : _mm512_setzero_si512();
  const __m512 left = widen_half(added, 0), right = widen_half(added, 1);
  for (int64_t i = 0; i < rows; ++i) {
    const float *of = row_of(sums, i);
    const __m512 one = _mm512_add_ps(_mm512_load_ps(of), left), two = _mm512_add_ps(_mm512_load_ps(of + 256), right);
    const __m512i low = (__m512i)_mm512_cvtne2ps_pbh(two, one);
    _mm512_mask_storeu_epi16(p->out + (row + i) * p->columns + column, there, low);
  }
}

/* -- blocks ---------------------------------------------------------------------------------------------------------- */

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct { /* a part of the matmul: packed parts of a and b, and partial sums */
  const Product *p;
  int64_t row, rows, column, columns, from_depth, depth;
  const Low *a, *b;
  float *sums;
} Block;

/* Rows `from` on of a block, as many as partial sums are held for; those of row `begin` come first in `sums`. */
INLINE void multiply_rows(const Block *w, int64_t from, int64_t rows, int64_t begin) {
  const int64_t of_a = ROOMY(w->rows, SIDE), of_b = ROOMY(w->columns, SIDE);
  for (int64_t k = 0; k < w->depth; k += NEAR) {
    const int64_t deep = ROOMY(least(NEAR, w->depth - k), DEEP), steps = deep / DEEP;
    const int fresh = !(w->from_depth + k), last = w->from_depth + k + NEAR >= w->p->depth;
    for (int64_t i = from; i < from + rows; i += SIDE) {
      const Low *a = w->a + k * of_a + i * deep, *ahead = a + SIDE * deep;
      for (int64_t j = 0; j < w->columns; j += SIDE, ahead += steps * 2 * DEEP) {
        float *sums = fresh && last ? w->sums : w->sums + (i - begin) * of_b + j * SIDE;
        sum_up(sums, a, w->b + k * of_b + j * deep, steps, fresh, ahead);
        if (last) put_out(w->p, sums, w->row + i, w->column + j);
      }
    }
  }
}

typedef struct {
  const Product *p;
  int64_t by_rows;
  _Atomic int failed;
} Shared;

static void multiply(Shared *all, int64_t from_row, int64_t to_row, int64_t from_column, int64_t to_column) {
  const Product *p = all->p;
  const int64_t depth = ROOMY(p->depth, DEEP), at_once = depth > MOST_DEPTH ? SOME_DEPTH : depth;
  const int64_t room = at_once < depth ? DEEP_ROWS : ROOMY(OF_A / (at_once + 1) + 1, SIDE);
  const int64_t rows = least(room, ROOMY(to_row - from_row, SIDE));
  const int64_t columns = least(BLOCK, ROOMY(to_column - from_column, SIDE));
  const int64_t waiting = (at_once < depth ? rows : least(rows, LOW_ROWS)) * columns;
  Low *own = own_memory((rows + columns) * at_once + 2 * (waiting + rows));
  if (!own) {
    all->failed = 1;
    return;
  }
  float *sums = (float *)own, *of_a = sums + waiting;
  Low *a = (Low *)(of_a + rows), *b = a + rows * at_once;
  const Tiles before = borrow_tiles();
  for (int64_t r = from_row; r < to_row; r += rows) {
    const int64_t high = least(rows, to_row - r);
    memset(of_a, 0, rows * sizeof(float));
    for (int64_t c = from_column; c < to_column; c += columns)
      for (int64_t k = 0; k < p->depth; k += at_once) {
        const Block w = {p, r, high, c, least(columns, to_column - c), k, least(at_once, p->depth - k), a, b, sums};
        if (c == from_column || at_once < depth)
          lay_out(p->a + r * p->a_row + k * p->a_column, p->a_row, p->a_column, high, w.depth, 0, c ? 0 : of_a, a);
        lay_out(p->b + c * p->b_column + k * p->b_row, p->b_column, p->b_row, w.columns, w.depth, 1, 0, b);
        for (int64_t i = 0; i < high; i += LOW_ROWS)
          multiply_rows(&w, i, least(LOW_ROWS, high - i), at_once < depth ? 0 : i);
      }
    for (int64_t i = 0; p->of_a && !from_column && i < high; ++i) p->of_a[r + i] = widen(narrow(of_a[i]));
  }
  return_tiles(&before);
}

static void some(void *of, int64_t from, int64_t to) {
  Shared *all = of;
  if (all->by_rows)
    multiply(all, from, to, 0, all->p->columns);
  else
    multiply(all, 0, all->p->rows, from, to);
}

/* Returns 1 if out of memory. */
int product(const Product *p) {
  Shared all = {p, p->rows > p->columns, 0};
  do_parts(p->threads, all.by_rows ? p->rows : p->columns, SIDE, some, &all);
  return all.failed;
}
