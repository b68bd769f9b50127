/* bf16 attention on CPUs with AVX512_BF16, or with BACKWARD its gradients: a few queries at a time against all keys of
   a head; with MATRIX_UNITS on AMX, 32 queries at a time.

   Before: scores, probabilities and their gradients written to memory, or a blocked kernel. After: a few rows of scores
   in the L1 cache. Scores, probabilities, and sums are fp32; probabilities and the gradients of scores are rounded once
   to bf16 before they are multiplied, as torch's kernel does. */

#include "vector_rows.h"

#ifdef MATRIX_UNITS
#include "amx_tiles.h"
#else
#define TALL 6 /* queries, or keys, at a time */
#include "gemm_tiles.h"
#endif

typedef struct { /* [batch, heads, rows, width], with contiguous rows */
  char *at;
  int64_t batch, head, row; /* strides in elements */
} Heads;

typedef struct {
  int64_t batches, heads, groups, queries, keys, width, causal;
  int64_t gradients; /* whether these gradients are requested; with BACKWARD only */
  Heads query, key, value, out, grad, grad_query, grad_key, grad_value;
  Heads mask, grad_mask; /* the second in fp32, with BACKWARD: null without gradient; the kernel adds to it */
  int64_t mask_kind, mask_step; /* Kind; elements from one key to the next: 1, or 0 for one number a row */
  const uint8_t *kept; /* null, or which probabilities dropout keeps: bits of [batch, heads, queries, keys], and more */
  double scale, kept_scale;
} Attention;

#define ROOMY(n, by) (((n) + (by)-1) / (by) * (by))

INLINE Low *head_of(const Heads *all, int64_t b, int64_t h) { return (Low *)all->at + b * all->batch + h * all->head; }

/* -- panels ------------------------------------------------------------------------------------------------------ */

/* Zero-pads the pairs of a panel to a whole block. Returns where the next panel begins. */
INLINE Low *filled(Low *panel, int64_t depth, int64_t columns) {
  const int64_t whole = ROOMY(depth, DEEP) * columns, pairs = ROOMY(depth, 2) * columns;
  memset(panel + pairs, 0, (whole - pairs) * sizeof(Low));
  return panel + whole;
}

/* Panels of columns, pairs along the width: their product gives scores. */
static void columns_of_keys(const Low *from, int64_t row, int64_t keys, int64_t width, Low *to) {
  for (int64_t n = 0; n < keys; n += PANEL) {
    pair_columns(from + n * row, row, width, keys - n, PANEL, to);
    to = filled(to, width, PANEL);
  }
}

/* Whether all batches share one gradient of the mask: then one thread processes all of them, in order. */
INLINE int shares_mask(const Attention *a) { return a->grad_mask.at && !a->grad_mask.batch; }

INLINE int broad_at(int64_t column, int64_t width) {
  return width - column >= PANEL ? BROAD : (int)((width - column + 15) / 16);
}

/* Panels of columns of the width, pairs along the rows. */
static void rows_of(const Low *from, int64_t row, int64_t rows, int64_t width, Low *to) {
  for (int64_t n = 0; n < width; n += PANEL) {
    const int64_t wide = 16 * broad_at(n, width);
    pair_rows(from + n, row, rows, width - n, wide, to);
    to = filled(to, rows, wide);
  }
}

/* Rows in the layout that a tile reads: in place; or, where a tile would read beyond them, copied to `own`. */
INLINE const Low *readable(const Low *from, int64_t *row, int64_t rows, int64_t width, Low *own) {
  if (DEEP == 2 || (rows == TALL && width % DEEP == 0)) return from;
  const int64_t deep = ROOMY(width, DEEP);
  for (int64_t i = 0; i < rows; i++) {
    memcpy(own + i * deep, from + i * *row, width * sizeof(Low));
    memset(own + i * deep + width, 0, (deep - width) * sizeof(Low));
  }
  *row = deep;
  return own;
}

/* -- tiles ------------------------------------------------------------------------------------------------------- */

/* scores [TALL, room] of `rows` rows for the keys up to `limit`, in whole panels. */
static void against_keys(const Low *a, int64_t a_row, const Low *panels, int64_t width, int64_t rows, int64_t limit,
                         int64_t room, Low *own, float *scores) {
  const int64_t deep = ROOMY(width, DEEP);
  a = readable(a, &a_row, rows, width, own);
  for (int64_t n = 0; n < limit; n += PANEL, panels += deep * PANEL)
    tile_to(scores + n, room, a, a_row, DEEP, panels, deep / DEEP, rows);
}

