/* A residual sum and the following norm, forward and backward, in one pass over memory each.

   Before: add, layer_norm, a cast for the next matmuls; in backward casts, sums, layer_norm's backward, a cast. After:
   `forward` and `backward`, which read and write every row once. Casts happen in registers. jit_compiler.py compiles
   this file with the macros LOW_FP16 (else bf16) and BACKWARD (else only forward). A row is read two or three times
   while it is in the L1 cache. Source of the formulas: aten/src/ATen/native/cpu/layer_norm_kernel.cpp; statistics here
   take two passes. */

#include "vector_rows.h"

/* -- what is given ---------------------------------------------------------------------------------------------- */

typedef struct {
  int64_t rows, width, centered; /* centered: a layer norm; else the mean is taken to be zero, as in RMS norms */
  Rows x, branch, weight, bias, sum, low, full; /* the last three are written */
  float *mean, *rstd;
} Forward;

typedef struct {
  int64_t rows, width, centered, count; /* count: of further gradients of the norm's results */
  const Rows* more;
  Rows grad, grad_sum, sum, weight, dsum, dlow; /* the last two, the sum's gradient in two precisions, are written */
  const float *mean, *rstd;
  float *dweight, *dbias; /* written; null where nobody wants them */
} Backward;

/* -- forward ---------------------------------------------------------------------------------------------------- */

#ifndef BACKWARD

/* Writes the sum, if there is a branch, and returns the row to normalize, in fp32, and its total. */
INLINE double add_row(const Forward* f, int64_t row, Rows* room, Rows* seen) {
  const Rows x = row_of(&f->x, row, f->width), branch = row_of(&f->branch, row, f->width);
  const Rows sum = row_of(&f->sum, row, f->width);
  *seen = sum.kind == FULL ? sum : f->branch.kind == NONE && x.kind == FULL ? x : *room;
  double total = 0;
  for (int64_t c = 0; c < f->width; c += PART) {
    const int64_t end = c + PART < f->width ? c + PART : f->width;
    Vector lanes = {0};
    EACH(c, end, {
      Vector v = load(&x, i, n);
      if (branch.kind != NONE) v += load(&branch, i, n);
      if (sum.kind != NONE) store(&sum, i, n, v);
      if (sum.kind == LOW) v = load(&sum, i, n); /* what is normed is what others read */
      if (seen->at == room->at) store(room, i, n, v);
      lanes += v;
    });
    total += sum_of(lanes);
  }
  return total;
}

INLINE double squares(const Rows* seen, int64_t width, float mean) {
  double total = 0;
  for (int64_t c = 0; c < width; c += PART) {
    const int64_t end = c + PART < width ? c + PART : width;
    Vector lanes = {0};
    EACH(c, end, {
      Vector v = load(seen, i, n) - mean;
      if (n < WIDE) for (int k = n; k < WIDE; ++k) v[k] = 0;
      lanes = fused(v, v, lanes);
    });
    total += sum_of(lanes);
  }
  return total;
}

INLINE void forward_rows(const Share* mine, const Forward* f) {
  Rows room = {mine->room, FULL};
  for (int64_t row = mine->from; row < mine->to; ++row) {
    Rows seen;
    const double total = add_row(f, row, &room, &seen);
    const float mean = f->centered ? (float)(total / f->width) : 0.0f;
    const float rstd = (float)(1.0 / sqrt(squares(&seen, f->width, mean) / f->width + mine->eps));
    const Rows low = row_of(&f->low, row, f->width), full = row_of(&f->full, row, f->width);
    EACH(0, f->width, {
      Vector v = (load(&seen, i, n) - mean) * rstd;
      if (f->weight.kind != NONE) v = fused(v, load(&f->weight, i, n), load(&f->bias, i, n));
      else if (f->bias.kind != NONE) v += load(&f->bias, i, n);
      store(&low, i, n, v);
      store(&full, i, n, v);
    });
    f->mean[row] = mean;
    f->rstd[row] = rstd;
  }
}

/* The usual kinds are compile-time constants, which halves the time. */
INLINE void usual_forward(const Share* mine, Forward f, Kind x, Kind branch, Kind full) {
  f.x.kind = x;
  f.weight.kind = f.bias.kind = FULL;
  f.low.kind = LOW;
  f.branch.kind = branch;
  f.sum.kind = branch == NONE ? NONE : x;
  f.full.kind = full;
  forward_rows(mine, &f);
}

static void* forward_share(void* given) {
  const Share* mine = given;
  const Forward* f = mine->given;
  const int usual = f->weight.kind == FULL && f->bias.kind == FULL && f->low.kind == LOW;
  const int is_full = f->x.kind == FULL, has_branch = f->branch.kind == LOW, has_full = f->full.kind == FULL;
  if (usual && is_full && has_branch && !has_full) usual_forward(mine, *f, FULL, LOW, NONE);
  else if (usual && is_full && has_branch) usual_forward(mine, *f, FULL, LOW, FULL);
  else if (usual && is_full && f->branch.kind == NONE && !has_full) usual_forward(mine, *f, FULL, NONE, NONE);
  else if (usual && !is_full && has_branch && !has_full) usual_forward(mine, *f, LOW, LOW, NONE);
  else if (usual && !is_full && f->branch.kind == NONE && !has_full) usual_forward(mine, *f, LOW, NONE, NONE);
  else forward_rows(mine, f);
  return 0;
}

