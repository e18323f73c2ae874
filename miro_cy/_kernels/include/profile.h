/* Where a step's time goes: thread 0 reads a clock as it leaves each part of the step. Off, it costs a branch. */
#pragma once
#include <time.h>

#define MI_PROFILE_PARTS 16

typedef struct {
    int on;
    double last;
    double seconds[MI_PROFILE_PARTS];
} mi_profile;

static inline double mi_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void mi_profile_begin(mi_profile *p, int thread) {
    if (p->on && thread == 0) p->last = mi_now();
}

/* The time since the last mark belongs to `part`. */
static inline void mi_profile_mark(mi_profile *p, int thread, int part) {
    if (!p->on || thread != 0) return;
    double now = mi_now();
    p->seconds[part] += now - p->last;
    p->last = now;
}