/* Where a product goes: to bf16, scaled by row; or to fp32 sums, which it starts or adds to. */
typedef struct {
  Low *out;
  int64_t row;
  float *sums; /* [.., width rounded up to 16]; null for none */
  int adds, ends;
} Goal;

INLINE void store_tile(__m512 sums[TALL][BROAD], const Goal *goal, int64_t rows, int64_t column, int64_t width,
                       int broad, const float *factors) {
  const int64_t room = ROOMY(width, 16);
#pragma GCC unroll 6
  for (int i = 0; i < TALL; i++)
    if (i < rows)
#pragma GCC unroll 4
      for (int j = 0; j < broad; j++) {
        const int64_t at = column + 16 * j;
        __m512 sum = sums[i][j];
        if (goal->adds) sum = _mm512_add_ps(sum, _mm512_loadu_ps(goal->sums + i * room + at));
        if (!goal->ends)
          _mm512_storeu_ps(goal->sums + i * room + at, sum);
        else
          _mm256_mask_storeu_epi16(goal->out + i * goal->row + at, (__mmask16)first(width - at),
                                   (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(sum, _mm512_set1_ps(factors[i]))));
      }
}

#define ONE_PANEL(BROADTH)                                         \
  case BROADTH:                                                    \
    tile_of(sums, a, a_row, a_step, panels, steps, rows, BROADTH); \
    store_tile(sums, goal, rows, n, width, BROADTH, factors);      \
    break;
#if BROAD == 4
#define PANELS ONE_PANEL(1) ONE_PANEL(2) ONE_PANEL(3) ONE_PANEL(4)
#else
#define PANELS ONE_PANEL(1) ONE_PANEL(2)
#endif

/* The product of `rows` rows of a and panels of `width` columns. `depth` is that of the panels, of which `steps` of
   DEEP are read; the steps of a are `a_step` apart. */
static void against_rows(const Low *a, int64_t a_row, int64_t a_step, const Low *panels, int64_t depth, int64_t from,
                         int64_t steps, int64_t rows, int64_t width, const Goal *goal, const float *factors) {
  for (int64_t n = 0; n < width; n += PANEL) {
    const int broad = broad_at(n, width);
    __m512 sums[TALL][BROAD];
    const Low *base = panels;
    panels += from * DEEP * 16 * broad;
    switch (broad) { PANELS }
    panels = base + ROOMY(depth, DEEP) * 16 * broad;
  }
}

/* -- rows of probabilities ---------------------------------------------------------------------------------------- */

/* The data of a row: how many keys it attends to, and what is added to its scores. */
typedef struct {
  int64_t seen;
  Rows mask;
  int64_t step;
  const uint8_t *kept;
  int64_t bit; /* of the first key */
} Row;

INLINE Row row_at(const Attention *a, int64_t b, int64_t h, int64_t query) {
  const int64_t bit = ((b * a->heads + h) * a->queries + query) * a->keys;
  Row found = {a->causal && query + 1 < a->keys ? query + 1 : a->keys, {0, NONE}, a->mask_step, a->kept, bit};
  if (a->mask_kind != NONE) {
    const int64_t at = b * a->mask.batch + h * a->mask.head + query * a->mask.row;
    found.mask.at = a->mask.at + at * (a->mask_kind == LOW ? 2 : 4);
    found.mask.kind = a->mask_kind;
  }
  return found;
}

/* Bits of WIDE probabilities from column `i` on that dropout keeps. */
INLINE __mmask16 kept_at(const Row *row, int64_t i) {
  if (!row->kept) return 0xffff;
  uint32_t bits;
  memcpy(&bits, row->kept + (row->bit + i) / 8, sizeof bits);
  return (__mmask16)(bits >> (row->bit + i) % 8);
}

/* `n` scores from column `i` on, of which WIDE are readable, scaled and with the mask added. */
INLINE Vector scaled(const float *scores, const Row *row, int64_t i, int64_t n, float scale) {
  const Vector found = *(const Vector *)(scores + i) * scale;
  if (row->mask.kind == NONE) return found;
  if (row->step) return found + load(&row->mask, i, n);
  return found + load(&row->mask, 0, 1)[0];
}

/* Iterates over the visible scores of a row, all but the last in whole vectors; `there` are those of a vector. */
#define EACH_SEEN(row, ...)                                                                       \
  do {                                                                                            \
    int64_t i = 0;                                                                                \
    for (; i + WIDE <= (row)->seen; i += WIDE) { enum { n = WIDE, there = 0xffff }; __VA_ARGS__ } \
    if (i < (row)->seen) {                                                                        \
      const int64_t n = (row)->seen - i;                                                          \
      const __mmask16 there = (__mmask16)first(n);                                                \
      __VA_ARGS__                                                                                 \
    }                                                                                             \
  } while (0)

