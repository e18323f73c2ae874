/* A team of OpenMP threads walks through one forward pass together; this is what it meets at between operations. */
#pragma once
#include <sched.h>
#include <stdatomic.h>
#ifdef _OPENMP
#include <omp.h>
static inline int mi_thread_id(void) { return omp_get_thread_num(); }
static inline int mi_team_size(void) { return omp_get_num_threads(); }
#else
static inline int mi_thread_id(void) { return 0; }
static inline int mi_team_size(void) { return 1; }
#endif
#if defined(__x86_64__)
#define mi_pause() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define mi_pause() __asm__ volatile("yield")
#else
#define mi_pause()
#endif

/* What changes at each arrival, what is waited for, and whatever lies around both are in different cache lines. By
 * distance: a Python object, of which this is a part, may begin anywhere, so nothing in it can have an alignment. */
typedef struct {
    char before[64];
    atomic_int arrived;
    char between[60];
    atomic_int phase;
    atomic_int sleepers;
    char after[56];
} mi_barrier;

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
static inline void mi_sleep(mi_barrier *b, int phase) {
    atomic_fetch_add(&b->sleepers, 1);
    syscall(SYS_futex, &b->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
    atomic_fetch_sub(&b->sleepers, 1);
}
static inline void mi_wake(mi_barrier *b) {
    if (atomic_load(&b->sleepers)) syscall(SYS_futex, &b->phase, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
}
#else
static inline void mi_sleep(mi_barrier *b, int phase) { (void)b; (void)phase; sched_yield(); }
static inline void mi_wake(mi_barrier *b) { (void)b; }
#endif

/* Spins for some tens of microseconds, then sleeps: where a CPU is shared or threads outnumber CPUs, spinning would
 * take the time that the late thread needs. */
static inline void mi_barrier_wait(mi_barrier *b, int n) {
    if (n <= 1) return;
    int phase = atomic_load_explicit(&b->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&b->arrived, 1, memory_order_acq_rel) == n - 1) {
        atomic_store_explicit(&b->arrived, 0, memory_order_relaxed);
        atomic_store(&b->phase, phase + 1);
        mi_wake(b);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&b->phase, memory_order_acquire) == phase; spins++) {
        if (spins < 2000) mi_pause();
        else mi_sleep(b, phase);
    }
}
