/* Elementwise functions of low precision by tables of all 65,536 values, and their gradients.

   Before: each element upcast, an error function or a hyperbolic tangent of it, and the result rounded. After: a lookup
   of what was computed and rounded once for every value. jit_compiler.py compiles this file. */

#define LOW_NAN 0xffffu /* what torch turns NaN into */
#include "low_precision.h"

typedef struct {
  int64_t count;
  const Low *from, *grad;
  const void* table; /* numbers are read as pairs: there is one more than are asked for */
  Low* to;
} Work;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

INLINE __m512i places(const Low* from, __mmask16 some) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from));
}

static void look_up_some(void* of, int64_t i, int64_t end) {
  const Work* w = (const Work*)of;
  for (; i < end; i += WIDE) {
    const __mmask16 some = end - i < WIDE ? (__mmask16)((1u << (end - i)) - 1) : 0xffff;
    const __m512i found = _mm512_i32gather_epi32(places(w->from + i, some), w->table, sizeof(Low));
    _mm256_mask_storeu_epi16(w->to + i, some, _mm512_cvtepi32_epi16(found));
  }
}

static void slope_some(void* of, int64_t i, int64_t end) {
  const Work* w = (const Work*)of;
  for (; i < end; i += WIDE) {
    const int64_t n = end - i < WIDE ? end - i : WIDE;
    const __m512i at = places(w->from + i, (__mmask16)((1u << n) - 1));
    write_low(w->to + i, n, read_low(w->grad + i, n) * (Vector)_mm512_i32gather_ps(at, w->table, sizeof(float)));
  }
}

#else

INLINE uint16_t place(Low x) {
  uint16_t found;
  memcpy(&found, &x, sizeof found);
  return found;
}

static void look_up_some(void* of, int64_t i, int64_t end) {
  const Work* w = (const Work*)of;
  for (; i < end; ++i) w->to[i] = ((const Low*)w->table)[place(w->from[i])];
}

static void slope_some(void* of, int64_t i, int64_t end) {
  const Work* w = (const Work*)of;
  for (; i < end; ++i) w->to[i] = narrow(widen(w->grad[i]) * ((const float*)w->table)[place(w->from[i])]);
}

#endif

void look_up(const Work* w, int64_t threads) { do_parts(threads, w->count, 4096, look_up_some, (void*)w); }

void times_slope(const Work* w, int64_t threads) { do_parts(threads, w->count, 4096, slope_some, (void*)w); }
