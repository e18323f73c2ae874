/* A team of OpenMP threads walks through one forward pass together; this is what it meets at between operations. */
#pragma once
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
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

/* --- Dealing work out ---
 *
 * Items are shared out in equal runs, and who is done with its own run takes from the others'. CPUs that are shared with
 * other programs, as those of virtual machines are, differ in speed by a third, and that changes within a second: with
 * fixed shares all would wait for the slowest. Which thread computes an item never changes its bits.
 */

/* How much of a thread's run has been taken, in the lower bits, and of which deal that is. */
typedef struct {
    char before[64];
    atomic_ullong taken;
    char after[56];
} mi_turn;

typedef struct {
    mi_barrier barrier;
    mi_turn *turns;             /* one for each thread */
    unsigned long long deals;   /* that there have been */
} mi_team;

/* A thread's own view of the team while they work together. */
typedef struct {
    int th, nth;
    mi_team *team;              /* NULL: it is alone */
    unsigned long long deal;
    ptrdiff_t n;                /* items of the deal */
    ptrdiff_t done;             /* of them, where the thread is alone */
    int from;                   /* whose run it takes from, counted from its own */
} mi_member;

#define MI_TAKEN_BITS 24        /* a run has fewer items than that */

/* Of the threads of a parallel region; `mi_leave` is the last that each of them does. */
static inline mi_member mi_join(mi_team *team) {
    mi_member me = {mi_thread_id(), mi_team_size(), team, team->deals, 0, 0, 0};
    return me;
}

static inline mi_member mi_alone(void) {
    mi_member me = {0, 1, NULL, 0, 0, 0, 0};
    return me;
}

static inline void mi_meet(mi_member *me) {
    if (me->nth > 1) mi_barrier_wait(&me->team->barrier, me->nth);
}

static inline void mi_leave(mi_member *me) {
    mi_meet(me);                /* before that, one may not have joined yet */
    if (me->th == 0 && me->team) me->team->deals = me->deal;
}

/* The next n items: all threads deal the same, in the same order, and each takes until there is nothing left. */
static inline void mi_deal(mi_member *me, ptrdiff_t n) {
    me->deal++;
    me->n = n;
    me->done = 0;
    me->from = 0;
}

/* Takes up to `most` neighbouring items, few of the last ones: returns how many, from *first on; 0: all are taken. */
static inline ptrdiff_t mi_take(mi_member *me, ptrdiff_t most, ptrdiff_t *first) {
    const unsigned long long mask = (1ULL << MI_TAKEN_BITS) - 1, deal = me->deal << MI_TAKEN_BITS;
    ptrdiff_t take;
    if (me->nth == 1) {
        take = me->n - me->done < most ? me->n - me->done : most;
        *first = me->done;
        me->done += take;
        return take;
    }
    for (; me->from < me->nth; me->from++) {
        int whose = (me->th + me->from) % me->nth;
        ptrdiff_t begin = me->n * whose / me->nth, size = me->n * (whose + 1) / me->nth - begin;
        atomic_ullong *word = &me->team->turns[whose].taken;
        unsigned long long seen = atomic_load_explicit(word, memory_order_relaxed);
        for (;;) {
            /* of an earlier deal: nobody has taken from this run. Of a later one: somebody has left this deal, which
             * it did because there was nothing left of any run */
            long long later = (long long)((seen & ~mask) - deal);
            ptrdiff_t taken = later < 0 ? 0 : (ptrdiff_t)(seen & mask);
            if (later > 0 || taken >= size) break;
            take = (size - taken + 3) / 4;
            if (take > most) take = most;
            if (atomic_compare_exchange_weak_explicit(word, &seen, deal | (unsigned long long)(taken + take),
                                                      memory_order_relaxed, memory_order_relaxed)) {
                *first = begin + taken;
                return take;
            }
        }
    }
    return 0;
}
