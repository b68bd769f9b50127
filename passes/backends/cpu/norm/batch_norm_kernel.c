/* A batch norm in training with the following relu, or sum and relu, forward and backward, over channels_last images.

   Before: batch_norm, which reads its input three times, and relu; in backward threshold_backward and batch_norm's own.
   After: `forward`, which reads it twice and writes the relu's result, and `backward`, which reads input and gradient
   twice. The relu's mask is recomputed from the input, so that the result need not be saved; `again` recomputes the
   result. After a sum, the mask is read from the result, and the gradient behind the mask is that of the other summand.
   jit_compiler.py compiles this file. A row is a place of an image, of `width` channels. Sums are fp32 over a block of
   rows, and fp64 over blocks; variances are of differences from the first row, which is as close to the mean as any.
   Source of the formulas: aten/src/ATen/native/cpu/batch_norm_kernel.cpp. */

#include "vector_rows.h"

#define TALL 4 /* rows at a time, which share what is read of a channel */

typedef struct {
  int64_t rows, width, relu;
  Rows x, out;
  const float *weight, *bias;
  float *mean, *invstd, *running_mean, *running_var; /* `forward` writes them; the last two, where they are there */
  Rows other; /* added before the relu, where they are there */
} Forward;

typedef struct {
  int64_t rows, width, relu;
  Rows x, grad, dx; /* dx is written, where it is wanted */
  const float *weight, *bias, *mean, *invstd;
  float *dweight, *dbias, *slope, *shift; /* written; the last two are scratch */
  Rows out, masked; /* behind a sum: the result, and the gradient past the relu, which is written */
} Backward;

/* Iterates over rows and channels in memory order: `tall` rows from `row` on, and of each a vector of `n` from channel
   `i`. */
#define EACH_PLACE(begin, end, width, ...)                                                               \
  do {                                                                                                   \
    int64_t row = (begin);                                                                               \
    for (; row + TALL <= (end); row += TALL) { enum { tall = TALL }; EACH(0, width, __VA_ARGS__); }      \
    for (; row < (end); ++row) { enum { tall = 1 }; EACH(0, width, __VA_ARGS__); }                       \
  } while (0)

/* The row; prefetches `TALL` rows ahead, because the CPU detects no stream in so many short ones. */
INLINE Rows next_row(const Rows* all, int64_t row, int64_t width, int64_t i) {
  const Rows found = row_of(all, row, width);
  __builtin_prefetch((const char*)found.at + 2 * (i + TALL * width));
  return found;
}

INLINE Vector floats(const float* from, int64_t i, int64_t n) {
  const Rows row = {(void*)from, FULL};
  return load(&row, i, n);
}

/* Zero where `y` is not positive; a NaN stays, as in torch's relu. */
INLINE Vector above_zero(Vector given, Vector y) {
#if defined(__AVX512F__)
  const __mmask16 above = _mm512_cmp_ps_mask((__m512)y, _mm512_setzero_ps(), _CMP_NLE_UQ);
  return (Vector)_mm512_maskz_mov_ps(above, (__m512)given);
#else
  return (Vector)((Bits)given & ~(Bits)(y <= 0.0f));
#endif
}

/* Sums over a block of rows, fp32, and over all of a thread's rows, fp64. */
typedef struct {
  Rows first, second;
  double *firsts, *seconds;
} Sums;

INLINE Sums sums_of(double* room, int64_t width) {
  float* rest = (float*)(room + 2 * width);
  memset(room, 0, 3 * width * sizeof(double));
  const Sums found = {{rest, FULL}, {rest + width, FULL}, room, room + width};
  return found;
}

INLINE void add_to(const Rows* block, int64_t i, int64_t n, Vector given) {
  store(block, i, n, load(block, i, n) + given);
}

typedef struct { /* maps a vector of the input to the result: (x - mean) * scale + bias */
  Vector mean, scale, bias;
} Norm;

INLINE Norm norm_of(const float* mean, const float* invstd, const float* weight, const float* bias, int64_t i, int64_t n) {
  const Norm found = {floats(mean, i, n), floats(invstd, i, n) * floats(weight, i, n), floats(bias, i, n)};
  return found;
}

/* -- forward ---------------------------------------------------------------------------------------------------- */

