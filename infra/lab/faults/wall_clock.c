/* Moves the wall clock of a process by as many seconds as a file says, read through shared memory; the
   monotonic clock stays. To be preloaded. Waits until a moment of the wall clock are moved back, since the kernel
   has the real one; moments of the monotonic clock are told by their size. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define LEAST_WALL_TIME 1000000000 /* 2001; no machine has been up for as long */

static volatile int64_t *offset;

static int64_t moved_by(void)
{
    static const int64_t nothing = 0;
    if (!offset) {
        const char *path = getenv("SHOAL_WALL_CLOCK");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof nothing, PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0)
            close(file);
        offset = mapped == MAP_FAILED ? (volatile int64_t *)&nothing : mapped;
    }
    return *offset;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int answer = syscall(SYS_clock_gettime, clock, now);
    if (answer == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += moved_by();
    return answer;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now)
        *now = exact.tv_sec;
    return exact.tv_sec;
}

static struct timespec real(const struct timespec *moment)
{
    struct timespec moved = *moment;
    if (moved.tv_sec > LEAST_WALL_TIME)
        moved.tv_sec -= moved_by();
    return moved;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until)
{
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next)
        *(void **)&next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec moment = real(until);
    return next(condition, mutex, &moment);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until)
{
    static int (*next)(sem_t *, const struct timespec *);
    if (!next)
        *(void **)&next = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec moment = real(until);
    return next(semaphore, &moment);
}
