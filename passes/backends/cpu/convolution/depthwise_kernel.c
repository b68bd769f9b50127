/* The gradients of a depthwise convolution of channels_last images, where oneDNN has no optimized kernel for them.

   Before: oneDNN's reference loop, element by element. After: `weight_gradient`, and `input_gradient` of strided
   convolutions, with sixteen channels in a vector, and each element of an image upcast once. jit_compiler.py compiles
   this file. A place of an image is a row of `channels` numbers. Sums are fp32: the weight's gradient is summed over an
   image, then over images; threads split channels, so that results do not depend on their number. */

#include "low_precision.h"
#include "thread_scratch.h"

typedef struct {
  int64_t images, channels, height, width; /* of the input */
  int64_t rows, columns;                   /* of the result */
  int64_t high, wide, down, right, above, beside; /* kernel, stride, padding */
  const Low *x, *grad;
  float* weight; /* [high * wide, channels]: its gradient is written, or it is read */
  Low* dx;
  int64_t failed;
} Depthwise;

INLINE Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

/* Upcasts `count` places from `from` on, `channels` elements apart, `n` of each. */
INLINE void widen_places(const Low* from, int64_t count, int64_t channels, int64_t n, Vector* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = read_low(from + i * channels, n);
}

/* Scratch of this thread for `count` vectors; null if out of memory. */
INLINE Vector* vectors(int64_t wanted) { return (Vector*)own_memory(wanted * (int64_t)(sizeof(Vector) / sizeof(Low))); }

/* -- the weight's gradient -------------------------------------------------------------------------------------- */

/* Adds products of a row of the gradient and a zero-padded row of the input for `taps` places of the kernel. */
INLINE void add_taps(const Vector* x, const Vector* grad, int64_t columns, int64_t right, const int taps, Vector* sums) {
  Vector own[7];
  for (int k = 0; k < taps; ++k) own[k] = sums[k];
  for (int64_t i = 0; i < columns; ++i) {
    const Vector g = grad[i];
    for (int k = 0; k < taps; ++k) own[k] = fused(g, x[i * right + k], own[k]);
  }
  for (int k = 0; k < taps; ++k) sums[k] = own[k];
}

static void add_row(const Vector* x, const Vector* grad, int64_t columns, int64_t right, int64_t wide, Vector* sums) {
  int64_t k = 0;
  for (; wide - k >= 7; k += 7) add_taps(x + k, grad, columns, right, 7, sums + k);
  for (; wide - k >= 5; k += 5) add_taps(x + k, grad, columns, right, 5, sums + k);
  for (; wide - k >= 3; k += 3) add_taps(x + k, grad, columns, right, 3, sums + k);
  for (; k < wide; ++k) add_taps(x + k, grad, columns, right, 1, sums + k);
}

/* For one image, `n` channels from `c` on. A ring buffer holds the input's last `high` rows, upcast. */
static void sum_image(const Depthwise* d, int64_t image, int64_t c, int64_t n, Vector* room) {
  const int64_t long_row = d->width + 2 * d->beside, taps = d->high * d->wide;
  Vector *sums = room, *grad = sums + taps, *kept = grad + d->columns;
  memset(room, 0, (taps + d->columns + d->high * long_row) * sizeof(Vector));
  const Low* x = d->x + image * d->height * d->width * d->channels + c;
  const Low* given = d->grad + image * d->rows * d->columns * d->channels + c;
  int64_t next = -d->above;
  for (int64_t row = 0; row < d->rows; ++row) {
    const int64_t first = row * d->down - d->above;
    for (next = next < first ? first : next; next < first + d->high; ++next) {
      Vector* to = kept + (next + d->above) % d->high * long_row + d->beside;
      if (next < 0 || next >= d->height) memset(to, 0, d->width * sizeof(Vector));
      else widen_places(x + next * d->width * d->channels, d->width, d->channels, n, to);
    }
    widen_places(given + row * d->columns * d->channels, d->columns, d->channels, n, grad);
    for (int64_t k = 0; k < d->high; ++k) {
      if (first + k < 0 || first + k >= d->height) continue;
      const Vector* from = kept + (first + k + d->above) % d->high * long_row;
      add_row(from, grad, d->columns, d->right, d->wide, sums + k * d->wide);
    }
  }
  for (int64_t k = 0; k < taps; ++k) {
    float* to = d->weight + k * d->channels + c;
    write_full(to, n, read_full(to, n) + sums[k]);
  }
}

