/* Attention of bf16 on CPUs with AVX512_BF16, and its gradients: six queries at a time against all keys of a head.

   Before: scores, probabilities and their gradients written to memory, or a kernel that multiplies in blocks of its own.
   After: a few rows of scores in the first caches. Scores, probabilities, and what is summed are fp32; probabilities and
   the gradients of scores are rounded once to bf16 before they are multiplied, as torch's kernel does. */

#include "rows.h"

#define TALL 6 /* queries, or keys, at a time */
#include "tiles.h"

typedef struct { /* [batch, heads, rows, width], elements of a row side by side */
  char *at;
  int64_t batch, head, row; /* elements from one to the next */
} Heads;

typedef struct {
  int64_t batches, heads, groups, queries, keys, width, causal;
  Heads query, key, value, out, grad, grad_query, grad_key, grad_value;
  Heads mask;
  int64_t mask_kind, mask_step; /* Kind; elements from one key to the next: 1, or 0 for one number a row */
  double scale;
} Attention;

#define ROOMY(n, by) (((n) + (by)-1) / (by) * (by))

INLINE Low *head_of(const Heads *all, int64_t b, int64_t h) { return (Low *)all->at + b * all->batch + h * all->head; }

/* -- panels ------------------------------------------------------------------------------------------------------ */

/* Panels of 64 columns, pairs along the width: what is multiplied gives scores. */
static void columns_of_keys(const Low *from, int64_t row, int64_t keys, int64_t width, Low *to) {
  for (int64_t n = 0; n < keys; n += PANEL, to += ROOMY(width, 2) * PANEL)
    pair_columns(from + n * row, row, width, keys - n, PANEL, to);
}

INLINE int broad_at(int64_t column, int64_t width) {
  return width - column >= PANEL ? BROAD : (int)((width - column + 15) / 16);
}

/* Panels of up to 64 columns of the width, pairs along the rows. */
static void rows_of(const Low *from, int64_t row, int64_t rows, int64_t width, Low *to) {
  for (int64_t n = 0; n < width; n += PANEL) {
    const int64_t wide = 16 * broad_at(n, width);
    pair_rows(from + n, row, rows, width - n, wide, to);
    to += ROOMY(rows, 2) * wide;
  }
}

/* -- tiles ------------------------------------------------------------------------------------------------------- */

INLINE void clear(__m512 sums[TALL][BROAD]) {
  for (int i = 0; i < TALL; i++)
    for (int j = 0; j < BROAD; j++) sums[i][j] = _mm512_setzero_ps();
}

/* scores [TALL, room] of `rows` rows against the keys up to `limit`, in whole panels. */
static void against_keys(const Low *a, int64_t a_row, const Low *panels, int64_t width, int64_t rows, int64_t limit,
                         int64_t room, float *scores) {
  const int64_t pairs = (width + 1) / 2;
  for (int64_t n = 0; n < limit; n += PANEL, panels += 2 * pairs * PANEL) {
    __m512 sums[TALL][BROAD];
    clear(sums);
    tile(sums, a, a_row, 2, panels, pairs, rows, BROAD);
#pragma GCC unroll 6
    for (int i = 0; i < TALL; i++)
#pragma GCC unroll 4
      for (int j = 0; j < BROAD; j++) _mm512_storeu_ps(scores + i * room + n + 16 * j, sums[i][j]);
  }
}

/* Where a product goes: to bf16 behind a factor for each row; or to fp32 sums, of which it is the first or not. */
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

#define ONE_PANEL(BROADTH)                                                        \
  case BROADTH:                                                                   \
    tile(sums, a, a_row, a_pair, panels, pairs, rows, BROADTH);                   \
    store_tile(sums, goal, rows, n, width, BROADTH, factors);                     \
    break;

/* The product of `rows` rows of a and panels of `width` columns; `depth` is that of the panels, of which pairs are read. */
static void against_rows(const Low *a, int64_t a_row, int64_t a_pair, const Low *panels, int64_t depth, int64_t from,
                         int64_t pairs, int64_t rows, int64_t width, const Goal *goal, const float *factors) {
  for (int64_t n = 0; n < width; n += PANEL) {
    const int broad = broad_at(n, width);
    __m512 sums[TALL][BROAD];
    clear(sums);
    const Low *base = panels;
    panels += from * 32 * broad;
    switch (broad) { ONE_PANEL(1) ONE_PANEL(2) ONE_PANEL(3) ONE_PANEL(4) }
    panels = base + ROOMY(depth, 2) * 16 * broad;
  }
}

