/* Rows of fp32 or low-precision numbers, read and written as fp32 vectors, and threads that share them.

   Before: `uint16_t` in memory. After: `load(&row, i, n)`, sixteen numbers from column `i` on. low_precision.h defines
   low precision and vectors. */

#include <math.h>
#include <stdlib.h>

#include "low_precision.h"

#define BLOCK 128 /* rows whose contributions to the weights are summed in fp32 before they are added to the fp64 sum */
#define PART 4096 /* columns, likewise */
#define ROOM 4    /* fp64 numbers of scratch a column and thread */

typedef enum { NONE, FULL, LOW } Kind;

typedef struct { /* a matrix of contiguous rows, or nothing */
  void* at;
  int64_t kind;
} Rows;

INLINE Rows row_of(const Rows* all, int64_t row, int64_t width) {
  const Rows none = {0, NONE};
  if (all->kind == NONE) return none;
  const Rows found = {(char*)all->at + row * width * (all->kind == LOW ? 2 : 4), all->kind};
  return found;
}

/* `n` numbers from column `i` on, then zeros. */
INLINE Vector load(const Rows* row, int64_t i, int64_t n) {
  const Vector none = {0};
  if (row->kind == FULL) return read_full((const float*)row->at + i, n);
  return row->kind == LOW ? read_low((const Low*)row->at + i, n) : none;
}

INLINE void store(const Rows* row, int64_t i, int64_t n, Vector given) {
  if (row->kind == FULL) write_full((float*)row->at + i, n, given);
  else if (row->kind == LOW) write_low((Low*)row->at + i, n, given);
}

INLINE double sum_of(Vector lanes) {
  double sum = 0;
  for (int k = 0; k < WIDE; ++k) sum += lanes[k];
  return sum;
}

/* a * b + c, rounded once where the CPU can. */
INLINE Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

typedef int32_t Whole __attribute__((vector_size(4 * WIDE)));

/* exp of numbers that are zero or less, by Cody and Waite's reduction and a polynomial of degree six, to within two
   units in the last place. A NaN stays NaN. */
INLINE Vector exponential(Vector x) {
  const Vector shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
  const Vector r = fused(n, (Vector){0} - 1.42860677e-6f, fused(n, (Vector){0} - 0.693145752f, x));
  Vector p = (Vector){0} + 1.3888889e-3f;
  p = fused(p, r, (Vector){0} + 8.3333333e-3f);
  p = fused(p, r, (Vector){0} + 4.1666667e-2f);
  p = fused(p, r, (Vector){0} + 1.6666667e-1f);
  p = fused(p, r, (Vector){0} + 0.5f);
  p = fused(p, r, (Vector){0} + 1.0f);
  p = fused(p, r, (Vector){0} + 1.0f);
  const Vector scale = (Vector)(((Whole)shifted - 0x4b400000 + 127) << 23);
  return (Vector)((Bits)(p * scale) & ~(Bits)(x < -87.0f));
}

/* The elementwise maximum; of a NaN and a number, the number. */
INLINE Vector larger(Vector a, Vector b) {
#if defined(__AVX512F__)
  return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
#else
  const Bits above = (Bits)(a > b);
  return (Vector)(((Bits)a & above) | ((Bits)b & ~above));
#endif
}

/* Iterates over a row, vector by vector: `i` is the column, and `n` the count of numbers. */
#define EACH(begin, end, ...)                                               \
  do {                                                                      \
    int64_t i = (begin);                                                    \
    for (; i + WIDE <= (end); i += WIDE) { enum { n = WIDE }; __VA_ARGS__ } \
    if (i < (end)) { const int64_t n = (end) - i; __VA_ARGS__ }             \
  } while (0)

typedef struct {
  const void* given;
  double eps, *room;
  int64_t from, to; /* rows */
} Share;

/* -- several threads: each takes whole blocks of rows, so that as good as nothing depends on how many there are ----- */

/* Returns how many threads took part; `room` becomes their scratch, which the caller frees. 0: out of memory. */
static int64_t in_shares(Share whole, int64_t width, int64_t threads, double** room, void* (*work)(void*)) {
  Share shares[MOST_THREADS];
  const int64_t blocks = (whole.to + BLOCK - 1) / BLOCK;
  threads = threads_of(threads < blocks ? threads : blocks);
  *room = malloc(threads * ROOM * width * sizeof(double));
  if (!*room) return 0;
  for (int64_t t = 0; t < threads; ++t) {
    const int64_t end = blocks * (t + 1) / threads * BLOCK;
    shares[t] = whole;
    shares[t].room = *room + t * ROOM * width;
    shares[t].from = blocks * t / threads * BLOCK;
    shares[t].to = end < whole.to ? end : whole.to;
  }
  do_shares(shares, sizeof *shares, threads, work);
  return threads;
}

/* Adds the fp32 sums of a block of rows to the fp64 totals, and resets them. */
static inline void flush(const Rows* block, double* sums, int64_t width) {
  float* from = (float*)block->at;
  for (int64_t i = 0; i < width; ++i) sums[i] += from[i];
  memset(from, 0, width * sizeof *from);
}

/* The sum over the threads' scratch of the number at offset `at` in each. */
INLINE double over_threads(const double* room, int64_t width, int64_t threads, int64_t at) {
  double sum = 0;
  for (int64_t t = 0; t < threads; ++t) sum += room[t * ROOM * width + at];
  return sum;
}