static void sum_channels(void* of, int64_t from, int64_t to) {
  Depthwise* d = (Depthwise*)of;
  Vector* room = vectors(d->high * d->wide + d->columns + d->high * (d->width + 2 * d->beside));
  if (!room) {
    d->failed = 1;
    return;
  }
  for (int64_t image = 0; image < d->images; ++image) /* whose cache lines hold more channels than a vector */
    for (int64_t c = from; c < to; c += WIDE) sum_image(d, image, c, to - c < WIDE ? to - c : WIDE, room);
}

int weight_gradient(Depthwise* d, int64_t threads) {
  memset(d->weight, 0, d->high * d->wide * d->channels * sizeof(float));
  do_parts(threads, d->channels, 2 * WIDE, sum_channels, d);
  return (int)d->failed;
}

/* -- the input's gradient --------------------------------------------------------------------------------------- */

/* Adds the contribution of a row of the result through `taps` places of the kernel to a row of sums. */
INLINE void spread_taps(const float* weight, const Vector* grad, const Depthwise* d, int64_t n, const int taps, Vector* to) {
  Vector own[7];
  for (int k = 0; k < taps; ++k) own[k] = read_full(weight + k * d->channels, n);
  for (int64_t i = 0; i < d->columns; ++i)
    for (int k = 0; k < taps; ++k) to[i * d->right + k] = fused(grad[i], own[k], to[i * d->right + k]);
}

static void spread(const float* weight, const Vector* grad, const Depthwise* d, int64_t n, Vector* to) {
  int64_t k = 0;
  for (; d->wide - k >= 7; k += 7) spread_taps(weight + k * d->channels, grad, d, n, 7, to + k);
  for (; d->wide - k >= 5; k += 5) spread_taps(weight + k * d->channels, grad, d, n, 5, to + k);
  for (; d->wide - k >= 3; k += 3) spread_taps(weight + k * d->channels, grad, d, n, 3, to + k);
  for (; k < d->wide; ++k) spread_taps(weight + k * d->channels, grad, d, n, 1, to + k);
}

/* A row of `n` channels from `c` on: every row of the result that read it adds its part. */
static void spread_row(const Depthwise* d, int64_t image, int64_t y, int64_t c, int64_t n, Vector* room) {
  Vector *grad = room, *sums = grad + d->columns;
  memset(sums, 0, (d->width + 2 * d->beside) * sizeof(Vector));
  for (int64_t k = 0; k < d->high; ++k) {
    const int64_t from = y + d->above - k, row = from / d->down;
    if (from < 0 || from % d->down || row >= d->rows) continue;
    widen_places(d->grad + (image * d->rows + row) * d->columns * d->channels + c, d->columns, d->channels, n, grad);
    spread(d->weight + k * d->wide * d->channels + c, grad, d, n, sums);
  }
  Low* to = d->dx + (image * d->height + y) * d->width * d->channels + c;
  for (int64_t i = 0; i < d->width; ++i) write_low(to + i * d->channels, n, sums[d->beside + i]);
}

static void spread_rows(void* of, int64_t from, int64_t to) {
  Depthwise* d = (Depthwise*)of;
  Vector* room = vectors(d->columns + d->width + 2 * d->beside);
  if (!room) {
    d->failed = 1;
    return;
  }
  for (int64_t row = from; row < to; ++row)
    for (int64_t c = 0; c < d->channels; c += WIDE) {
      const int64_t left = d->channels - c;
      spread_row(d, row / d->height, row % d->height, c, left < WIDE ? left : WIDE, room);
    }
}

int input_gradient(Depthwise* d, int64_t threads) {
  do_parts(threads, d->images * d->height, 1, spread_rows, d);
  return (int)d->failed;
}
