/* A wall clock that jumps: preloaded into a process, it adds an offset to all that the process reads of CLOCK_REALTIME.

   The offset, in nanoseconds, is the first word of the file HOLDFAST_TEST_CLOCK, which a test maps and writes to: all
   processes jump at once. Monotonic clocks stay as they are. The kernel's clock stays as well, so what waits until a
   moment of the wall clock is given that moment without the offset. (A real jump would end such a wait early or late;
   here a wait that has begun lasts as long as it would have.) */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NS 1000000000L
#define FIRST_WALL_S 1000000000L /* Of the wall clock, and of no monotonic one: those count from the machine's start. */

static volatile int64_t none;
static volatile int64_t *offset = &none;

static long raw(long number, long a, long b, long c, long d, long e, long f) {
  long result;
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  register long r9 __asm__("r9") = f;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  if (result < 0 && result > -4096) {
    errno = (int)-result;
    return -1;
  }
  return result;
}

__attribute__((constructor)) static void open_offset(void) {
  const char *path = getenv("HOLDFAST_TEST_CLOCK");
  int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (file >= 0) {
    void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) offset = found;
    close(file);
  }
}

static struct timespec moved(struct timespec time, int64_t by) {
  int64_t ns = time.tv_nsec + by % NS;
  time.tv_sec += by / NS + (ns < 0 ? -1 : ns / NS);
  time.tv_nsec = ns < 0 ? ns + NS : ns % NS;
  return time;
}

/* The kernel's moment of one that the process has made of its wall clock. */
static const struct timespec *kernels(const struct timespec *time, struct timespec *room) {
  if (time == NULL || time->tv_sec < FIRST_WALL_S) return time;
  *room = moved(*time, -*offset);
  return room;
}

static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

int clock_gettime(clockid_t clock, struct timespec *time) {
  static int (*real)(clockid_t, struct timespec *);
  if (real == NULL) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, time);
  if (code == 0 && is_wall(clock)) *time = moved(*time, *offset);
  return code;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
  (void)zone;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  *time = (struct timeval){.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
  return 0;
}

time_t time(time_t *room) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (room != NULL) *room = now.tv_sec;
  return now.tv_sec;
}

int timespec_get(struct timespec *time, int base) { return clock_gettime(CLOCK_REALTIME, time) == 0 ? base : 0; }

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
  struct timespec room;
  const struct timespec *asked = is_wall(clock) && (flags & TIMER_ABSTIME) ? kernels(until, &room) : until;
  return raw(SYS_clock_nanosleep, clock, flags, (long)asked, (long)left, 0, 0) == 0 ? 0 : errno;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
  static int (*real)(sem_t *, const struct timespec *);
  if (real == NULL) real = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec room;
  return real(semaphore, kernels(until, &room));
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
  static int (*real)(pthread_mutex_t *, const struct timespec *);
  if (real == NULL) real = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
  struct timespec room;
  return real(mutex, kernels(until, &room));
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (real == NULL) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  struct timespec room;
  return real(condition, mutex, kernels(until, &room));
}

int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
  if (real == NULL) real = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
  struct timespec room;
  return real(condition, mutex, clock, is_wall(clock) ? kernels(until, &room) : until);
}

/* Of Abseil, which gRPC and Ray wait with. */
long syscall(long number, ...) {
  long given[6];
  va_list list;
  va_start(list, number);
  for (int at = 0; at < 6; at++) given[at] = va_arg(list, long);
  va_end(list);
  struct timespec room;
  if (number == SYS_futex && (given[1] & FUTEX_CLOCK_REALTIME))
    given[3] = (long)kernels((const struct timespec *)given[3], &room);
  if (number == SYS_clock_gettime) return clock_gettime((clockid_t)given[0], (struct timespec *)given[1]);
  return raw(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
