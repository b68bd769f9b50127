/* What C allocates, between two pages that nobody may touch: in front of whatever jit_compiler.py compiles.

   Before: `malloc(n)`, behind which other memory lies. After: memory that ends at such a page, or, where the environment has
   AMP_GRAPH_GUARD=begin, begins behind one; full of NaNs until it is written, and gone once it is freed. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GUARD_PAGE 4096
#define GUARD_MOST 4096 /* pieces that are held at a time */
#define GUARD_UP(n, by) (((n) + (by)-1) / (by) * (by))

static struct {
  char *given, *base;
  size_t size;
} guard_pieces[GUARD_MOST];
static pthread_mutex_t guard_lock = PTHREAD_MUTEX_INITIALIZER;

static void guard_note(char *given, char *base, size_t size) {
  pthread_mutex_lock(&guard_lock);
  for (int i = 0; i < GUARD_MOST; i++)
    if (!guard_pieces[i].given) {
      guard_pieces[i].given = given, guard_pieces[i].base = base, guard_pieces[i].size = size;
      break;
    }
  pthread_mutex_unlock(&guard_lock);
}

static void *guarded_aligned(size_t alignment, size_t size) {
  const size_t room = GUARD_UP(size, alignment), data = GUARD_UP(room ? room : 1, GUARD_PAGE);
  const size_t all = data + 2 * GUARD_PAGE + alignment;
  const char *where = getenv("AMP_GRAPH_GUARD");
  char *base = mmap(0, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return 0;
  char *begin = (char *)GUARD_UP((uintptr_t)base + GUARD_PAGE, alignment > GUARD_PAGE ? alignment : GUARD_PAGE);
  memset(begin, 0xff, data);
  mprotect(begin - GUARD_PAGE, GUARD_PAGE, PROT_NONE);
  mprotect(begin + data, GUARD_PAGE, PROT_NONE);
  char *given = where && !strcmp(where, "begin") ? begin : begin + data - room;
  guard_note(given, base, all);
  return given;
}

static inline void *guarded_malloc(size_t size) { return guarded_aligned(8, size); }

static inline void guarded_free(void *given) {
  char *base = 0;
  size_t size = 0;
  pthread_mutex_lock(&guard_lock);
  for (int i = 0; given && i < GUARD_MOST; i++)
    if (guard_pieces[i].given == given) {
      base = guard_pieces[i].base, size = guard_pieces[i].size, guard_pieces[i].given = 0;
      break;
    }
  pthread_mutex_unlock(&guard_lock);
  if (base) munmap(base, size);
}

#define malloc guarded_malloc
#define aligned_alloc guarded_aligned
#define free guarded_free
