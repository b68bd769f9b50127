/* The gradients of a group norm of channels_last images.

   Before: native_group_norm_backward, which processes such images channel by channel. After: `backward`, which reads
   input and gradient twice, place by place. jit_compiler.py compiles this file. A row is a place of an image, of
   `width` channels. Sums are fp32 over a block of rows, and fp64 over blocks; threads split images, so that results do
   not depend on their number. Source of the formulas: aten/src/ATen/native/cpu/group_norm_kernel.cpp. */

#include "vector_rows.h"

typedef struct {
  int64_t images, places, width, groups;
  Rows x, grad, dx; /* dx is written, where it is wanted */
  const float *weight, *mean, *invstd; /* [width], [images, groups] */
  double* sums;       /* [images, 2, width]: of the gradient, and of it times the input; written */
  float* scratch;     /* [images, 3, width] */
} GroupNorm;

static void sum_image(const GroupNorm* g, int64_t image, double* sums, float* block) {
  const Rows first = {block, FULL}, second = {block + g->width, FULL};
  memset(sums, 0, 2 * g->width * sizeof(double));
  memset(block, 0, 2 * g->width * sizeof(float));
  for (int64_t from = 0; from < g->places; from += BLOCK) {
    const int64_t to = from + BLOCK < g->places ? from + BLOCK : g->places;
    for (int64_t place = from; place < to; ++place) {
      const Rows x = row_of(&g->x, image * g->places + place, g->width);
      const Rows grad = row_of(&g->grad, image * g->places + place, g->width);
      EACH(0, g->width, {
        const Vector d = load(&grad, i, n);
        store(&first, i, n, load(&first, i, n) + d);
        store(&second, i, n, fused(d, load(&x, i, n), load(&second, i, n)));
      });
    }
    flush(&first, sums, g->width);
    flush(&second, sums + g->width, g->width);
  }
}

/* For each channel: the factors of the gradient and of the input, and the constant term. */
static void take_slopes(const GroupNorm* g, int64_t image, const double* sums, float* slopes) {
  const int64_t deep = g->width / g->groups;
  for (int64_t group = 0; group < g->groups; ++group) {
    const double mean = g->mean[image * g->groups + group], invstd = g->invstd[image * g->groups + group];
    double first = 0, second = 0;
    for (int64_t i = group * deep; i < (group + 1) * deep; ++i) {
      first += sums[i] * g->weight[i];
      second += sums[g->width + i] * g->weight[i];
    }
    const double part = 1.0 / (deep * g->places);
    const double slope = (first * mean - second) * invstd * invstd * invstd * part;
    const double shift = -slope * mean - first * invstd * part;
    for (int64_t i = group * deep; i < (group + 1) * deep; ++i) {
      slopes[i] = (float)(invstd * g->weight[i]);
      slopes[g->width + i] = (float)slope;
      slopes[2 * g->width + i] = (float)shift;
    }
  }
}

static void some_images(void* of, int64_t from, int64_t to) {
  GroupNorm g = *(GroupNorm*)of;
  const int wanted = g.dx.kind != NONE;
  g.x.kind = g.grad.kind = g.dx.kind = LOW; /* is told to the compiler */
  for (int64_t image = from; image < to; ++image) {
    double* sums = g.sums + image * 2 * g.width;
    float* slopes = g.scratch + image * 3 * g.width;
    sum_image(&g, image, sums, slopes);
    if (!wanted) continue;
    take_slopes(&g, image, sums, slopes);
    const Rows by = {slopes, FULL}, slope = {slopes + g.width, FULL}, shift = {slopes + 2 * g.width, FULL};
    for (int64_t row = image * g.places; row < (image + 1) * g.places; ++row) {
      const Rows x = row_of(&g.x, row, g.width), grad = row_of(&g.grad, row, g.width), dx = row_of(&g.dx, row, g.width);
      EACH(0, g.width, {
        const Vector past = fused(load(&x, i, n), load(&slope, i, n), load(&shift, i, n));
        store(&dx, i, n, fused(load(&grad, i, n), load(&by, i, n), past));
      });
    }
  }
}

void backward(GroupNorm* given, int64_t threads) { do_parts(threads, given->images, 1, some_images, given); }