/* A row without visible keys: zeros; or a row of NaNs, which stay. */
static float nothing(float *scores, int64_t seen, int64_t room) {
  float all = 0;
  for (int64_t i = 0; i < seen; i++)
    if (scores[i] != scores[i]) all = scores[i];
  for (int64_t i = 0; i < room; i++) scores[i] = i < seen ? all : 0;
  return all;
}

INLINE void to_low(const float *from, int64_t count, Low *to) { /* count: a multiple of 32 */
  for (int64_t i = 0; i < count; i += 32)
    _mm512_storeu_si512(to + i,
                        (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i)));
}

/* Replaces scores by exp(score - maximum), with zeros for invisible keys, and returns the sum. With dropout, the kept
   ones go to `low`, rounded. */
INLINE float exponentials(float *scores, const Row *row, float scale, int64_t room, Low *low) {
  const __m512 none = _mm512_set1_ps(-INFINITY);
  __m512 most = none, sum = _mm512_setzero_ps();
  EACH_SEEN(row, {
    const __m512 v = _mm512_mask_mov_ps(none, there, (__m512)scaled(scores, row, i, n, scale));
    _mm512_storeu_ps(scores + i, v);
    most = _mm512_max_ps(v, most); /* of a NaN and a number the number */
  });
  const float top = _mm512_reduce_max_ps(most);
  const int64_t whole = ROOMY(row->seen, WIDE);
  if (top == -INFINITY) {
    const float all = nothing(scores, row->seen, room);
    if (low) to_low(scores, room, low);
    return all;
  }
  EACH_SEEN(row, {
    const Vector from = *(Vector *)(scores + i) - top;
    const __m512 e = _mm512_maskz_mov_ps(there, (__m512)exponential(from));
    if (low)
      _mm256_storeu_si256((__m256i *)(low + i), (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(kept_at(row, i), e)));
    else
      _mm512_storeu_ps(scores + i, e);
    sum = _mm512_add_ps(sum, e);
  });
  if (low)
    memset(low + whole, 0, (room - whole) * sizeof(Low));
  else
    memset(scores + whole, 0, (room - whole) * sizeof(float));
  return _mm512_reduce_add_ps(sum);
}

/* -- memory of a thread ------------------------------------------------------------------------------------------- */

#define CHUNK 288 /* queries whose probabilities are held at a time; a multiple of TALL and DEEP */

typedef struct {
  Low *keys_columns, *values_columns, *keys_rows, *values_rows, *queries_rows, *grads_rows, *chances, *dscores, *low, *own;
  float *scores, *dchances, *key_sums, *value_sums;
  int64_t bytes;
} Room;

static Room room_at(const Attention *a, char *at, int gradients) {
  const int64_t room = ROOMY(a->keys, PANEL), deep = ROOMY(a->width, DEEP), broad = ROOMY(a->width, 16);
  const int64_t tall = ROOMY(a->queries, ROOMY(TALL, DEEP)), chunk = tall < CHUNK ? tall : CHUNK;
  Room r;
  char *start = at;
#define TAKE(name, type, count) r.name = (type *)at, at += ROOMY((count) * (int64_t)sizeof(type), 64)
  TAKE(keys_columns, Low, room * deep);
  TAKE(low, Low, TALL * room);
  TAKE(own, Low, TALL * deep);
  TAKE(scores, float, TALL * room);
  TAKE(values_rows, Low, gradients ? 0 : room * broad);
  TAKE(values_columns, Low, gradients * room * deep);
  TAKE(keys_rows, Low, gradients * room * broad);
  TAKE(queries_rows, Low, gradients * chunk * broad);
  TAKE(grads_rows, Low, gradients * chunk * broad);
  TAKE(chances, Low, gradients * chunk * room);
  TAKE(dscores, Low, gradients * chunk * room);
  TAKE(dchances, float, gradients * TALL * room);
  TAKE(key_sums, float, gradients * room * broad);
  TAKE(value_sums, float, gradients * room * broad);
  r.bytes = at - start;
  return r;
}

/* -- forward ------------------------------------------------------------------------------------------------------ */

#ifndef BACKWARD