/* -- rows of probabilities ---------------------------------------------------------------------------------------- */

/* What is known of a row: how many keys it sees, what is added to its scores. */
typedef struct {
  int64_t seen;
  Rows mask;
  int64_t step;
} Row;

INLINE Row row_at(const Attention *a, int64_t b, int64_t h, int64_t query) {
  Row found = {a->causal && query + 1 < a->keys ? query + 1 : a->keys, {0, NONE}, a->mask_step};
  if (a->mask_kind != NONE) {
    const int64_t at = b * a->mask.batch + h * a->mask.head + query * a->mask.row;
    found.mask.at = a->mask.at + at * (a->mask_kind == LOW ? 2 : 4);
    found.mask.kind = a->mask_kind;
  }
  return found;
}

INLINE Vector masked(const Row *row, int64_t i, int64_t n, Vector scores) {
  if (row->mask.kind == NONE) return scores;
  if (row->step) return scores + load(&row->mask, i, n);
  return scores + load(&row->mask, 0, 1)[0];
}

/* A row that sees nothing: zeros; or one of NaNs, which stay. */
static float nothing(float *scores, int64_t seen, int64_t room) {
  float all = 0;
  for (int64_t i = 0; i < seen; i++)
    if (scores[i] != scores[i]) all = scores[i];
  for (int64_t i = 0; i < room; i++) scores[i] = i < seen ? all : 0;
  return all;
}

/* Makes of scores, exponentials of what they are from their largest, zeros behind what is seen; returns their sum. */
static float exponentials(float *scores, const Row *row, float scale, int64_t room) {
  const Rows all = {scores, FULL};
  Vector most = (Vector){0} - INFINITY;
  EACH(0, row->seen, {
    Vector v = masked(row, i, n, load(&all, i, n) * scale);
    store(&all, i, n, v);
    for (int64_t k = n; k < WIDE; ++k) v[k] = -INFINITY;
    most = larger(v, most);
  });
  const float top = _mm512_reduce_max_ps((__m512)most);
  Vector sum = {0};
  if (top == -INFINITY) return nothing(scores, row->seen, room);
  EACH(0, row->seen, {
    Vector e = exponential(load(&all, i, n) - top);
    for (int64_t k = n; k < WIDE; ++k) e[k] = 0;
    store(&all, i, n, e);
    sum += e;
  });
  memset(scores + row->seen, 0, (room - row->seen) * sizeof(float));
  return _mm512_reduce_add_ps((__m512)sum);
}

INLINE void to_low(const float *from, int64_t count, Low *to) { /* count: a multiple of 32 */
  for (int64_t i = 0; i < count; i += 32)
    _mm512_storeu_si512(to + i,
                        (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i)));
}

/* -- forward ------------------------------------------------------------------------------------------------------ */

static void *forward_share(void *given) {
  const Share *mine = given;
  const Attention *a = mine->given;
  const int64_t room = ROOMY(a->keys, PANEL), deep = ROOMY(a->width, 2), broad = ROOMY(a->width, 16);
  Low *columns = (Low *)mine->room, *rows_panel = columns + room * deep, *low = rows_panel + room * broad;
  float *scores = (float *)(low + TALL * room);
  for (int64_t unit = mine->from; unit < mine->to; unit++) {
    const int64_t shared = a->heads / a->groups, b = unit / shared, kv = unit % shared;
    columns_of_keys(head_of(&a->key, b, kv), a->key.row, a->keys, a->width, columns);
    rows_of(head_of(&a->value, b, kv), a->value.row, a->keys, a->width, rows_panel);
    for (int64_t h = kv * a->groups; h < (kv + 1) * a->groups; h++)
      for (int64_t q = 0; q < a->queries; q += TALL) {
        const int64_t rows = a->queries - q < TALL ? a->queries - q : TALL;
        const int64_t limit = a->causal && q + rows < a->keys ? q + rows : a->keys, whole = ROOMY(limit, PANEL);
        against_keys(head_of(&a->query, b, h) + q * a->query.row, a->query.row, columns, a->width, rows, limit, room,
                     scores);
        float factors[TALL];
        for (int64_t i = 0; i < rows; i++) {
          const Row row = row_at(a, b, h, q + i);
          const float sum = exponentials(scores + i * room, &row, (float)a->scale, whole);
          factors[i] = sum == 0 ? 0 : 1 / sum;
          to_low(scores + i * room, whole, low + i * room);
        }
        const Goal goal = {head_of(&a->out, b, h) + q * a->out.row, a->out.row, 0, 0, 1};
        against_rows(low, room, 2, rows_panel, a->keys, 0, (limit + 1) / 2, rows, a->width, &goal, factors);
      }
  }
  return 0;
}

