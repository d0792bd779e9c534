/* Streams and events of the stand-in: order and time as host code sees them.
 *
 * Work is done when it is enqueued; only its time lies in the future. Each launch keeps its stream busy for
 * STANDIN_GPU_KERNEL_US microseconds (0 unless set), so events, queries and waits behave as with a device that lags. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "board.h"
#include "device.h"

#define STREAM 0x5354524du
#define EVENT 0x4556454eu
enum { READY = 0, INVALID_HANDLE = 400, NOT_READY = 600 };

struct stream { unsigned magic; int device, priority; long long busy_until; struct stream *next; };
struct event { unsigned magic, flags; int recorded; long long at; };

static struct stream defaults[BOARDS_MAX], *streams;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}
static void sleep_until(long long until) {
    struct timespec t = {until / 1000000000ll, until % 1000000000ll};
    if (until > now())
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL)) {}
}
static struct stream *of(CUstream handle) {
    struct stream *stream = (struct stream *)handle;
    if ((uintptr_t)handle <= 2) { /* the default streams: 0, legacy (1), per thread (2) */
        stream = &defaults[standin_current()];
        stream->magic = STREAM, stream->device = standin_current();
    }
    return stream->magic == STREAM ? stream : NULL;
}
static struct event *event_of(CUevent handle) {
    struct event *event = (struct event *)handle;
    return event && event->magic == EVENT ? event : NULL;
}
static long long end_of(struct stream *stream) { return __atomic_load_n(&stream->busy_until, __ATOMIC_RELAXED); }

/* ---- launches */
static long long kernel_ns(void) {
    static long long ns = -1;
    if (ns < 0) ns = (long long)(setting("STANDIN_GPU_KERNEL_US", 0, 0.0) * 1e3);
    return ns;
}
static unsigned long long fault_at(void) {
    static unsigned long long at = ~0ull;
    if (at == ~0ull) at = (unsigned long long)setting("STANDIN_GPU_FAULT_AT", 0, 0.0);
    return at;
}
int standin_failed(void) {
    unsigned long long at = fault_at();
    return at && __atomic_load_n(&standin_counts[COUNT_kernel_launches], __ATOMIC_RELAXED) >= at ? FAULT : 0;
}
static int enqueue(CUstream handle) {
    struct stream *stream = of(handle);
    if (!stream) return INVALID_HANDLE;
    standin_touch(stream->device);
    if (kernel_ns()) {
        pthread_mutex_lock(&mutex);
        long long begin = now() > stream->busy_until ? now() : stream->busy_until;
        stream->busy_until = begin + kernel_ns();
        pthread_mutex_unlock(&mutex);
    }
    return 0;
}
int standin_launch(CUstream stream) {
    int failed = standin_failed(); /* as on a device, the launch that breaks it succeeds */
    COUNT(kernel_launches);
    return failed ? failed : enqueue(stream);
}
void standin_library_launch(CUstream stream) {
    COUNT(library_calls);
    enqueue(stream);
}

/* ---- streams */
int standin_stream_new(CUstream *handle, int priority) {
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream) abort();
    *stream = (struct stream){STREAM, standin_current(), priority, 0, NULL};
    pthread_mutex_lock(&mutex);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&mutex);
    standin_touch(stream->device);
    *handle = (CUstream)stream;
    return 0;
}
int standin_stream_delete(CUstream handle) { /* its record stays, so that a later use of the handle is seen */
    struct stream *stream = of(handle);
    if (!stream || (uintptr_t)handle <= 2) return INVALID_HANDLE;
    stream->magic = 0;
    return 0;
}
int standin_stream_priority(CUstream handle, int *priority) {
    struct stream *stream = of(handle);
    if (!stream) return INVALID_HANDLE;
    *priority = stream->priority;
    return 0;
}
int standin_stream_ready(CUstream handle) {
    struct stream *stream = of(handle);
    if (!stream) return INVALID_HANDLE;
    if (standin_failed()) return FAULT;
    return end_of(stream) > now() ? NOT_READY : READY;
}
int standin_stream_wait(CUstream handle) {
    struct stream *stream = of(handle);
    COUNT(synchronizations);
    if (!stream) return INVALID_HANDLE;
    standin_touch(stream->device);
    if (standin_failed()) return FAULT;
    sleep_until(end_of(stream));
    return 0;
}
int standin_stream_after(CUstream handle, CUevent event_handle) {
    struct stream *stream = of(handle);
    struct event *event = event_of(event_handle);
    if (!stream || !event) return INVALID_HANDLE;
    COUNT(stream_waits);
    if (!event->recorded) return 0; /* as CUDA: waiting for what was never recorded is no wait */
    pthread_mutex_lock(&mutex);
    if (event->at > stream->busy_until) stream->busy_until = event->at;
    pthread_mutex_unlock(&mutex);
    return 0;
}
int standin_device_wait(int device) {
    COUNT(synchronizations);
    standin_touch(device);
    if (standin_failed()) return FAULT;
    pthread_mutex_lock(&mutex);
    long long end = defaults[device].busy_until;
    for (struct stream *s = streams; s; s = s->next)
        if (s->device == device && s->busy_until > end) end = s->busy_until;
    pthread_mutex_unlock(&mutex);
    sleep_until(end);
    return 0;
}

/* ---- events */
int standin_event_new(CUevent *handle, unsigned flags) {
    struct event *event = calloc(1, sizeof *event);
    if (!event) abort();
    event->magic = EVENT, event->flags = flags;
    standin_touch(standin_current());
    *handle = (CUevent)event;
    return 0;
}
int standin_event_delete(CUevent handle) {
    struct event *event = event_of(handle);
    if (!event) return INVALID_HANDLE;
    event->magic = 0;
    free(event);
    return 0;
}
int standin_event_record(CUevent handle, CUstream stream_handle) {
    struct event *event = event_of(handle);
    struct stream *stream = of(stream_handle);
    if (!event || !stream) return INVALID_HANDLE;
    COUNT(event_records);
    if (standin_failed()) return FAULT;
    long long time = now(), end = end_of(stream);
    event->at = end > time ? end : time;
    event->recorded = 1;
    return 0;
}
int standin_event_ready(CUevent handle) {
    struct event *event = event_of(handle);
    if (!event) return INVALID_HANDLE;
    if (standin_failed()) return FAULT;
    return event->recorded && event->at > now() ? NOT_READY : READY;
}
int standin_event_wait(CUevent handle) {
    struct event *event = event_of(handle);
    COUNT(synchronizations);
    if (!event) return INVALID_HANDLE;
    if (standin_failed()) return FAULT;
    if (event->recorded) sleep_until(event->at);
    return 0;
}
int standin_event_elapsed(float *milliseconds, CUevent from_handle, CUevent to_handle) {
    struct event *from = event_of(from_handle), *to = event_of(to_handle);
    enum { DISABLE_TIMING = 2 };
    if (!from || !to || !from->recorded || !to->recorded) return INVALID_HANDLE;
    if ((from->flags | to->flags) & DISABLE_TIMING) return INVALID_HANDLE;
    if (standin_failed()) return FAULT;
    if (from->at > now() || to->at > now()) return NOT_READY;
    *milliseconds = (float)((double)(to->at - from->at) / 1e6);
    return 0;
}
