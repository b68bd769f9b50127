/* One pass over the parameters of a model: gradients in; values, state and low-precision copies out.

   Before: a cast of each gradient, a check, torch's fused kernel, a cast of each weight. After: `update`, which reads
   and writes every tensor once.

   jit_compiler.py compiles this file with macros: LOW_FP16 (else bf16), RULE one of ADAM, SGD, ADAGRAD, and DECOUPLED,
   DECAY, AMSGRAD, MOMENTUM, NESTEROV, each 0 or 1. In C, whose headers take a compiler a tenth of C++'s time.
   Source of the rules, operation by operation: aten/src/ATen/native/cpu/Fused{Adam,SGD,Adagrad}Kernel.cpp. */

#include <float.h>
#include <math.h>

#include "low_precision.h"

#define ADAM 1
#define SGD 2
#define ADAGRAD 3
#define CHUNK 1024
#define LINE 16  /* elements that memory is read in */
#define LANES 32 /* sums at a time: one would wait for each addition */

/* -- numbers ------------------------------------------------------------------------------------------------------ */

INLINE float element(const void* grad, int is_low, int64_t i) {
  return is_low ? widen(((const Low*)grad)[i]) : ((const float*)grad)[i];
}

/* a * b + c, rounded once where the CPU can: where torch's kernels are contracted, too. */
INLINE float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

/* -- what is given ---------------------------------------------------------------------------------------------- */

typedef struct { /* all of one layout and without gaps; pointers are null where there is nothing */
  float* value;
  const void* grad;
  float *first, *second, *largest, *step;
  Low* low;
  int64_t size, grad_is_low;
  const int32_t* slots; /* of a table: where in `rows` to find what is added to the gradient of each row, or -1 */
  const float* rows;
  int64_t width; /* of a row */
} Parameter;

typedef struct {
  double weight_decay, eps, beta1, beta2, momentum, lr_decay, sign, clip_value;
} Options;

typedef struct { /* of the whole step; null for none, but for lr */
  const double* lr;
  const float *found_inf, *unscale, *clip;
} Step;

typedef struct { /* what is the same for all elements of a parameter */
  float unscale, clip, limit, sign, decay, keep, first, second, beta2, root, eps, rate;
} Scalars;

static Scalars scalars_of(const Parameter* p, const Options* o, const Step* now) {
  const double lr = *now->lr, step = p->step ? *p->step + 1.0 : 1.0;
  Scalars s = {0};
  s.unscale = now->unscale ? *now->unscale : 1.0f;
  s.clip = now->clip ? *now->clip : 1.0f;
  s.limit = (float)o->clip_value;
  s.sign = (float)o->sign;
  s.decay = (float)o->weight_decay;
  s.keep = DECOUPLED ? (float)(1 - lr * o->weight_decay) : 1.0f;
  s.eps = (float)o->eps;
  s.first = (float)(RULE == ADAM ? 1 - o->beta1 : o->momentum);
  s.second = (float)(1 - o->beta2);
  s.beta2 = (float)o->beta2;
  s.root = (float)sqrt(1 - pow(o->beta2, step));
  s.rate = (float)(RULE == ADAM ? -(lr / (1 - pow(o->beta1, step))) : -(lr / (1 + (step - 1) * o->lr_decay)));
  return s;
}

/* -- one element ------------------------------------------------------------------------------------------------ */

INLINE float prepared(float g, const Scalars* s) {
  g = g * s->unscale * s->clip;
  g = g < -s->limit ? -s->limit : g; /* NaN stays */
  g = g > s->limit ? s->limit : g;
  return g * s->sign;
}

INLINE float by_adam(float p, float g, float* first, float* second, float* largest, const Scalars* s) {
  const int near = s->first < 0.5f;
  *first = fused(near ? s->first : s->first - 1.0f, g - *first, near ? *first : g);
  *second = fused(s->second * g, g, *second * s->beta2);
  float square = *second;
  if (AMSGRAD) {
    square = *largest > square ? *largest : square;
    *largest = square = *largest != *largest ? *largest : square;
  }
  return p * s->keep + s->rate * *first / (sqrtf(square) / s->root + s->eps);
}

INLINE float by_adagrad(float p, float g, float* total, const Scalars* s) {
  *total = fused(g, g, *total);
  return p + s->rate * g / (sqrtf(*total) + s->eps);
}

INLINE float by_sgd(float p, float g, float* buffer, const Scalars* s) {
  if (MOMENTUM) {
    *buffer = *buffer * s->first + g;
    g = NESTEROV ? fused(*buffer, s->first, g) : *buffer;
  }
  return fused(s->rate, g, p);
}

/* -- a range of one parameter ----------------------------------------------------------------------------------- */