static void direction(const Share *mine) {
  const Attention *a = mine->given;
  const Room r = room_at(a, (char *)mine->room, 0);
  const int64_t room = ROOMY(a->keys, PANEL);
  for (int64_t unit = mine->from; unit < mine->to; unit++) {
    const int64_t shared = a->heads / a->groups, b = unit / shared, kv = unit % shared;
    columns_of_keys(head_of(&a->key, b, kv), a->key.row, a->keys, a->width, r.keys_columns);
    rows_of(head_of(&a->value, b, kv), a->value.row, a->keys, a->width, r.values_rows);
    for (int64_t h = kv * a->groups; h < (kv + 1) * a->groups; h++)
      for (int64_t q = 0; q < a->queries; q += TALL) {
        const int64_t rows = a->queries - q < TALL ? a->queries - q : TALL;
        const int64_t limit = a->causal && q + rows < a->keys ? q + rows : a->keys, whole = ROOMY(limit, PANEL);
        against_keys(head_of(&a->query, b, h) + q * a->query.row, a->query.row, r.keys_columns, a->width, rows, limit,
                     room, r.own, r.scores);
        float factors[TALL];
        for (int64_t i = 0; i < rows; i++) {
          const Row row = row_at(a, b, h, q + i);
          const float sum = exponentials(r.scores + i * room, &row, (float)a->scale, whole, r.low + i * room);
          factors[i] = sum == 0 ? 0 : (float)a->kept_scale / sum;
        }
        const Goal goal = {head_of(&a->out, b, h) + q * a->out.row, a->out.row, 0, 0, 1};
        against_rows(r.low, room, DEEP, r.values_rows, a->keys, 0, ROOMY(limit, DEEP) / DEEP, rows, a->width, &goal,
                     factors);
      }
  }
}

#else

/* -- backward ----------------------------------------------------------------------------------------------------- */

/* For `rows` queries from `q` on: probabilities and score gradients, in pairs; and the gradient of the queries. */
static void backward_rows(const Attention *a, const Room *r, int64_t b, int64_t h, int64_t q, int64_t in_chunk,
                          int64_t rows) {
  const int64_t room = ROOMY(a->keys, PANEL);
  /* Whole tiles: the tiles of keys read these rows up to their last. */
  const int64_t limit = a->causal && q + TALL < a->keys ? q + TALL : a->keys, whole = ROOMY(limit, PANEL);
  against_keys(head_of(&a->query, b, h) + q * a->query.row, a->query.row, r->keys_columns, a->width, rows, limit, room,
               r->own, r->scores);
  against_keys(head_of(&a->grad, b, h) + q * a->grad.row, a->grad.row, r->values_columns, a->width, rows, limit, room,
               r->own, r->dchances);
  float factors[TALL];
  for (int64_t i = 0; i < TALL; i++) {
    float *chances = r->scores + i * room, *dchances = r->dchances + i * room;
    factors[i] = (float)a->scale;
    if (i >= rows) {
      memset(chances, 0, whole * sizeof(float)), memset(dchances, 0, whole * sizeof(float));
      continue;
    }
    const Row row = row_at(a, b, h, q + i);
    const float sum = exponentials(chances, &row, (float)a->scale, whole, 0), each = sum == 0 ? 0 : 1 / sum;
    const __m512 kept_scale = _mm512_set1_ps((float)a->kept_scale);
    Vector dot = {0};
    for (int64_t n = 0; n < whole; n += WIDE) {
      Vector *p = (Vector *)(chances + n), *d = (Vector *)(dchances + n);
      *p *= each;
      if (a->kept) *d *= (Vector)_mm512_maskz_mov_ps(kept_at(&row, n), kept_scale);
      dot += *p * *d;
    }
    const float mean = _mm512_reduce_add_ps((__m512)dot);
    for (int64_t n = 0; n < whole; n += WIDE) {
      Vector *p = (Vector *)(chances + n), *d = (Vector *)(dchances + n);
      *d = *p * (*d - mean);
      if (a->kept) *p = (Vector)_mm512_maskz_mov_ps(kept_at(&row, n), (__m512)*p);
    }
    if (a->grad_mask.at) {
      float *sums = (float *)a->grad_mask.at + b * a->grad_mask.batch + h * a->grad_mask.head + (q + i) * a->grad_mask.row;
      EACH_SEEN(&row, { write_full(sums + i, n, read_full(sums + i, n) + *(Vector *)(dchances + i)); });
    }
    to_low(dchances, whole, r->low + i * room);
  }
  for (int64_t i = 0; i < TALL; i += DEEP) {
    const int64_t at = (in_chunk + i) * room;
    weave(r->scores + i * room, room, whole, r->chances + at);
    weave(r->dchances + i * room, room, whole, r->dscores + at);
  }
  const Goal goal = {head_of(&a->grad_query, b, h) + q * a->grad_query.row, a->grad_query.row, 0, 0, 1};
  against_rows(r->low, room, DEEP, r->keys_rows, a->keys, 0, ROOMY(limit, DEEP) / DEEP, rows, a->width, &goal, factors);
}