/* Entry points for Python, this and `backward`: return 0, or 1 if out of memory. */
int forward(const Forward* f, double eps, int64_t threads) {
  double* room;
  threads = in_shares((Share){.given = f, .eps = eps, .to = f->rows}, f->width, threads, &room, forward_share);
  free(room);
  return !threads;
}

#else

/* -- backward --------------------------------------------------------------------------------------------------- */

typedef struct { /* what a thread writes to: fp32 sums over a block of rows, fp64 sums over all, and rows */
  double *weights, *biases;
  Rows block_weights, block_biases, normed, product;
} Sums;

INLINE Sums sums_of(double* room, int64_t width) {
  float* rest = (float*)(room + 2 * width);
  const Sums found = {room, room + width, {rest, FULL}, {rest + width, FULL}, {rest + 2 * width, FULL}, {rest + 3 * width, FULL}};
  return found;
}

INLINE void backward_row(const Backward* b, const Sums* s, int64_t row) {
  const int64_t width = b->width;
  const float mean = b->centered ? b->mean[row] : 0.0f, rstd = b->rstd[row];
  const Rows sum = row_of(&b->sum, row, width), grad_sum = row_of(&b->grad_sum, row, width);
  const Rows dsum = row_of(&b->dsum, row, width), dlow = row_of(&b->dlow, row, width);
  const Rows grad = row_of(&b->grad, row, width);
  Rows more[b->count + 1];
  for (int64_t k = 0; k < b->count; ++k) more[k] = row_of(&b->more[k], row, width);
  double first = 0, second = 0;
  for (int64_t c = 0; c < width; c += PART) {
    const int64_t end = c + PART < width ? c + PART : width;
    Vector lanes = {0}, others = {0};
    EACH(c, end, {
      Vector g = load(&grad, i, n);
      for (int64_t k = 0; k < b->count; ++k) g += load(&more[k], i, n);
      const Vector x = (load(&sum, i, n) - mean) * rstd;
      if (b->dweight) store(&s->block_weights, i, n, fused(g, x, load(&s->block_weights, i, n)));
      if (b->dbias) store(&s->block_biases, i, n, g + load(&s->block_biases, i, n));
      if (b->weight.kind != NONE) g *= load(&b->weight, i, n);
      store(&s->normed, i, n, x);
      store(&s->product, i, n, g);
      lanes += g;
      others = fused(g, x, others);
    });
    first += sum_of(lanes);
    second += sum_of(others);
  }
  const float of_mean = b->centered ? (float)(first / width) : 0.0f, of_rstd = (float)(second / width);
  EACH(0, width, {
    Vector d = (load(&s->product, i, n) - of_mean - load(&s->normed, i, n) * of_rstd) * rstd;
    if (grad_sum.kind != NONE) d += load(&grad_sum, i, n);
    store(&dsum, i, n, d);
    store(&dlow, i, n, d);
  });
}

INLINE void backward_rows(const Share* mine, const Backward* b) {
  const Sums s = sums_of(mine->room, b->width);
  memset(mine->room, 0, 3 * b->width * sizeof(double)); /* all sums */
  for (int64_t row = mine->from; row < mine->to; ++row) {
    backward_row(b, &s, row);
    if ((row + 1) % BLOCK && row + 1 < mine->to) continue;
    if (b->dweight) flush(&s.block_weights, s.weights, b->width);
    if (b->dbias) flush(&s.block_biases, s.biases, b->width);
  }
}

INLINE void usual_backward(const Share* mine, Backward b, Kind sum, int is_alone) {
  b.weight.kind = FULL;
  b.sum.kind = sum;
  b.dsum.kind = sum == FULL ? FULL : NONE;
  b.dlow.kind = LOW;
  if (is_alone) {
    b.grad.kind = LOW;
    b.grad_sum.kind = sum;
    b.count = 0;
  }
  backward_rows(mine, &b);
}

static void* backward_share(void* given) {
  const Share* mine = given;
  const Backward* b = mine->given;
  const int usual = b->weight.kind == FULL && b->dlow.kind == LOW && b->dweight && b->dbias;
  const int is_full = b->sum.kind == FULL && b->dsum.kind == FULL, is_low = b->sum.kind == LOW && b->dsum.kind == NONE;
  const int is_alone = !b->count && b->grad.kind == LOW && b->grad_sum.kind == b->sum.kind;
  if (usual && is_full && is_alone) usual_backward(mine, *b, FULL, 1);
  else if (usual && is_full) usual_backward(mine, *b, FULL, 0);
  else if (usual && is_low && is_alone) usual_backward(mine, *b, LOW, 1);
  else backward_rows(mine, b);
  return 0;
}

int backward(const Backward* b, int64_t threads) {
  double* room;
  threads = in_shares((Share){.given = b, .to = b->rows}, b->width, threads, &room, backward_share);
  for (int64_t i = 0; i < b->width && threads; ++i) {
    if (b->dweight) b->dweight[i] = (float)over_threads(room, b->width, threads, i);
    if (b->dbias) b->dbias[i] = (float)over_threads(room, b->width, threads, b->width + i);
  }
  free(room);
  return !threads;
}

#endif