/* -- backward ----------------------------------------------------------------------------------------------------- */

#define CHUNK 264 /* queries whose probabilities are kept at a time; a multiple of 2 TALL */

/* Two rows of numbers as pairs, one above the other: to[column][2]. */
INLINE void pair_up(const float *one, const float *other, int64_t count, Low *to) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int64_t i = 0; i < count; i += 16) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(other + i), _mm512_loadu_ps(one + i));
    _mm512_storeu_si512(to + 2 * i, _mm512_permutexvar_epi16(order, both));
  }
}

typedef struct { /* one thread's memory */
  Low *keys_columns, *values_columns, *keys_rows, *queries_rows, *grads_rows, *chances, *dscores, *low;
  float *scores, *dchances, *key_sums, *value_sums;
  int64_t bytes;
} Room;

static Room room_at(const Attention *a, char *at) {
  const int64_t room = ROOMY(a->keys, PANEL), deep = ROOMY(a->width, 2), broad = ROOMY(a->width, 16);
  const int64_t chunk = a->queries < CHUNK ? ROOMY(a->queries, 2 * TALL) : CHUNK;
  Room r;
  char *start = at;
#define TAKE(name, type, count) r.name = (type *)at, at += ROOMY((count) * (int64_t)sizeof(type), 64)
  TAKE(keys_columns, Low, room * deep);
  TAKE(values_columns, Low, room * deep);
  TAKE(keys_rows, Low, room * broad);
  TAKE(queries_rows, Low, chunk * broad);
  TAKE(grads_rows, Low, chunk * broad);
  TAKE(chances, Low, chunk * room);
  TAKE(dscores, Low, chunk * room);
  TAKE(low, Low, TALL * room);
  TAKE(scores, float, TALL * room);
  TAKE(dchances, float, TALL * room);
  TAKE(key_sums, float, room * broad);
  TAKE(value_sums, float, room * broad);
  r.bytes = at - start;
  return r;
}

/* Of `rows` queries from `q` on: probabilities and the gradients of scores, in pairs; and the gradient of the queries. */
static void backward_rows(const Attention *a, const Room *r, int64_t b, int64_t h, int64_t q, int64_t in_chunk,
                          int64_t rows) {
  const int64_t room = ROOMY(a->keys, PANEL);
  /* Whole tiles: those of keys read what these rows leave, up to their last. */
  const int64_t limit = a->causal && q + TALL < a->keys ? q + TALL : a->keys, whole = ROOMY(limit, PANEL);
  against_keys(head_of(&a->query, b, h) + q * a->query.row, a->query.row, r->keys_columns, a->width, rows, limit, room,
               r->scores);
  against_keys(head_of(&a->grad, b, h) + q * a->grad.row, a->grad.row, r->values_columns, a->width, rows, limit, room,
               r->dchances);
  float factors[TALL];
  for (int64_t i = 0; i < TALL; i++) {
    float *chances = r->scores + i * room, *dchances = r->dchances + i * room;
    factors[i] = (float)a->scale;
    if (i >= rows) {
      memset(chances, 0, whole * sizeof(float)), memset(dchances, 0, whole * sizeof(float));
      continue;
    }
    const Row row = row_at(a, b, h, q + i);
    const float sum = exponentials(chances, &row, (float)a->scale, whole), each = sum == 0 ? 0 : 1 / sum;
    Vector dot = {0};
    for (int64_t n = 0; n < whole; n += WIDE) {
      Vector *p = (Vector *)(chances + n);
      *p *= each;
      dot += *p * *(Vector *)(dchances + n);
    }
    const float mean = _mm512_reduce_add_ps((__m512)dot);
    for (int64_t n = 0; n < whole; n += WIDE) {
      Vector *d = (Vector *)(dchances + n);
      *d = *(Vector *)(chances + n) * (*d - mean);
    }
    to_low(dchances, whole, r->low + i * room);
  }
  for (int64_t i = 0; i < TALL; i += 2) {
    const int64_t at = (in_chunk + i) * room;
    pair_up(r->scores + i * room, r->scores + (i + 1) * room, whole, r->chances + at);
    pair_up(r->dchances + i * room, r->dchances + (i + 1) * room, whole, r->dscores + at);
  }
  const Goal goal = {head_of(&a->grad_query, b, h) + q * a->grad_query.row, a->grad_query.row, 0, 0, 1};
  against_rows(r->low, room, 2, r->keys_rows, a->keys, 0, (limit + 1) / 2, rows, a->width, &goal, factors);
}

