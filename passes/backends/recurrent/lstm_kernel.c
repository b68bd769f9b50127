/* An LSTM layer in training, forward and backward: bf16 matmuls with fp32 sums, gates and cells in fp32.

   Before: oneDNN's layer, whose backward takes three times as long as its forward, and reads back what that computed.
   After: `forward`, which runs a GEMM and the gates per step, and saves the gates' sums and the cells; and `backward`,
   likewise, which leaves the gradients of the weights and of x to GEMMs over all steps at once. Gates are i, f, g and
   o, as in torch. Only where the CPU has AVX512_BF16; with MATRIX_UNITS, on AMX.

   Source of the formulas: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; torch.nn.LSTM. */

#include "vector_rows.h"
#ifdef MATRIX_UNITS
#include "amx_tiles.h"
#define READ 16 /* rows at a time, whether they are there or not */
#else
#define TALL 4
#define READ 1
#include "gemm_tiles.h"
int has_tiles(void) { return 1; }
#endif

#define ROOMY(n, by) (((n) + (by)-1) / (by) * (by))
#define TOGETHER 256 /* rows of x that are multiplied at a time, of several steps */
enum { GATES = 4 };

typedef struct {
  int64_t length, batch, width, size;
  const Low *x, *of_x, *of_h, *h; /* weights in panels, [4 size, width] and [4 size, size]; the initial state */
  const float *bias;          /* [4 size] */
  Low *sums, *out;            /* written: [length, batch, 4 size], and [length, batch, size] */
  float *cells;               /* [length + 1, batch, size]: the first is given, the rest is written */
  int64_t threads;
} Forward;

typedef struct {
  int64_t length, batch, size;
  const Low *sums, *dout, *weights; /* weights: [size, 4 size] in panels, for the states, transposed */
  const float *cells;
  Low *dsums;     /* written: [length, batch, 4 size] */
  float *dh, *dc; /* [batch, size]: gradients of the last states, which become those of the first */
  int64_t threads;
} Backward;

/* -- gates ------------------------------------------------------------------------------------------------------- */

typedef struct {
  Vector of, slope;
} Gate;

INLINE Vector size_of(Vector x) { return (Vector)((Bits)x & 0x7fffffffu); }

INLINE Vector either(Bits mask, Vector there, Vector elsewhere) {
  return (Vector)(((Bits)there & mask) | ((Bits)elsewhere & ~mask));
}

INLINE Gate logistic(Vector x) {
  const Vector e = exponential((Vector){0} - size_of(x)), d = 1.0f / (1.0f + e);
  return (Gate){either((Bits)(x < 0.0f), e * d, d), e * d * d};
}

INLINE Gate hyperbolic(Vector x) {
  const Vector a = size_of(x), e = exponential(-2.0f * a), d = 1.0f / (1.0f + e), s = x * x;
  const Vector near = a * (1.0f - s * (0.33333333f - s * 0.13333333f)); /* where 1 - e would lose digits */
  const Vector found = either((Bits)(a < 0.03f), near, (1.0f - e) * d);
  return (Gate){(Vector)((Bits)found | ((Bits)x & 0x80000000u)), 4.0f * e * d * d};
}

/* -- products of a step's rows ----------------------------------------------------------------------------------- */

typedef struct { /* `to` has whole tiles of rows and whole panels of columns, row stride `row`; the excess is garbage */
  const Low *a, *panels;
  int64_t a_row, rows, depth;
  float *to;
  int64_t row;
} Product;

static void multiply(void *of, int64_t from, int64_t end) {
  const Product *p = of;
  const int64_t whole = ROOMY(p->depth, DEEP);
  const Tiles before = borrow_tiles();
  for (int64_t n = from; n < end; n += PANEL)
    for (int64_t i = 0; i < p->rows; i += TALL) {
      const int64_t left = p->rows - i, some = left < TALL ? left : TALL;
      const Low *a = p->a + i * p->a_row;
      tile_to(p->to + i * p->row + n, p->row, a, p->a_row, DEEP, p->panels + n * whole, whole / DEEP, some);
    }
  return_tiles(&before);
}

/* Copies rows in tile layout, with stride `whole`, to `to`: the padding behind each is already zero; excess rows need
   not be. */
INLINE void lay_rows(const Low *from, int64_t rows, int64_t depth, int64_t whole, Low *to) {
  for (int64_t i = 0; i < rows; i++) memcpy(to + i * whole, from + i * depth, depth * sizeof(Low));
}

/* -- forward ----------------------------------------------------------------------------------------------------- */

INLINE void step_row(const Forward *f, const float *made, const float *made_of_x, int64_t at, int64_t next) {
  const int64_t size = f->size;
  const Rows sums = {f->sums + at * GATES * size, LOW}, out = {f->out + at * size, LOW};
  const Rows before = {f->cells + at * size, FULL}, after = {f->cells + next * size, FULL};
  const Rows product = {(void *)made, FULL}, input = {(void *)made_of_x, FULL}, bias = {(void *)f->bias, FULL};
  EACH(0, size, {
    Vector s[GATES];
    for (int64_t g = 0; g < GATES; g++) {
      s[g] = load(&product, g * size + i, n) + load(&input, g * size + i, n) + load(&bias, g * size + i, n);
      store(&sums, g * size + i, n, s[g]);
    }
    const Vector c = fused(logistic(s[0]).of, hyperbolic(s[2]).of, logistic(s[1]).of * load(&before, i, n));
    store(&after, i, n, c);
    store(&out, i, n, logistic(s[3]).of * hyperbolic(c).of);
  });
}

