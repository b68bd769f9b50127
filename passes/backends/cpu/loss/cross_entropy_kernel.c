/* The cross entropy of rows of low-precision logits, and its gradient, each row while it is in the L1 cache.

   Before: logits upcast, log_softmax, gather; in backward softmax, a product, scatter_add, a cast, each over memory.
   After: `rows`, and `backward`, which read a row twice and write it once. All is fp32, partial sums of 4,096 classes
   are added up in fp64, and the gradient is rounded once. jit_compiler.py compiles this file. */

#include "vector_rows.h"

typedef struct {
  int64_t rows, classes;
  Rows logits, out; /* out: the gradient, written; it may be the logits */
  const int64_t* target; /* a target that is no class is ignored */
  const float *whole, *at_target; /* of a gradient: the factor of a row's softmax, and the term at its target */
  const float* others; /* added to the gradient; null for none */
  float* losses; /* written by `rows` */
} Entropy;

INLINE float largest(const Rows* row, int64_t classes) {
  Vector most = (Vector){0} - INFINITY;
  EACH(0, classes, {
    Vector v = load(row, i, n);
    for (int64_t k = n; k < WIDE; ++k) v[k] = -INFINITY;
    most = larger(v, most);
  });
  float found = most[0];
  for (int k = 1; k < WIDE; ++k) found = most[k] > found ? most[k] : found;
  return found;
}

/* The sum of exp(x - maximum) over a row, and these values, if there is memory for them. */
INLINE double sum_of_exponentials(const Rows* row, int64_t classes, float most, const Rows* room) {
  double total = 0;
  for (int64_t c = 0; c < classes; c += PART) {
    const int64_t end = c + PART < classes ? c + PART : classes;
    Vector lanes = {0};
    EACH(c, end, {
      Vector e = exponential(load(row, i, n) - most);
      for (int64_t k = n; k < WIDE; ++k) e[k] = 0;
      store(room, i, n, e);
      lanes += e;
    });
    total += sum_of(lanes);
  }
  return total;
}

INLINE int is_class(const Entropy* e, int64_t row) { return e->target[row] >= 0 && e->target[row] < e->classes; }

static void* rows_share(void* given) {
  const Share* mine = given;
  const Entropy* e = mine->given;
  const Rows none = {0, NONE}, all = {e->logits.at, LOW};
  for (int64_t row = mine->from; row < mine->to; ++row) {
    e->losses[row] = 0;
    if (!is_class(e, row)) continue;
    const Rows logits = row_of(&all, row, e->classes);
    const float most = largest(&logits, e->classes);
    const double total = sum_of_exponentials(&logits, e->classes, most, &none);
    e->losses[row] = (float)(log(total) + most - load(&logits, e->target[row], 1)[0]);
  }
  return 0;
}

INLINE void gradient_row(const Entropy* e, int64_t row, Rows room, const float* others) {
  const Rows all = {e->logits.at, LOW}, made = {e->out.at, LOW}, other = {(void*)others, others ? FULL : NONE};
  const Rows logits = row_of(&all, row, e->classes), out = row_of(&made, row, e->classes);
  const Rows more = row_of(&other, row, e->classes);
  const float most = largest(&logits, e->classes);
  const float each = (float)(e->whole[row] / sum_of_exponentials(&logits, e->classes, most, &room));
  EACH(0, e->classes, { store(&out, i, n, load(&room, i, n) * each + load(&more, i, n)); });
  const Vector left = load(&room, e->target[row], 1) * each + e->at_target[row];
  store(&out, e->target[row], 1, left + load(&more, e->target[row], 1));
}

/* An ignored row has no gradient, whatever its logits are. */
INLINE void no_gradient(const Entropy* e, int64_t row, const float* others) {
  const Rows made = {e->out.at, LOW}, other = {(void*)others, others ? FULL : NONE};
  const Rows out = row_of(&made, row, e->classes), more = row_of(&other, row, e->classes);
  EACH(0, e->classes, { store(&out, i, n, load(&more, i, n)); });
}

static void* gradient_share(void* given) {
  const Share* mine = given;
  const Entropy* e = mine->given;
  const Rows room = {mine->room, FULL};
  for (int64_t row = mine->from; row < mine->to; ++row)
    if (!is_class(e, row)) no_gradient(e, row, e->others);
    else if (e->others) gradient_row(e, row, room, e->others);
    else gradient_row(e, row, room, 0);
  return 0;
}

/* -- what Python calls: they return 0, or 1 where there is no memory --------------------------------------------- */

int rows(const Entropy* e, int64_t threads) {
  double* room;
  threads = in_shares((Share){.given = e, .to = e->rows}, 1, threads, &room, rows_share);
  free(room);
  return !threads;
}

int backward(const Entropy* e, int64_t threads) {
  double* room; /* a row in fp32 */
  threads = in_shares((Share){.given = e, .to = e->rows}, (e->classes + 7) / 8, threads, &room, gradient_share);
  free(room);
  return !threads;
}