/* The part of the gradients of keys and values that `count` queries from `q` on have. */
static void backward_columns(const Attention *a, const Room *r, int64_t b, int64_t kv, int64_t q, int64_t count,
                             int adds, int ends) {
  const int64_t room = ROOMY(a->keys, PANEL), broad = ROOMY(a->width, 16);
  float ones[TALL], scales[TALL];
  for (int i = 0; i < TALL; i++) ones[i] = 1, scales[i] = (float)a->scale;
  for (int64_t k = 0; k < a->keys; k += TALL) {
    const int64_t rows = a->keys - k < TALL ? a->keys - k : TALL;
    int64_t from = a->causal && k > q ? (k - q) / 2 : 0;
    const int64_t pairs = (count + 1) / 2;
    if (from > pairs) from = pairs;
    const Goal value = {head_of(&a->grad_value, b, kv) + k * a->grad_value.row, a->grad_value.row,
                        r->value_sums + k * broad, adds, ends};
    const Goal key = {head_of(&a->grad_key, b, kv) + k * a->grad_key.row, a->grad_key.row, r->key_sums + k * broad,
                      adds, ends};
    against_rows(r->chances + 2 * from * room + 2 * k, 2, 2 * room, r->grads_rows, count, from, pairs - from, rows,
                 a->width, &value, ones);
    against_rows(r->dscores + 2 * from * room + 2 * k, 2, 2 * room, r->queries_rows, count, from, pairs - from, rows,
                 a->width, &key, scales);
  }
}

static void *backward_share(void *given) {
  const Share *mine = given;
  const Attention *a = mine->given;
  const Room r = room_at(a, (char *)mine->room);
  for (int64_t unit = mine->from; unit < mine->to; unit++) {
    const int64_t shared = a->heads / a->groups, b = unit / shared, kv = unit % shared;
    columns_of_keys(head_of(&a->key, b, kv), a->key.row, a->keys, a->width, r.keys_columns);
    columns_of_keys(head_of(&a->value, b, kv), a->value.row, a->keys, a->width, r.values_columns);
    rows_of(head_of(&a->key, b, kv), a->key.row, a->keys, a->width, r.keys_rows);
    for (int64_t g = 0; g < a->groups; g++)
      for (int64_t q = 0; q < a->queries; q += CHUNK) {
        const int64_t h = kv * a->groups + g, count = a->queries - q < CHUNK ? a->queries - q : CHUNK;
        rows_of(head_of(&a->query, b, h) + q * a->query.row, a->query.row, count, a->width, r.queries_rows);
        rows_of(head_of(&a->grad, b, h) + q * a->grad.row, a->grad.row, count, a->width, r.grads_rows);
        for (int64_t i = 0; i < count; i += TALL)
          backward_rows(a, &r, b, h, q + i, i, count - i < TALL ? count - i : TALL);
        backward_columns(a, &r, b, kv, q, count, g || q, g + 1 == a->groups && q + count == a->queries);
      }
  }
  return 0;
}

/* -- what Python calls: they return 0, or 1 where there is no memory ----------------------------------------------- */

static int shared_out(const Attention *a, int64_t bytes, int64_t threads, void *(*work)(void *)) {
  Share shares[MOST_THREADS];
  const int64_t units = a->batches * a->heads / a->groups, each = ROOMY(bytes, 64);
  threads = threads_of(threads < units ? threads : units);
  char *room = aligned_alloc(64, threads * each);
  if (!room) return 1;
  for (int64_t t = 0; t < threads; ++t)
    shares[t] = (Share){.given = a, .room = (double *)(room + t * each), .from = units * t / threads,
                        .to = units * (t + 1) / threads};
  do_shares(shares, sizeof *shares, threads, work);
  free(room);
  return 0;
}

int forward(const Attention *a, int64_t threads) {
  const int64_t room = ROOMY(a->keys, PANEL), wide = ROOMY(a->width, 16) + ROOMY(a->width, 2);
  return shared_out(a, room * (wide * 2 + TALL * 6), threads, forward_share);
}

int backward(const Attention *a, int64_t threads) {
  return shared_out(a, room_at(a, 0).bytes, threads, backward_share);
}
