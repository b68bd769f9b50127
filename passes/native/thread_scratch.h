/* Scratch memory that lives as long as its thread: allocating it at each call would cost as much as a small GEMM. */

#include <stdlib.h>
#ifdef LARGE_PAGES /* included after low_precision.h: huge pages are requested, and the system may decline */
#include <sys/mman.h>
#define OWN_PAGE ((size_t)2 << 20)
#else
#define OWN_PAGE ((size_t)64)
#endif

static pthread_key_t own_key;
static int has_own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;
static void make_own_key(void) { has_own_key = !pthread_key_create(&own_key, free); }

/* Memory for `wanted` elements, 0 included; freed as the thread ends; null if out of memory. Needs low_precision.h. */
static Low *own_memory(int64_t wanted) {
  static __thread Low *memory = 0;
  static __thread int64_t held = 0;
  if (wanted < 1) wanted = 1; /* a GEMM of depth 0: its sums are zeros, and null means out of memory */
  if (held < wanted) {
    pthread_once(&own_once, make_own_key);
    free(memory);
    const size_t size = (wanted * 2 + OWN_PAGE - 1) / OWN_PAGE * OWN_PAGE;
    memory = (Low *)aligned_alloc(OWN_PAGE, size);
#ifdef LARGE_PAGES
    if (memory) madvise(memory, size, MADV_HUGEPAGE);
#endif
    held = memory ? wanted : 0;
    if (has_own_key) pthread_setspecific(own_key, memory); /* keys are few: without one, it is kept */
  }
  return memory;
}
