/* Memory of a thread, for as long as it lives: taken anew at each call, it would cost what a small product does. */

#include <stdlib.h>
#ifdef LARGE_PAGES /* behind whatever includes low_precision.h: asked of the system, which may not grant them */
#include <sys/mman.h>
#define OWN_PAGE ((size_t)2 << 20)
#else
#define OWN_PAGE ((size_t)64)
#endif

static pthread_key_t own_key;
static int has_own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;
static void make_own_key(void) { has_own_key = !pthread_key_create(&own_key, free); }

/* Memory for `wanted` elements, of none too; freed as the thread ends; null where there is none. Behind low_precision.h. */
static Low *own_memory(int64_t wanted) {
  static __thread Low *memory = 0;
  static __thread int64_t held = 0;
  if (wanted < 1) wanted = 1; /* a product over no depth: its sums are zeros, and null says something else */
  if (held < wanted) {
    pthread_once(&own_once, make_own_key);
    free(memory);
    const size_t size = (wanted * 2 + OWN_PAGE - 1) / OWN_PAGE * OWN_PAGE;
    memory = (Low *)aligned_alloc(OWN_PAGE, size);
#ifdef LARGE_PAGES
    if (memory) madvise(memory, size, MADV_HUGEPAGE);
#endif
    held = memory ? wanted : 0;
    if (has_own_key) pthread_setspecific(own_key, memory); /* there are not many: without one, it is kept */
  }
  return memory;
}