typedef struct {
  const void *of; /* a Forward or a Backward */
  const float *made, *made_of_x;
  int64_t row, t;
} Step;

static void step_rows(void *of, int64_t from, int64_t to) {
  const Step *s = of;
  const Forward *f = s->of;
  const int64_t at = s->t * f->batch;
  for (int64_t b = from; b < to; b++)
    step_row(f, s->made + b * s->row, s->made_of_x + b * s->row, at + b, at + f->batch + b);
}

/* Returns 1 where there is no memory. */
int forward(const Forward *f) {
  const int64_t batch = f->batch, size = f->size, width = f->width, gates = GATES * size, row = ROOMY(gates, PANEL);
  if (!batch || !f->length) return 0;
  const int64_t steps = batch < TOGETHER ? TOGETHER / batch : 1, at_once = steps < f->length ? steps : f->length;
  const int64_t of_made = ROOMY(batch, TALL) * row, of_x = ROOMY(at_once * batch, TALL) * row;
  const int64_t deep = ROOMY(size, DEEP), wide = ROOMY(width, DEEP);
  const int64_t of_seen = ROOMY(batch, READ) * deep + ROOMY(at_once * batch, READ) * wide;
  float *made = malloc((of_made + of_x) * sizeof(float) + of_seen * sizeof(Low));
  if (!made) return 1;
  float *made_of_x = made + of_made;
  Low *states = (Low *)(made_of_x + of_x), *input = states + ROOMY(batch, READ) * deep;
  memset(states, 0, of_seen * sizeof(Low));
  for (int64_t t = 0; t < f->length; t++) {
    const int64_t place = t % at_once, left = f->length - t, rows = (left < at_once ? left : at_once) * batch;
    if (!place) {
      lay_rows(f->x + t * batch * width, rows, width, wide, input);
      Product product = {input, f->of_x, wide, rows, width, made_of_x, row};
      do_parts(f->threads, gates, PANEL, multiply, &product);
    }
    lay_rows(t ? f->out + (t - 1) * batch * size : f->h, batch, size, deep, states);
    Product product = {states, f->of_h, deep, batch, size, made, row};
    Step step = {f, made, made_of_x + place * batch * row, row, t};
    do_parts(f->threads, gates, PANEL, multiply, &product);
    do_parts(f->threads, batch, 1, step_rows, &step);
  }
  free(made);
  return 0;
}

/* -- backward ---------------------------------------------------------------------------------------------------- */

INLINE void back_row(const Backward *w, const float *made, int64_t at, int64_t b) {
  const int64_t size = w->size, next = at + w->batch;
  const Rows sums = {(void *)(w->sums + at * GATES * size), LOW}, dout = {(void *)(w->dout + at * size), LOW};
  const Rows before = {(void *)(w->cells + at * size), FULL}, after = {(void *)(w->cells + next * size), FULL};
  const Rows dsums = {w->dsums + at * GATES * size, LOW}, dc = {w->dc + b * size, FULL}, dh = {(void *)made, FULL};
  EACH(0, size, {
    const Gate in = logistic(load(&sums, i, n)), forget = logistic(load(&sums, size + i, n));
    const Gate new = hyperbolic(load(&sums, 2 * size + i, n)), show = logistic(load(&sums, 3 * size + i, n));
    const Gate cell = hyperbolic(load(&after, i, n));
    const Vector d = load(&dh, i, n) + load(&dout, i, n), e = fused(d * show.of, cell.slope, load(&dc, i, n));
    store(&dsums, i, n, e * new.of * in.slope);
    store(&dsums, size + i, n, e * load(&before, i, n) * forget.slope);
    store(&dsums, 2 * size + i, n, e * in.of * new.slope);
    store(&dsums, 3 * size + i, n, d * cell.of * show.slope);
    store(&dc, i, n, e * forget.of);
  });
}

static void back_rows(void *of, int64_t from, int64_t to) {
  const Step *s = of;
  const Backward *w = s->of;
  for (int64_t b = from; b < to; b++) back_row(w, s->made + b * s->row, s->t * w->batch + b, b);
}

/* Returns 1 where there is no memory. */
int backward(const Backward *w) {
  const int64_t batch = w->batch, size = w->size, depth = GATES * size, row = ROOMY(size, PANEL);
  const int64_t of_made = ROOMY(batch, TALL) * row, deep = ROOMY(depth, DEEP), of_seen = ROOMY(batch, READ) * deep;
  const int lie = deep == depth && batch % READ == 0; /* as tiles read them */
  float *made = malloc(of_made * sizeof(float) + of_seen * sizeof(Low));
  if (!made) return 1;
  Low *seen = (Low *)(made + of_made);
  memset(seen, 0, of_seen * sizeof(Low));
  for (int64_t b = 0; b < batch; b++) memcpy(made + b * row, w->dh + b * size, size * sizeof(float));
  for (int64_t t = w->length - 1; t >= 0; t--) {
    const Low *dsums = w->dsums + t * batch * depth;
    Step step = {w, made, 0, row, t};
    Product product = {lie ? dsums : seen, w->weights, deep, batch, depth, made, row};
    do_parts(w->threads, batch, 1, back_rows, &step);
    if (!lie) lay_rows(dsums, batch, depth, deep, seen);
    do_parts(w->threads, size, PANEL, multiply, &product);
  }
  for (int64_t b = 0; b < batch; b++) memcpy(w->dh + b * size, made + b * row, size * sizeof(float));
  free(made);
  return 0;
}