INLINE void sum_rows(const Share* mine, const Forward* f) {
  const Rows top = row_of(&f->x, 0, f->width);
  const Sums sums = sums_of(mine->room, f->width);
  for (int64_t from = mine->from; from < mine->to; from += BLOCK) {
    const int64_t to = from + BLOCK < mine->to ? from + BLOCK : mine->to;
    EACH_PLACE(from, to, f->width, {
      const Vector shift = load(&top, i, n);
      Vector first = {0}, second = {0};
      for (int k = 0; k < tall; ++k) {
        const Rows x = next_row(&f->x, row + k, f->width, i);
        const Vector d = load(&x, i, n) - shift;
        first += d;
        second = fused(d, d, second);
      }
      add_to(&sums.first, i, n, first);
      add_to(&sums.second, i, n, second);
    });
    flush(&sums.first, sums.firsts, f->width);
    flush(&sums.second, sums.seconds, f->width);
  }
}

INLINE void norm_rows(const Share* mine, Forward f) {
  EACH_PLACE(mine->from, mine->to, f.width, {
    const Norm norm = norm_of(f.mean, f.invstd, f.weight, f.bias, i, n);
    for (int k = 0; k < tall; ++k) {
      const Rows x = next_row(&f.x, row + k, f.width, i), out = row_of(&f.out, row + k, f.width);
      Vector y = fused(load(&x, i, n) - norm.mean, norm.scale, norm.bias);
      if (f.other.kind) {
        const Rows other = next_row(&f.other, row + k, f.width, i);
        y += load(&other, i, n);
      }
      store(&out, i, n, f.relu ? above_zero(y, y) : y);
    }
  });
}

/* Compile-time constants: all is low precision, and whether there is a relu or a sum. */
INLINE Forward low(const Forward* given, int relu, Kind other) {
  Forward f = *given;
  f.x.kind = f.out.kind = LOW;
  f.relu = relu;
  f.other.kind = other;
  return f;
}

static void* sum_share(void* given) {
  const Share* mine = given;
  const Forward f = low(mine->given, 0, NONE);
  sum_rows(mine, &f);
  return 0;
}

static void* norm_share(void* given) {
  const Share* mine = given;
  const Forward* f = mine->given;
  if (f->other.kind) norm_rows(mine, low(f, 1, LOW));
  else if (f->relu) norm_rows(mine, low(f, 1, NONE));
  else norm_rows(mine, low(f, 0, NONE));
  return 0;
}

INLINE void move(float* running, int64_t i, double found, double momentum) {
  if (running) running[i] = (float)(momentum * found + (1 - momentum) * running[i]);
}

static void take_statistics(const Forward* f, const double* room, int64_t threads, double eps, double momentum) {
  const Rows top = row_of(&f->x, 0, f->width);
  for (int64_t i = 0; i < f->width; ++i) {
    const double first = over_threads(room, f->width, threads, i);
    const double second = over_threads(room, f->width, threads, f->width + i);
    const double away = first / f->rows, squares = second - first * away; /* a NaN stays one */
    const double spread = squares < 0 ? 0 : squares;
    const double mean = load(&top, i, 1)[0] + away;
    f->mean[i] = (float)mean;
    f->invstd[i] = (float)(1.0 / sqrt(spread / f->rows + eps));
    move(f->running_mean, i, mean, momentum);
    move(f->running_var, i, spread / (f->rows - 1), momentum); /* the unbiased variance, as torch stores it */
  }
}

/* -- backward --------------------------------------------------------------------------------------------------- */

/* The gradient that reaches the norm, for an input `away` from its mean; written as well after a sum. */
INLINE Vector past_relu(const Backward* b, const Rows* grad, Norm norm, Vector away, int64_t row, int64_t i, int64_t n) {
  const Vector given = load(grad, i, n);
  if (b->out.kind) {
    const Rows out = next_row(&b->out, row, b->width, i), masked = row_of(&b->masked, row, b->width);
    const Vector found = above_zero(given, load(&out, i, n));
    store(&masked, i, n, found);
    return found;
  }
  return b->relu ? above_zero(given, fused(away, norm.scale, norm.bias)) : given;
}

