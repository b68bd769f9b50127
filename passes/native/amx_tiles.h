/* bf16 GEMM on the CPU's matrix units (AMX): tiles of 16 rows of 64 bytes, 32 x 32 sums at a time.

   Before: `tile_of` and `tile_to` of gemm_tiles.h, 6 x 64 sums in registers, one pair of each operand at a time. After:
   the same with 32 elements of the depth at a time. Panels are those of gemm_tiles.h, zero-padded in depth to a
   multiple of DEEP. Threads call `borrow_tiles` before and `return_tiles` after: oneDNN and torch cache the tile
   configuration that they set. Sums are fp32; subnormal elements count as zero. */

#include <sys/syscall.h>
#include <unistd.h>

#define TALL 32
#define BROAD 2
#define DEEP 32
#include "gemm_tiles.h"

typedef struct { /* what LDTILECFG reads */
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16]; /* bytes of a row */
  uint8_t rows[16];
} __attribute__((aligned(64))) Tiles;

static inline Tiles borrow_tiles(void) {
  Tiles before, ours = {.palette = 1};
  for (int i = 0; i < 8; i++) ours.bytes[i] = 64, ours.rows[i] = 16;
  _tile_storeconfig(&before);
  _tile_loadconfig(&ours);
  return before;
}

static inline void return_tiles(const Tiles *before) { _tile_loadconfig(before); }

/* Whether the system grants this process the matrix units; existing and future threads get them too. */
int has_tiles(void) {
  const long permission = 0x1023 /* ARCH_REQ_XCOMP_PERM */, data = 18;
  return !syscall(SYS_arch_prctl, permission, data);
}

/* sums [TALL, 16 broad], with row stride `row`, of `rows` rows of a and a panel of `broad` vectors. Rows of a are read
   in whole groups of sixteen; `a_step` is the distance between one DEEP of its depth and the next. Sums of rows beyond
   are garbage. */
INLINE void broad_tile_to(float *sums, int64_t row, const Low *a, int64_t a_row, int64_t a_step, const Low *b,
                          int64_t steps, int64_t rows, int broad) {
  const int64_t b_step = DEEP * 16 * broad, b_row = 64 * broad, to = row * 4;
  const Low *below = a + 16 * a_row;
  const int both = rows > 16;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; k++) {
    _tile_loadd(6, b + k * b_step, b_row);
    _tile_loadd(4, a + k * a_step, 2 * a_row);
    _tile_dpbf16ps(0, 4, 6);
    if (broad > 1) {
      _tile_loadd(7, b + k * b_step + 32, b_row);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (both) {
      _tile_loadd(5, below + k * a_step, 2 * a_row);
      _tile_dpbf16ps(2, 5, 6);
      if (broad > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, to);
  if (broad > 1) _tile_stored(1, sums + 16, to);
  if (both) {
    _tile_stored(2, sums + 16 * row, to);
    if (broad > 1) _tile_stored(3, sums + 16 * row + 16, to);
  }
}

INLINE void tile_to(float *to, int64_t row, const Low *a, int64_t a_row, int64_t a_step, const Low *b, int64_t steps,
                    int64_t rows) {
  broad_tile_to(to, row, a, a_row, a_step, b, steps, rows, BROAD);
}

INLINE void tile_of(__m512 sums[TALL][BROAD], const Low *a, int64_t a_row, int64_t a_step, const Low *b, int64_t steps,
                    int64_t rows, int broad) {
  broad_tile_to((float *)sums, PANEL, a, a_row, a_step, b, steps, rows, broad);
}

/* 32 rows of numbers with row stride `row`, transposed and rounded: to[column][32]. `count` is a multiple of 16. */
static inline void weave(const float *from, int64_t row, int64_t count, Low *to) {
  for (int64_t n = 0; n < count; n += 16) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = paired(from + 2 * i * row + n, from + (2 * i + 1) * row + n);
    turn(r);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + DEEP * (n + i), r[i]);
  }
}
