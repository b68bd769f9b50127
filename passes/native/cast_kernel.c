/* Casts between fp32 and low precision, fp32 sums, and zeros, in one pass over memory; for image weights, with a change
   of layout as well.

   Before: a copy that reads each cache line of its result before it overwrites it; a sum of low-precision numbers that
   upcasts each operand beforehand. After: `add_up`, of one operand (a cast), of several, or of none (zeros); and
   `round_off`. `past` writes whole lines with non-temporal stores, as `memcpy` does above some size: for results that
   are not read soon. Between layouts, a copy goes element by element: `channels_first` and `channels_last` process a
   vector of channels in all places. jit_compiler.py compiles this file. */

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

static void narrow_some(void* of, int64_t i, int64_t end) {
  const Work* w = (const Work*)of;
  const float* from = (const float*)w->term[0].at;
  Low* to = (Low*)w->to;
  for (const int64_t first = aligned(to, sizeof *to, i, end); i < first; ++i) to[i] = narrow(from[i]);
  for (; i + 2 * WIDE <= end; i += 2 * WIDE) {
    Halves low[2];
    for (int k = 0; k < 2; ++k) {
      __builtin_prefetch(from + i + AHEAD + k * WIDE);
      low[k] = narrow_all(read_full(from + i + k * WIDE, WIDE));
    }
    Vector line;
    memcpy(&line, low, sizeof line);
    put(to + i, line, w->past);
  }
  for (; i < end; ++i) to[i] = narrow(from[i]);
  settle();
}

void add_up(Work* w, int64_t threads) { do_parts(threads, w->count, 4096, add_some, w); }

void round_off(Work* w, int64_t threads) { do_parts(threads, w->count, 4096, narrow_some, w); }

/* -- layouts of a convolution's weight ------------------------------------------------------------------------------ */

#define MOST_PLACES 64 /* of a kernel */

typedef struct {
  int64_t outputs, channels, places; /* [outputs, channels, places]; channels_last: [outputs, places, channels] */
  Term from;
  void* to; /* fp32 where it is channels_first, else low precision */
} Layout;

/* A vector of channels at a time, in all places: read in one layout, written in the other. */
INLINE void lay_out(const Layout* w, int64_t n, int64_t end, int last) {
  const int64_t places = w->places, channels = w->channels;
  float block[WIDE * MOST_PLACES];
  for (; n < end; ++n)
    for (int64_t c = 0; c < channels; c += WIDE) {
      const int64_t some = channels - c < WIDE ? channels - c : WIDE, first = (n * channels + c) * places;
      if (last) memcpy(block, (const float*)w->from.at + first, some * places * sizeof *block);
      for (int64_t p = 0; p < places; ++p) {
        const int64_t at = (n * places + p) * channels + c;
        Vector found = {0};
        if (last) {
          for (int64_t k = 0; k < some; ++k) found[k] = block[k * places + p];
          write_low((Low*)w->to + at, some, found);
        } else {
          found = read(&w->from, at, some);
          for (int k = 0; k < WIDE; ++k) block[k * places + p] = found[k];
        }
      }
      if (!last) memcpy((float*)w->to + first, block, some * places * sizeof *block);
    }
}

static void some_first(void* of, int64_t n, int64_t end) { lay_out((const Layout*)of, n, end, 0); }

static void some_last(void* of, int64_t n, int64_t end) { lay_out((const Layout*)of, n, end, 1); }

void channels_first(Layout* w, int64_t threads) { do_parts(threads, w->outputs, 1, some_first, w); }

void channels_last(Layout* w, int64_t threads) { do_parts(threads, w->outputs, 1, some_last, w); }