INLINE void sum_gradients(const Share* mine, Backward b) {
  const Sums sums = sums_of(mine->room, b.width);
  for (int64_t from = mine->from; from < mine->to; from += BLOCK) {
    const int64_t to = from + BLOCK < mine->to ? from + BLOCK : mine->to;
    EACH_PLACE(from, to, b.width, {
      const Norm norm = norm_of(b.mean, b.invstd, b.weight, b.bias, i, n);
      Vector first = {0}, second = {0};
      for (int k = 0; k < tall; ++k) {
        const Rows x = next_row(&b.x, row + k, b.width, i), grad = next_row(&b.grad, row + k, b.width, i);
        const Vector away = load(&x, i, n) - norm.mean, g = past_relu(&b, &grad, norm, away, row + k, i, n);
        first += g;
        second = fused(g, away, second);
      }
      add_to(&sums.first, i, n, first);
      add_to(&sums.second, i, n, second);
    });
    flush(&sums.first, sums.firsts, b.width);
    flush(&sums.second, sums.seconds, b.width);
  }
}

INLINE void write_gradients(const Share* mine, Backward b) {
  EACH_PLACE(mine->from, mine->to, b.width, {
    const Norm norm = norm_of(b.mean, b.invstd, b.weight, b.bias, i, n);
    const Vector slope = floats(b.slope, i, n), shift = floats(b.shift, i, n);
    for (int k = 0; k < tall; ++k) {
      const Rows x = next_row(&b.x, row + k, b.width, i), grad = next_row(&b.grad, row + k, b.width, i);
      const Rows dx = row_of(&b.dx, row + k, b.width);
      const Vector away = load(&x, i, n) - norm.mean, g = past_relu(&b, &grad, norm, away, row + k, i, n);
      store(&dx, i, n, fused(g, norm.scale, fused(away, slope, shift)));
    }
  });
}

INLINE Backward low_gradients(const Backward* given, int relu, Kind out) {
  Backward b = *given;
  b.x.kind = b.grad.kind = b.dx.kind = LOW;
  b.relu = relu;
  b.out.kind = b.masked.kind = out;
  return b;
}

static void* sum_gradients_share(void* given) {
  const Share* mine = given;
  const Backward* b = mine->given;
  if (b->out.kind) sum_gradients(mine, low_gradients(b, 0, LOW));
  else if (b->relu) sum_gradients(mine, low_gradients(b, 1, NONE));
  else sum_gradients(mine, low_gradients(b, 0, NONE));
  return 0;
}

static void* gradients_share(void* given) {
  const Share* mine = given;
  const Backward* b = mine->given;
  if (b->out.kind) { /* the sums were over what is behind the relu's mask */
    Backward past = *b;
    past.grad = b->masked;
    write_gradients(mine, low_gradients(&past, 0, NONE));
  } else if (b->relu) write_gradients(mine, low_gradients(b, 1, NONE));
  else write_gradients(mine, low_gradients(b, 0, NONE));
  return 0;
}

static void take_sums(const Backward* b, const double* room, int64_t threads) {
  for (int64_t i = 0; i < b->width; ++i) {
    const double first = over_threads(room, b->width, threads, i);
    const double second = over_threads(room, b->width, threads, b->width + i);
    const double invstd = b->invstd[i], scale = invstd * b->weight[i] / b->rows;
    b->dweight[i] = (float)(second * invstd);
    b->dbias[i] = (float)first;
    b->slope[i] = (float)(-scale * invstd * invstd * second);
    b->shift[i] = (float)(-scale * first);
  }
}

/* -- what Python calls: they return 0, or 1 where there is no memory --------------------------------------------- */

int again(const Forward* f, int64_t threads) {
  double* room;
  threads = in_shares((Share){.given = f, .to = f->rows}, f->width, threads, &room, norm_share);
  free(room);
  return !threads;
}

int forward(const Forward* f, double eps, double momentum, int64_t threads) {
  double* room;
  if (!f->rows) return 0; /* there is no first row to look at, and running statistics stay, as torch's */
  const int64_t took = in_shares((Share){.given = f, .to = f->rows}, f->width, threads, &room, sum_share);
  if (took) take_statistics(f, room, took, eps, momentum);
  free(room);
  return !took || again(f, threads);
}

int backward(const Backward* b, int64_t threads) {
  double* room;
  const Share whole = {.given = b, .to = b->rows};
  int64_t took = in_shares(whole, b->width, threads, &room, sum_gradients_share);
  if (took) take_sums(b, room, took);
  free(room);
  if (!took || b->dx.kind == NONE) return !took;
  took = in_shares(whole, b->width, threads, &room, gradients_share);
  free(room);
  return !took;
}
