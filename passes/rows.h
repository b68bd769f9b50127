/* Rows of numbers in fp32 or low precision, read and written as vectors of fp32, and threads that share them.

   Before: `uint16_t` in memory. After: `load(&row, i, n)`, sixteen numbers from column `i` on.

   The macro LOW_FP16 says which low precision (else bf16). Vectors are the compiler's own: a CPU without such wide ones
   gets several. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define MOST_THREADS 256
#define WIDE 16         /* numbers in a vector */
#define BLOCK 128       /* rows whose contributions to the weights are added in fp32, before fp64 takes the sum */
#define PART 4096       /* columns, likewise */
#define ROOM 4          /* fp64 numbers of scratch a column and thread */
#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * WIDE)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDE)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDE)));

/* -- precisions ------------------------------------------------------------------------------------------------- */

typedef enum { NONE, FULL, LOW } Kind;

#ifdef LOW_FP16
INLINE Vector widen(Halves given) {
  Vector found;
#if defined(__AVX512F__)
  __m512 wide = _mm512_cvtph_ps((__m256i)given);
  memcpy(&found, &wide, sizeof found);
#elif defined(__F16C__)
  __m256 wide[2] = {_mm256_cvtph_ps(((__m128i*)&given)[0]), _mm256_cvtph_ps(((__m128i*)&given)[1])};
  memcpy(&found, wide, sizeof found);
#else
  _Float16 each[WIDE];
  memcpy(each, &given, sizeof each);
  for (int k = 0; k < WIDE; ++k) found[k] = (float)each[k];
#endif
  return found;
}
INLINE Halves narrow(Vector given) {
  Halves found;
#if defined(__AVX512F__)
  __m256i low = _mm512_cvtps_ph((__m512)given, _MM_FROUND_TO_NEAREST_INT);
  memcpy(&found, &low, sizeof found);
#elif defined(__F16C__)
  __m256 wide[2];
  memcpy(wide, &given, sizeof wide);
  __m128i low[2] = {_mm256_cvtps_ph(wide[0], _MM_FROUND_TO_NEAREST_INT), _mm256_cvtps_ph(wide[1], _MM_FROUND_TO_NEAREST_INT)};
  memcpy(&found, low, sizeof found);
#else
  _Float16 each[WIDE];
  for (int k = 0; k < WIDE; ++k) each[k] = (_Float16)given[k];
  memcpy(&found, each, sizeof found);
#endif
  return found;
}
#else
INLINE Vector widen(Halves given) {
#if defined(__AVX512F__)
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)given), 16);
#else
  const Bits bits = __builtin_convertvector(given, Bits) << 16;
  return (Vector)bits;
#endif
}
INLINE Halves narrow(Vector given) { /* to the nearest, ties to even */
  const Bits bits = (Bits)given, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
#if defined(__AVX512F__) /* what the compiler makes of the lines below takes twice as many instructions */
  const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)given, (__m512)given, _CMP_UNORD_Q);
  return (Halves)_mm512_cvtepi32_epi16(_mm512_mask_set1_epi32((__m512i)rounded, is_nan, 0x7fc0));
#else
  const Bits is_nan = (Bits)(given != given);
  return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0u & is_nan), Halves);
#endif
}
#endif

typedef struct { /* a matrix of rows without gaps, or nothing */
  void* at;
  int64_t kind;
} Rows;

INLINE Rows row_of(const Rows* all, int64_t row, int64_t width) {
  const Rows none = {0, NONE};
  if (all->kind == NONE) return none;
  const Rows found = {(char*)all->at + row * width * (all->kind == LOW ? 2 : 4), all->kind};
  return found;
}

/* `n` numbers from column `i` on; zeros behind them. `n` is a constant but at the end of a row. */
INLINE Vector load(const Rows* row, int64_t i, int64_t n) {
  Vector found = {0};
  if (row->kind == FULL) {
    memcpy(&found, (const float*)row->at + i, n * 4);
  } else if (row->kind == LOW) {
    Halves low = {0};
    memcpy(&low, (const uint16_t*)row->at + i, n * 2);
    found = widen(low);
  }
  return found;
}

INLINE void store(const Rows* row, int64_t i, int64_t n, Vector given) {
  if (row->kind == FULL) {
    memcpy((float*)row->at + i, &given, n * 4);
  } else if (row->kind == LOW) {
    const Halves low = narrow(given);
    memcpy((uint16_t*)row->at + i, &low, n * 2);
  }
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

typedef struct {
  const void* given;
  double eps, *room;
  int64_t from, to; /* rows */
} Share;

/* -- several threads: each takes whole blocks of rows, so that as good as nothing depends on how many there are ----- */

/* Returns how many took part; `room` becomes their scratch, which the caller frees. 0: there is no memory for it. */
static int64_t in_shares(Share whole, int64_t width, int64_t threads, double** room, void* (*work)(void*)) {
  pthread_t ids[MOST_THREADS];
  Share shares[MOST_THREADS];
  int started[MOST_THREADS] = {0};
  const int64_t blocks = (whole.to + BLOCK - 1) / BLOCK;
  threads = threads < blocks ? threads : blocks;
  threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
  *room = malloc(threads * ROOM * width * sizeof(double));
  if (!*room) return 0;
  for (int64_t t = threads - 1; t >= 0; --t) {
    const int64_t end = blocks * (t + 1) / threads * BLOCK;
    shares[t] = whole;
    shares[t].room = *room + t * ROOM * width;
    shares[t].from = blocks * t / threads * BLOCK;
    shares[t].to = end < whole.to ? end : whole.to;
    started[t] = t && !pthread_create(&ids[t], 0, work, &shares[t]);
    if (!started[t]) work(&shares[t]);
  }
  for (int64_t t = 1; t < threads; ++t)
    if (started[t]) pthread_join(ids[t], 0);
  return threads;
}
