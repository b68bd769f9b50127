/* Common parts of our C: the low precision, scalar and vector access, and threads.

   Before: a `widen` and a `narrow` in each source. After: #include "low_precision.h". `Low` is bf16, or fp16 with
   LOW_FP16. Inductor also compiles this as C++. */

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define MOST_THREADS 256
#define WIDE 16 /* numbers in a vector; the compiler splits such vectors for CPUs with narrower ones */

typedef float Vector __attribute__((vector_size(4 * WIDE)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDE)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDE)));

/* -- precisions ------------------------------------------------------------------------------------------------- */

#ifdef LOW_FP16

typedef _Float16 Low;

INLINE float widen(Low x) { return (float)x; }
INLINE Low narrow(float x) { return (Low)x; }

INLINE Vector widen_all(Halves given) {
  Vector found;
#if defined(__AVX512F__)
  __m512 wide = _mm512_cvtph_ps((__m256i)given);
  memcpy(&found, &wide, sizeof found);
#elif defined(__F16C__)
  __m256 wide[2] = {_mm256_cvtph_ps(((__m128i*)&given)[0]), _mm256_cvtph_ps(((__m128i*)&given)[1])};
  memcpy(&found, wide, sizeof found);
#else
  Low each[WIDE];
  memcpy(each, &given, sizeof each);
  for (int k = 0; k < WIDE; ++k) found[k] = widen(each[k]);
#endif
  return found;
}

INLINE Halves narrow_all(Vector given) {
  Halves found;
#if defined(__AVX512F__)
  __m256i low = _mm512_cvtps_ph((__m512)given, _MM_FROUND_TO_NEAREST_INT);
  memcpy(&found, &low, sizeof found);
#elif defined(__F16C__)
  __m256 wide[2];
  memcpy(wide, &given, sizeof wide);
  __m128i low[2];
  for (int k = 0; k < 2; ++k) low[k] = _mm256_cvtps_ph(wide[k], _MM_FROUND_TO_NEAREST_INT);
  memcpy(&found, low, sizeof found);
#else
  Low each[WIDE];
  for (int k = 0; k < WIDE; ++k) each[k] = narrow(given[k]);
  memcpy(&found, each, sizeof found);
#endif
  return found;
}

#else

typedef uint16_t Low;
#ifndef LOW_NAN
#define LOW_NAN 0x7fc0u
#endif

INLINE float widen(Low x) {
  const uint32_t bits = (uint32_t)x << 16;
  float found;
  memcpy(&found, &bits, sizeof found);
  return found;
}

INLINE Low narrow(float x) { /* to the nearest, ties to even */
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (Low)(x != x ? LOW_NAN : rounded);
}

INLINE Vector widen_all(Halves given) {
#if defined(__AVX512F__)
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)given), 16);
#else
  const Bits bits = __builtin_convertvector(given, Bits) << 16;
  return (Vector)bits;
#endif
}

INLINE Halves narrow_all(Vector given) { /* likewise */
  const Bits bits = (Bits)given, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
#if defined(__AVX512F__) /* for the lines below the compiler emits twice as many instructions */
  const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)given, (__m512)given, _CMP_UNORD_Q);
  return (Halves)_mm512_cvtepi32_epi16(_mm512_mask_set1_epi32((__m512i)rounded, is_nan, LOW_NAN));
#else
  const Bits is_nan = (Bits)(given != given);
  return __builtin_convertvector((rounded & ~is_nan) | (LOW_NAN & is_nan), Halves);
#endif
}

#endif

/* -- parts of a vector: `n` numbers and zeros behind them; `n` is a constant but at the end of a row ---------------- */

#if defined(__AVX512BW__) && defined(__AVX512VL__)

INLINE Vector read_full(const float* from, int64_t n) {
  return (Vector)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), from);
}

INLINE Vector read_low(const Low* from, int64_t n) {
  return widen_all((Halves)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), from));
}

