/* Checks that only the debug build makes (MIRO_DEBUG=1): a failed one ends the process with its place in the source.
 *
 * They are for what no caller may get wrong, in code that cannot raise. In a release they are nothing at all: not even
 * their arguments are evaluated. What a user, a file or a client may get wrong is checked in every build instead. */
#pragma once
#ifndef MIRO_BUILD
#define MIRO_BUILD "release"
#endif
#ifdef MIRO_DEBUG
#include <stdio.h>
#include <stdlib.h>

__attribute__((noreturn, cold, unused)) static void mi_check_failed(const char *file, int line, const char *what) {
    fprintf(stderr, "%s:%d: check failed: %s\n", file, line, what);
    fflush(stderr);
    abort();
}

static inline __attribute__((unused)) void mi_check_span(
    const char *file, int line, const char *what, long long first, long long count, long long limit
) {
    if (first >= 0 && count >= 0 && count <= limit - first) return;
    fprintf(stderr, "%lld, %lld of them, in %lld: ", first, count, limit);
    mi_check_failed(file, line, what);
}

/* the condition holds */
#define MIRO_ASSERT(condition) ((condition) ? (void)0 : mi_check_failed(__FILE__, __LINE__, #condition))
/* 0 <= index < limit */
#define MIRO_INDEX(index, limit) mi_check_span(__FILE__, __LINE__, #index " < " #limit, (index), 1, (limit))
/* first .. first + count - 1 are all in 0 .. limit - 1 */
#define MIRO_SPAN(first, count, limit) \
    mi_check_span(__FILE__, __LINE__, #first " + " #count " <= " #limit, (first), (count), (limit))
#else
#define MIRO_ASSERT(condition) ((void)0)
#define MIRO_INDEX(index, limit) ((void)0)
#define MIRO_SPAN(first, count, limit) ((void)0)
#endif
