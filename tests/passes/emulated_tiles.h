/* Matrix units in plain C, for machines that have none: what AMX does with tiles of 16 rows of 64 bytes, number by number.

   Included before a source that is built with MATRIX_UNITS. Sums round behind each product, the units behind each pair. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static __thread struct {
  uint8_t bytes[16][64];
} emulated[8];
static __thread uint8_t emulated_config[64];

static inline float emulated_wide(uint16_t low) {
  const uint32_t bits = (uint32_t)((low & 0x7f80) ? low : low & 0x8000) << 16; /* subnormal elements count as zero */
  float found;
  memcpy(&found, &bits, 4);
  return found;
}

static inline void emulated_product(int to, int a, int b) {
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float sum;
      memcpy(&sum, emulated[to].bytes[m] + 4 * n, 4);
      for (int k = 0; k < 16; k++)
        for (int e = 0; e < 2; e++) {
          uint16_t left, right;
          memcpy(&left, emulated[a].bytes[m] + 4 * k + 2 * e, 2);
          memcpy(&right, emulated[b].bytes[k] + 4 * n + 2 * e, 2);
          sum += emulated_wide(left) * emulated_wide(right);
        }
      memcpy(emulated[to].bytes[m] + 4 * n, &sum, 4);
    }
}

static inline void emulated_load(int to, const void *from, int64_t row) {
  for (int i = 0; i < 16; i++) memcpy(emulated[to].bytes[i], (const char *)from + i * row, 64);
}

static inline void emulated_store(int from, void *to, int64_t row) {
  for (int i = 0; i < 16; i++) memcpy((char *)to + i * row, emulated[from].bytes[i], 64);
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_zero(t) memset(&emulated[t], 0, sizeof emulated[t])
#define _tile_loadd(t, from, row) emulated_load(t, from, row)
#define _tile_stored(t, to, row) emulated_store(t, to, row)
#define _tile_dpbf16ps(t, a, b) emulated_product(t, a, b)
#define _tile_storeconfig(to) memcpy(to, emulated_config, 64)
#define _tile_loadconfig(from) memcpy(emulated_config, from, 64)