INLINE void update_as(const Parameter* p, const Scalars* s, int64_t i, int64_t end, int grad_is_low, int has_low) {
  const int has_first = RULE != SGD || MOMENTUM, has_second = RULE == ADAM;
  float *restrict value = p->value, *restrict first = p->first, *restrict second = p->second;
  float* restrict largest = p->largest;
  Low* restrict low = p->low;
  for (; i < end; ++i) {
    float g = prepared(element(p->grad, grad_is_low, i), s);
    if (DECAY) g = fused(value[i], s->decay, g);
    float a = has_first ? first[i] : 0, b = has_second ? second[i] : 0, c = AMSGRAD ? largest[i] : 0;
    const float made = RULE == ADAM      ? by_adam(value[i], g, &a, &b, &c, s)
                       : RULE == ADAGRAD ? by_adagrad(value[i], g, &a, s)
                                         : by_sgd(value[i], g, &a, s);
    if (has_first) first[i] = a;
    if (has_second) second[i] = b;
    if (AMSGRAD) largest[i] = c;
    value[i] = made;
    if (has_low) low[i] = narrow(made);
  }
}

INLINE void narrow_range(const float* restrict from, Low* restrict to, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) to[i] = narrow(from[i]);
}

/* With gradients in fp32 a compiler makes single numbers of a loop that rounds, too: there each has one of its own. */
static void update_range(const Parameter* p, const Scalars* s, int64_t begin, int64_t end) {
  if (p->grad_is_low && p->low) update_as(p, s, begin, end, 1, 1);
  else if (p->grad_is_low) update_as(p, s, begin, end, 1, 0);
  else if (!p->low) update_as(p, s, begin, end, 0, 0);
  else
    for (int64_t i = begin; i < end; i += CHUNK) {
      const int64_t stop = end - i < CHUNK ? end : i + CHUNK;
      update_as(p, s, i, stop, 0, 0);
      narrow_range(p->value, p->low, i, stop);
    }
}

/* Squares of fp32 do not overflow in fp64: their sum is finite where all elements are. */
INLINE double squares_as(const void* grad, int64_t begin, int64_t end, int is_low) {
  double lanes[LANES] = {0}, sum = 0;
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES)
    for (int k = 0; k < LANES; ++k) {
      const double g = element(grad, is_low, i + k);
      lanes[k] += g * g;
    }
  for (; i < end; ++i) sum += (double)element(grad, is_low, i) * element(grad, is_low, i);
  for (int k = 0; k < LANES; ++k) sum += lanes[k];
  return sum;
}

INLINE void add_as(const Parameter* p, int64_t i, int64_t end, int grad_is_low) {
  float* restrict sum = p->value;
  for (; i < end; ++i) sum[i] += element(p->grad, grad_is_low, i);
}

/* -- several threads: equal shares of the elements of all parameters; who computes an element changes nothing ------ */

typedef enum { UPDATE, LOOK, ADD } Work;

typedef struct {
  Work work;
  const Parameter* all;
  int64_t count, from, to;
  const Options* options;
  const Step* now;
  double squares;
} Share;

static void do_range(Share* mine, const Scalars* s, const Parameter* p, int64_t begin, int64_t end) {
  if (mine->work == UPDATE) {
    update_range(p, s, begin, end);
  } else if (mine->work == LOOK) {
    mine->squares += p->grad_is_low ? squares_as(p->grad, begin, end, 1) : squares_as(p->grad, begin, end, 0);
  } else {
    if (p->grad_is_low) add_as(p, begin, end, 1);
    else add_as(p, begin, end, 0);
  }
}

INLINE Parameter moved(const Parameter* p, int64_t by) {
  Parameter q = *p;
  q.value += by;
  q.first = q.first ? q.first + by : 0;
  q.second = q.second ? q.second + by : 0;
  q.largest = q.largest ? q.largest + by : 0;
  q.low = q.low ? q.low + by : 0;
  return q;
}

INLINE void add_to(float* restrict sum, const float* restrict added, int64_t count) {
  for (int64_t k = 0; k < count; ++k) sum[k] += added[k];
}

/* Makes the gradient of elements `begin` to `end` of a table: the dense part of it, and what is added row by row. */
static void make_gradient(const Parameter* p, int64_t begin, int64_t end, float* restrict made) {
  memset(made, 0, (end - begin) * sizeof *made);
  if (p->grad)
    for (int64_t i = begin; i < end; ++i) made[i - begin] = element(p->grad, p->grad_is_low, i);
  int64_t row = begin / p->width, place = begin % p->width;
  for (int64_t i = begin; i < end; ++row, place = 0) {
    const int64_t count = p->width - place < end - i ? p->width - place : end - i;
    if (p->slots[row] >= 0) add_to(made + (i - begin), p->rows + p->slots[row] * p->width + place, count);
    i += count;
  }
}