/* The contribution of `count` queries from `q` on to the gradients of keys and values. */
static void backward_columns(const Attention *a, const Room *r, int64_t b, int64_t kv, int64_t q, int64_t count,
                             int adds, int ends) {
  const int64_t room = ROOMY(a->keys, PANEL), broad = ROOMY(a->width, 16);
  float kept_scales[TALL], scales[TALL];
  for (int i = 0; i < TALL; i++) kept_scales[i] = (float)a->kept_scale, scales[i] = (float)a->scale;
  for (int64_t k = 0; k < a->keys; k += TALL) {
    const int64_t rows = a->keys - k < TALL ? a->keys - k : TALL;
    int64_t from = a->causal && k > q ? (k - q) / DEEP : 0;
    const int64_t steps = ROOMY(count, DEEP) / DEEP;
    if (from > steps) from = steps;
    const Goal value = {head_of(&a->grad_value, b, kv) + k * a->grad_value.row, a->grad_value.row,
                        r->value_sums + k * broad, adds, ends};
    const Goal key = {head_of(&a->grad_key, b, kv) + k * a->grad_key.row, a->grad_key.row, r->key_sums + k * broad,
                      adds, ends};
    against_rows(r->chances + DEEP * (from * room + k), DEEP, DEEP * room, r->grads_rows, count, from, steps - from, rows,
                 a->width, &value, kept_scales);
    against_rows(r->dscores + DEEP * (from * room + k), DEEP, DEEP * room, r->queries_rows, count, from, steps - from, rows,
                 a->width, &key, scales);
  }
}

/* The heads that share the keys of head `kv` of batch `b`. */
static void backward_heads(const Attention *a, const Room *r, int64_t b, int64_t kv) {
  columns_of_keys(head_of(&a->key, b, kv), a->key.row, a->keys, a->width, r->keys_columns);
  columns_of_keys(head_of(&a->value, b, kv), a->value.row, a->keys, a->width, r->values_columns);
  rows_of(head_of(&a->key, b, kv), a->key.row, a->keys, a->width, r->keys_rows);
  if (!a->queries) backward_columns(a, r, b, kv, 0, 0, 0, 1); /* empty sums: zeros */
  for (int64_t g = 0; g < a->groups; g++)
    for (int64_t q = 0; q < a->queries; q += CHUNK) {
      const int64_t h = kv * a->groups + g, count = a->queries - q < CHUNK ? a->queries - q : CHUNK;
      rows_of(head_of(&a->query, b, h) + q * a->query.row, a->query.row, count, a->width, r->queries_rows);
      rows_of(head_of(&a->grad, b, h) + q * a->grad.row, a->grad.row, count, a->width, r->grads_rows);
      for (int64_t i = 0; i < count; i += TALL)
        backward_rows(a, r, b, h, q + i, i, count - i < TALL ? count - i : TALL);
      backward_columns(a, r, b, kv, q, count, g || q, g + 1 == a->groups && q + count == a->queries);
    }
}

static void direction(const Share *mine) {
  const Attention *a = mine->given;
  const Room r = room_at(a, (char *)mine->room, 1);
  const int64_t shared = a->heads / a->groups;
  for (int64_t unit = mine->from; unit < mine->to; unit++) {
    if (!shares_mask(a))
      backward_heads(a, &r, unit / shared, unit % shared);
    else
      for (int64_t b = 0; b < a->batches; b++) backward_heads(a, &r, b, unit);
  }
}

#endif

/* -- entry points for Python: return 0, or 1 if out of memory --------------------------------------------------- */

#ifndef MATRIX_UNITS
int has_tiles(void) { return 1; }
#endif

static void *one_share(void *given) {
  const Share *mine = given;
  const Tiles before = borrow_tiles();
  direction(mine);
  return_tiles(&before);
  return 0;
}

int attention(const Attention *a, int64_t threads) {
  Share shares[MOST_THREADS];
  if (!a->heads) return 0;
  const int64_t units = (shares_mask(a) ? 1 : a->batches) * a->heads / a->groups, each = room_at(a, 0, (int)a->gradients).bytes;
  threads = threads_of(threads < units ? threads : units);
  char *room = aligned_alloc(64, threads * each);
  if (!room) return 1;
  for (int64_t t = 0; t < threads; ++t)
    shares[t] = (Share){.given = a, .room = (double *)(room + t * each), .from = units * t / threads,
                        .to = units * (t + 1) / threads};
  do_shares(shares, sizeof *shares, threads, one_share);
  free(room);
  return 0;
}
