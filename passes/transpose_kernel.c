/* A matrix of 16-bit numbers turned: columns become rows.

   Before: 4 GB/s, number by number. After: `transpose`, blocks of 32 x 8 in registers, of which each row is a whole line of
   the result: some 15 GB/s.

   native_code.py compiles this file. */

#include "kernel.h"

#define SIDE 8    /* of a block that is turned in registers */
#define LINE 32   /* numbers in a line of memory */
#define NEAR 64   /* columns that are turned before the next rows are: lines of theirs are still in the first cache */

typedef uint16_t Eight __attribute__((vector_size(16)));
typedef uint32_t Four __attribute__((vector_size(16)));
typedef uint64_t Two __attribute__((vector_size(16)));

#if defined(__clang__) || __GNUC__ >= 12
#define MIX(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

typedef struct {
  const uint16_t* from; /* [rows, columns], rows `from_step` apart */
  uint16_t* to;         /* [columns, rows], rows `to_step` apart */
  int64_t rows, columns, from_step, to_step;
} Work;

/* made[j] becomes column j of eight rows. */
INLINE void turn(const uint16_t* from, int64_t step, Eight* made) {
  Eight a[SIDE], b[SIDE];
  Four c[SIDE];
  for (int i = 0; i < SIDE; ++i) memcpy(&a[i], from + i * step, sizeof a[i]);
  for (int i = 0; i < SIDE; i += 2) {
    b[i] = MIX(Eight, a[i], a[i + 1], 0, 8, 1, 9, 2, 10, 3, 11);
    b[i + 1] = MIX(Eight, a[i], a[i + 1], 4, 12, 5, 13, 6, 14, 7, 15);
  }
  for (int half = 0; half < SIDE; half += 4)
    for (int k = 0; k < 2; ++k) {
      const Four low = (Four)b[half + k], high = (Four)b[half + 2 + k];
      c[half + 2 * k] = MIX(Four, low, high, 0, 4, 1, 5);
      c[half + 2 * k + 1] = MIX(Four, low, high, 2, 6, 3, 7);
    }
  for (int j = 0; j < 4; ++j) {
    const Two low = (Two)c[j], high = (Two)c[4 + j];
    made[2 * j] = (Eight)MIX(Two, low, high, 0, 2);
    made[2 * j + 1] = (Eight)MIX(Two, low, high, 1, 3);
  }
}

INLINE void one_by_one(const Work* w, int64_t row, int64_t end_row, int64_t column, int64_t end) {
  for (int64_t j = column; j < end; ++j)
    for (int64_t i = row; i < end_row; ++i) w->to[j * w->to_step + i] = w->from[i * w->from_step + j];
}

static void some_columns(void* of, int64_t column, int64_t end) {
  const Work* w = (const Work*)of;
  for (int64_t near = column; near < end; near += NEAR) {
    const int64_t stop = near + NEAR < end ? near + NEAR : end, whole = near + (stop - near) / SIDE * SIDE;
    int64_t i = 0;
    for (; i + LINE <= w->rows; i += LINE) {
      for (int64_t j = near; j < whole; j += SIDE) {
        Eight made[LINE / SIDE][SIDE];
        for (int k = 0; k < LINE / SIDE; ++k) turn(w->from + (i + k * SIDE) * w->from_step + j, w->from_step, made[k]);
        for (int n = 0; n < SIDE; ++n)
          for (int k = 0; k < LINE / SIDE; ++k)
            memcpy(w->to + (j + n) * w->to_step + i + k * SIDE, &made[k][n], sizeof(Eight));
      }
      one_by_one(w, i, i + LINE, whole, stop);
    }
    one_by_one(w, i, w->rows, near, stop);
  }
}

void transpose(const Work* w, int64_t threads) { do_parts(threads, w->columns, NEAR, some_columns, (void*)w); }