/* Asks for the rows that are added to the elements behind `begin`: they lie anywhere, in the order of the ids. */
INLINE void fetch_rows(const Parameter* p, int64_t begin) {
  const int64_t table = p->size / p->width, stop = (begin + CHUNK) / p->width;
  for (int64_t row = begin / p->width; row < (stop < table ? stop : table); ++row)
    for (int64_t k = 0; p->slots[row] >= 0 && k < p->width; k += LINE)
      __builtin_prefetch(p->rows + p->slots[row] * p->width + k);
}

/* A table, some rows at a time: their gradient is made on the stack. */
static void do_rows(Share* mine, const Scalars* s, const Parameter* p, int64_t i, int64_t end) {
  float made[CHUNK];
  for (; i < end; i += CHUNK) {
    const int64_t count = end - i < CHUNK ? end - i : CHUNK;
    fetch_rows(p, i + CHUNK);
    make_gradient(p, i, i + count, made);
    Parameter q = moved(p, i);
    q.grad = made;
    q.grad_is_low = 0;
    do_range(mine, s, &q, 0, count);
  }
}

static void* do_share(void* given) {
  Share* mine = given;
  int64_t start = 0;
  for (int64_t k = 0; k < mine->count; start += mine->all[k++].size) {
    const int64_t size = mine->all[k].size;
    const int64_t begin = mine->from > start ? mine->from - start : 0;
    const int64_t end = mine->to - start < size ? mine->to - start : size;
    if (begin >= end) continue;
    const Parameter* p = &mine->all[k];
    const Scalars s = mine->work == UPDATE ? scalars_of(p, mine->options, mine->now) : (Scalars){0};
    if (p->slots) do_rows(mine, &s, p, begin, end);
    else do_range(mine, &s, p, begin, end);
  }
  return 0;
}

/* Does all shares, each in its thread, and returns what was seen in the whole. */
static Share in_shares(Share whole, int64_t threads) {
  Share shares[MOST_THREADS];
  threads = threads_of(threads);
  for (int64_t k = 0; k < whole.count; ++k) whole.to += whole.all[k].size;
  for (int64_t t = 0; t < threads; ++t) {
    shares[t] = whole;
    shares[t].from = whole.to * t / threads;
    shares[t].to = whole.to * (t + 1) / threads;
  }
  do_shares(shares, sizeof *shares, threads, do_share);
  for (int64_t t = 0; t < threads; ++t) whole.squares += shares[t].squares;
  return whole;
}

/* -- what Python calls ------------------------------------------------------------------------------------------- */

/* Updates all parameters and their steps, or nothing where *found_inf is above 0. */
void update(const Parameter* all, int64_t count, int64_t threads, const Options* options, const Step* now) {
  if (now->found_inf && *now->found_inf > 0) return;
  in_shares((Share){.work = UPDATE, .all = all, .count = count, .options = options, .now = now}, threads);
  for (int64_t k = 0; k < count; ++k)
    if (all[k].step) *all[k].step += 1.0f;
}

/* Sets *found_inf to 1 where a gradient has an element that is not finite, and *norm to the norm of them all. */
void look(const Parameter* all, int64_t count, int64_t threads, float* found_inf, float* norm) {
  const Share seen = in_shares((Share){.work = LOOK, .all = all, .count = count}, threads);
  if (!(seen.squares <= DBL_MAX)) *found_inf = 1.0f;
  *norm = (float)sqrt(seen.squares);
}

/* Adds each gradient to the fp32 sum that `value` points to. */
void add(const Parameter* all, int64_t count, int64_t threads) {
  in_shares((Share){.work = ADD, .all = all, .count = count}, threads);
}

typedef struct { /* an embedding, or bags of one, that read a table */
  const float* grad; /* a row for each of `ids`, or for each bag */
  int64_t stride, given; /* from row to row of `grad`, and how many there are */
  const int64_t *offsets, *ids; /* where bags begin, and perhaps where the last ends; null where there are no bags */
  int64_t begins, count, padding;
} Read;

/* Adds up the gradients of the rows of a table, as many as `ids` names, each once: slots[row] says where, or is -1.
   Returns how many rows there are now; `used` is how many there were before. */
int64_t gather(const Read* read, int64_t width, int64_t table, int64_t used, int32_t* slots, float* rows) {
  int64_t bag = 0;
  for (int64_t n = 0; n < read->count; ++n) {
    while (bag + 1 < read->begins && read->offsets[bag + 1] <= n) ++bag;
    const int64_t id = read->ids[n], from_row = read->offsets ? bag : n;
    if (id == read->padding || id < 0 || id >= table || from_row >= read->given) continue;
    const float* from = read->grad + from_row * read->stride;
    if (slots[id] < 0) {
      slots[id] = (int32_t)used++;
      memcpy(rows + slots[id] * width, from, width * sizeof *from);
    } else {
      float* restrict to = rows + slots[id] * width;
      for (int64_t k = 0; k < width; ++k) to[k] += from[k];
    }
  }
  return used;
}
