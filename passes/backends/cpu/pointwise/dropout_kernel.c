/* Dropout of elements in memory: the draws of torch's generator, one bit each, applied to values and gradients.

   Before: a double drawn per element, one after another, and compared; the resulting noise stored, divided, multiplied
   by and saved for backward. After: the same draws, a vector at a time, and one bit of each saved. The generator is
   mt19937 as in torch (aten/src/ATen/core/MT19937RNGEngine.h); an element is kept if 53 bits of two words are below its
   probability (uniform_real and bernoulli, aten/src/ATen/core/TransformationHelper.h). jit_compiler.py compiles this
   file. */

#define LOW_NAN 0xffffu /* what torch turns NaN into */
#include "low_precision.h"

#define WORDS 624 /* of the generator's state */
#define APART 397
#define OF_A_BYTE 16 /* words: two for each of eight numbers */

typedef struct { /* what torch.Generator.get_state() begins with (CPUGeneratorImplStateLegacy) */
  uint64_t seed;
  int32_t left, seeded;
  uint64_t next, words[WORDS];
} Generator;

INLINE uint32_t twisted(uint32_t u, uint32_t v) {
  return (((u & 0x80000000u) | (v & 0x7fffffffu)) >> 1) ^ ((v & 1u) * 0x9908b0dfu);
}

static void twist(uint32_t* s) {
  for (int i = 0; i < WORDS - APART; ++i) s[i] = s[i + APART] ^ twisted(s[i], s[i + 1]);
  for (int i = WORDS - APART; i < WORDS - 1; ++i) s[i] = s[i + APART - WORDS] ^ twisted(s[i], s[i + 1]);
  s[WORDS - 1] = s[APART - 1] ^ twisted(s[WORDS - 1], s[0]);
}

static void temper(const uint32_t* from, int64_t count, uint32_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t y = from[i];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    to[i] = y ^ (y >> 18);
  }
}

/* Which of eight elements are kept: one bit each. The first word of an element is the upper half of the number
   compared. */
INLINE uint8_t kept_of(const uint32_t* words, uint64_t below) {
  const uint64_t some = ((uint64_t)1 << 53) - 1;
#if defined(__AVX512F__)
  const __m512i both = _mm512_rol_epi64(_mm512_loadu_si512(words), 32);
  return _mm512_cmplt_epu64_mask(_mm512_and_si512(both, _mm512_set1_epi64(some)), _mm512_set1_epi64(below));
#else
  uint8_t found = 0;
  for (int k = 0; k < 8; ++k)
    found |= (uint8_t)((((uint64_t)words[2 * k] << 32 | words[2 * k + 1]) & some) < below) << k;
  return found;
#endif
}

/* Draws for `count` elements, each kept if 53 bits are below `below`: one bit each, then zeros. */
void draw(Generator* g, uint64_t below, int64_t count, uint8_t* kept) {
  uint32_t state[WORDS], words[OF_A_BYTE + WORDS];
  for (int i = 0; i < WORDS; ++i) state[i] = (uint32_t)g->words[i];
  int64_t left = g->left - 1, next = g->next, have = 0;
  for (int64_t wanted = 2 * count; wanted;) {
    if (!left) {
      twist(state);
      left = WORDS, next = 0;
    }
    const int64_t taken = wanted < left ? wanted : left;
    temper(state + next, taken, words + have);
    next += taken, left -= taken, wanted -= taken, have += taken;
    const int64_t bytes = have / OF_A_BYTE;
    for (int64_t i = 0; i < bytes; ++i) *kept++ = kept_of(words + i * OF_A_BYTE, below);
    have -= bytes * OF_A_BYTE;
    memmove(words, words + bytes * OF_A_BYTE, have * sizeof *words);
  }
  if (have) *kept = kept_of(words, below) & ((1u << have / 2) - 1);
  for (int i = 0; i < WORDS; ++i) g->words[i] = state[i];
  g->left = left + 1, g->next = next;
}

typedef struct {
  int64_t count;
  const void* from;
  void* to;
  const uint8_t* kept; /* and some bytes more */
  float scale;
} Work;

/* `scale` where an element is kept, else 0: torch's noise, by which an element is multiplied, NaN included. */
INLINE Vector noise_at(const Work* w, int64_t i) {
  const Bits place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  uint16_t kept;
  memcpy(&kept, w->kept + i / 8, sizeof kept);
  const Vector scale = w->scale - (Vector){0};
  return (Vector)((Bits)scale & -(((Bits){0} + kept) >> place & 1));
}

static void some_low(void* of, int64_t i, int64_t end) {
  const Work* w = (const Work*)of;
  for (; i + WIDE <= end; i += WIDE)
    write_low((Low*)w->to + i, WIDE, read_low((const Low*)w->from + i, WIDE) * noise_at(w, i));
  if (i < end) write_low((Low*)w->to + i, end - i, read_low((const Low*)w->from + i, end - i) * noise_at(w, i));
}

static void some_full(void* of, int64_t i, int64_t end) {
  const Work* w = (const Work*)of;
  for (; i + WIDE <= end; i += WIDE)
    write_full((float*)w->to + i, WIDE, read_full((const float*)w->from + i, WIDE) * noise_at(w, i));
  if (i < end) write_full((float*)w->to + i, end - i, read_full((const float*)w->from + i, end - i) * noise_at(w, i));
}

void scale_low(Work* w, int64_t threads) { do_parts(threads, w->count, 4096, some_low, w); }

void scale_full(Work* w, int64_t threads) { do_parts(threads, w->count, 4096, some_full, w); }
