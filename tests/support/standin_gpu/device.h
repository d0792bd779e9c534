/* What libcuda.so.1 offers to the stand-in's CUDA runtime. Device numbers are CUDA's (what is visible); 0 is success. */
#ifndef STANDIN_DEVICE_H
#define STANDIN_DEVICE_H
#include <cuda.h>
#include <stddef.h>

/* X(name) for each thing that is counted; tests read them by these names. */
#define STANDIN_COUNTERS(X) \
    X(kernel_launches) X(library_calls) X(mallocs) X(frees) X(failed_allocations) X(physical_creates) \
    X(physical_releases) X(maps) X(unmaps) X(synchronizations) X(memcpys) X(memsets) X(event_records) \
    X(stream_waits) X(cudnn_executions) X(host_allocations)
enum standin_counter {
#define X(name) COUNT_##name,
    STANDIN_COUNTERS(X)
#undef X
    COUNTERS
};
extern unsigned long long standin_counts[COUNTERS];
#define COUNT(name) __atomic_fetch_add(&standin_counts[COUNT_##name], 1, __ATOMIC_RELAXED)

enum { FAULT = 700 }; /* illegal address, in both APIs' numbering */
int standin_failed(void); /* FAULT once the launch that STANDIN_GPU_FAULT_AT names has been made, else 0 */
int standin_launch(CUstream stream);
void standin_library_launch(CUstream stream);

int standin_devices(void);
int standin_current(void);
int standin_select(int device);
void standin_touch(int device);
int standin_board(int device);
void standin_memory(int device, size_t *free_, size_t *total);
int standin_attribute(int device, int attribute);

/* Address space: what was allocated, and what kind of memory it is. */
enum standin_kind { KIND_DEVICE = 1, KIND_HOST, KIND_RESERVED };
struct standin_range { char *start; size_t nbytes; enum standin_kind kind; int device; size_t charged; };
void *standin_map(size_t nbytes, enum standin_kind kind, int device, size_t charged);
int standin_register(void *start, size_t nbytes, enum standin_kind kind, int device);
int standin_unmap(void *start, enum standin_kind kind, struct standin_range *was);
int standin_find(const void *pointer, struct standin_range *found);
int standin_take(int device, size_t nbytes); /* 1 if the board had room */
void standin_give(int device, size_t nbytes);
void standin_fill(void *to, int value, size_t nbytes);

/* Streams and events. The device's clock: each launch keeps its stream busy for STANDIN_GPU_KERNEL_US. */
int standin_stream_new(CUstream *stream, int priority);
int standin_stream_delete(CUstream stream);
int standin_stream_priority(CUstream stream, int *priority);
int standin_stream_ready(CUstream stream); /* 0, or 600: not ready */
int standin_stream_wait(CUstream stream);
int standin_stream_after(CUstream stream, CUevent event);
int standin_device_wait(int device);
int standin_event_new(CUevent *event, unsigned flags);
int standin_event_delete(CUevent event);
int standin_event_record(CUevent event, CUstream stream);
int standin_event_ready(CUevent event);
int standin_event_wait(CUevent event);
int standin_event_elapsed(float *milliseconds, CUevent from, CUevent to);
#endif