INLINE void write_full(float* to, int64_t n, Vector given) {
  _mm512_mask_storeu_ps(to, (__mmask16)((1u << n) - 1), (__m512)given);
}

INLINE void write_low(Low* to, int64_t n, Vector given) {
  _mm256_mask_storeu_epi16(to, (__mmask16)((1u << n) - 1), (__m256i)narrow_all(given));
}

#else

INLINE Vector read_full(const float* from, int64_t n) {
  Vector found = {0};
  memcpy(&found, from, n * sizeof(float));
  return found;
}

INLINE Vector read_low(const Low* from, int64_t n) {
  Halves low = {0};
  memcpy(&low, from, n * sizeof(Low));
  return widen_all(low);
}

INLINE void write_full(float* to, int64_t n, Vector given) { memcpy(to, &given, n * sizeof(float)); }

INLINE void write_low(Low* to, int64_t n, Vector given) {
  const Halves low = narrow_all(given);
  memcpy(to, &low, n * sizeof(Low));
}

#endif

/* -- threads ---------------------------------------------------------------------------------------------------- */

/* How many threads to use where `wanted` are asked for. */
INLINE int64_t threads_of(int64_t wanted) { return wanted < 1 ? 1 : wanted > MOST_THREADS ? MOST_THREADS : wanted; }

/* The OpenMP runtime that torch uses, if this process has one. Its threads exist, and spin after a task long enough
   that a second pool, on as many cores, would compete with them. */
typedef struct {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned); /* GOMP_parallel */
  int (*number)(void), (*count)(void);                          /* omp_get_thread_num, omp_get_num_threads */
} OpenMP;
static OpenMP openmp;
#ifndef __cplusplus
void use_openmp(const OpenMP* given) { openmp = *given; }
#endif

typedef struct {
  char* shares;
  size_t size;
  int64_t count;
  void* (*work)(void*);
} Shares;

static inline void do_some(void* given) {
  const Shares* all = (const Shares*)given;
  for (int64_t t = openmp.number(); t < all->count; t += openmp.count()) all->work(all->shares + t * all->size);
}

/* Runs `count` tasks of `size` bytes each, one per thread: the first, and those without a thread, in the caller's. */
static inline void do_shares(void* shares, size_t size, int64_t count, void* (*work)(void*)) {
  if (count > 1 && openmp.parallel) {
    Shares all = {(char*)shares, size, count, work};
    openmp.parallel(do_some, &all, (unsigned)count, 0);
    return;
  }
  pthread_t ids[MOST_THREADS];
  int started[MOST_THREADS] = {0};
  for (int64_t t = count - 1; t >= 0; --t) {
    void* share = (char*)shares + t * size;
    started[t] = t && !pthread_create(&ids[t], 0, work, share);
    if (!started[t]) work(share);
  }
  for (int64_t t = 1; t < count; ++t)
    if (started[t]) pthread_join(ids[t], 0);
}

typedef struct {
  void (*work)(void* of, int64_t from, int64_t to);
  void* of;
  int64_t from, to;
} Part;

static inline void* do_part(void* given) {
  Part* p = (Part*)given;
  p->work(p->of, p->from, p->to);
  return 0;
}

/* Runs places 0 to `count`, split among the threads into ranges that begin at a multiple of `by`. */
static inline void do_parts(int64_t threads, int64_t count, int64_t by, void (*work)(void*, int64_t, int64_t), void* of) {
  const int64_t whole = (count + by - 1) / by, wanted = threads_of(threads), parts = wanted < whole ? wanted : whole;
  if (parts <= 1) {
    work(of, 0, count);
    return;
  }
  Part each[MOST_THREADS];
  for (int64_t t = 0; t < parts; ++t) {
    const int64_t end = whole * (t + 1) / parts * by;
    each[t].work = work, each[t].of = of, each[t].from = whole * t / parts * by, each[t].to = end < count ? end : count;
  }
  do_shares(each, sizeof(Part), parts, do_part);
}
