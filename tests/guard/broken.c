/* A kernel that is wrong as it is told to be: what a run between guard pages has to find.

   jit_compiler.py compiles this file. */

#include <stdlib.h>

#include "low_precision.h"

enum { RIGHT, READS_BEHIND, WRITES_BEHIND, READS_BEFORE, LEAVES_THE_LAST, SCRATCH_BEHIND, SCRATCH_NOT_WRITTEN };

/* to[i] = from[i] + 1, by way of scratch. */
int add_one(const float* from, float* to, int64_t count, int64_t how) {
  float* scratch = malloc(count * sizeof *scratch);
  if (!scratch) return 1;
  const int64_t first = how == SCRATCH_NOT_WRITTEN;
  for (int64_t i = first; i < count + (how == SCRATCH_BEHIND); i++) scratch[i] = 1.0f + (i < count ? from[i] : 0.0f);
  volatile float beyond = how == READS_BEHIND ? from[count] : how == READS_BEFORE ? from[-1] : 0;
  for (int64_t i = 0; i < count - (how == LEAVES_THE_LAST); i++) to[i] = scratch[i];
  if (how == WRITES_BEHIND) to[count] = beyond;
  free(scratch);
  return 0;
}
