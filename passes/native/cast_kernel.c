/* Sums of fp32 and low-precision numbers in fp32, and zeros, in one pass over memory.

   Before: a sum of low-precision numbers that upcasts each operand beforehand. After: `add_up`, of several operands, or
   of none (zeros). `past` writes whole lines with non-temporal stores, as `memcpy` does above some size: for results
   that are not read soon. jit_compiler.py compiles this file. */

#define LOW_NAN 0xffffu /* what torch turns NaN into */
#include "low_precision.h"

#define LINE 64     /* bytes that are written at once */
#define AHEAD 512   /* prefetch distance in numbers: the CPU's own prefetcher stops at each page */
#define MOST_TERMS 16

typedef struct {
  const void* at;
  int64_t is_low;
} Term;

typedef struct {
  int64_t count, past, terms;
  void* to;
  Term term[MOST_TERMS];
} Work;

INLINE void put(void* to, Vector line, int64_t past) {
  if (!past) {
    memcpy(to, &line, sizeof line);
    return;
  }
#if defined(__AVX512F__)
  _mm512_stream_ps((float*)to, (__m512)line);
#elif defined(__AVX__)
  __m256 half[2];
  memcpy(half, &line, sizeof half);
  for (int k = 0; k < 2; ++k) _mm256_stream_ps((float*)to + 8 * k, half[k]);
#else
  memcpy(to, &line, sizeof line);
#endif
}

/* Makes non-temporal stores visible to other cores before any later store. */
INLINE void settle(void) {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

/* The first place from `i` on that is aligned to LINE, or `end`; places are of `size` bytes. */
INLINE int64_t aligned(const void* to, int64_t size, int64_t i, int64_t end) {
  const int64_t ahead = (int64_t)(-(uintptr_t)((const char*)to + i * size) % LINE) / size;
  return i + ahead < end ? i + ahead : end;
}

INLINE Vector read(const Term* t, int64_t i, int64_t n) {
  return t->is_low ? read_low((const Low*)t->at + i, n) : read_full((const float*)t->at + i, n);
}

INLINE Vector summed(const Work* w, int64_t i, int64_t n) {
  Vector total = {0};
  if (w->terms) total = read(&w->term[0], i, n);
  for (int64_t k = 1; k < w->terms; ++k) total += read(&w->term[k], i, n);
  return total;
}

INLINE void ask_ahead(const Work* w, int64_t i) {
  for (int64_t k = 0; k < w->terms; ++k)
    __builtin_prefetch((const char*)w->term[k].at + (i + AHEAD) * (w->term[k].is_low ? 2 : 4));
}

static void add_some(void* of, int64_t i, int64_t end) {
  const Work* w = (const Work*)of;
  float* to = (float*)w->to;
  const int64_t first = aligned(to, sizeof *to, i, end);
  if (i < first) write_full(to + i, first - i, summed(w, i, first - i));
  for (i = first; i + WIDE <= end; i += WIDE) {
    ask_ahead(w, i);
    put(to + i, summed(w, i, WIDE), w->past);
  }
  if (i < end) write_full(to + i, end - i, summed(w, i, end - i));
  settle();
}

void add_up(Work* w, int64_t threads) { do_parts(threads, w->count, 4096, add_some, w); }
