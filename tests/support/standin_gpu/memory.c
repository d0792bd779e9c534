/* The stand-in's memory: address space that costs nothing until it is written, and what is charged to the board. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "board.h"
#include "device.h"

#define ALIGN ((size_t)2 << 20) /* a device page; all allocations start at one */
#define PAGE ((size_t)4096)

static struct standin_range *ranges; /* sorted by start */
static size_t range_count, range_room;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static size_t place(const void *pointer) { /* index of the first range that starts behind the pointer */
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start <= (const char *)pointer) low = middle + 1;
        else high = middle;
    }
    return low;
}
int standin_register(void *start, size_t nbytes, enum standin_kind kind, int device) {
    pthread_mutex_lock(&mutex);
    if (range_count == range_room) {
        range_room = range_room ? 2 * range_room : 256;
        ranges = realloc(ranges, range_room * sizeof *ranges);
        if (!ranges) abort();
    }
    size_t at = place(start);
    memmove(ranges + at + 1, ranges + at, (range_count - at) * sizeof *ranges);
    ranges[at] = (struct standin_range){start, nbytes, kind, device, 0};
    range_count++;
    pthread_mutex_unlock(&mutex);
    return 0;
}
int standin_find(const void *pointer, struct standin_range *found) {
    pthread_mutex_lock(&mutex);
    size_t at = place(pointer);
    int is = at > 0 && (const char *)pointer < ranges[at - 1].start + ranges[at - 1].nbytes;
    if (is) *found = ranges[at - 1];
    pthread_mutex_unlock(&mutex);
    return is;
}
static struct standin_range *exact(void *start, enum standin_kind kind) { /* the caller holds the mutex */
    size_t at = place(start);
    return at && ranges[at - 1].start == (char *)start && ranges[at - 1].kind == kind ? &ranges[at - 1] : NULL;
}
void *standin_map(size_t nbytes, enum standin_kind kind, int device, size_t charged) {
    size_t length = (nbytes + PAGE - 1) & ~(PAGE - 1), mapped = length + ALIGN;
    /* addresses ascend: torch's allocator takes the lowest of free blocks of one size */
    static uintptr_t next = (uintptr_t)1 << 45;
    pthread_mutex_lock(&mutex);
    void *hint = (void *)next;
    next += (mapped + ALIGN - 1) & ~(uintptr_t)(ALIGN - 1);
    pthread_mutex_unlock(&mutex);
    char *start = mmap(hint, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NULL;
    char *aligned = (char *)(((uintptr_t)start + ALIGN - 1) & ~(ALIGN - 1));
    if (aligned > start) munmap(start, (size_t)(aligned - start));
    munmap(aligned + length, (size_t)(start + mapped - (aligned + length)));
    standin_register(aligned, nbytes, kind, device);
    pthread_mutex_lock(&mutex);
    exact(aligned, kind)->charged = charged;
    pthread_mutex_unlock(&mutex);
    return aligned;
}
int standin_unmap(void *start, enum standin_kind kind, struct standin_range *was) {
    pthread_mutex_lock(&mutex);
    struct standin_range *range = exact(start, kind);
    if (range) {
        *was = *range;
        memmove(range, range + 1, (size_t)(ranges + range_count - range - 1) * sizeof *range);
        range_count--;
    }
    pthread_mutex_unlock(&mutex);
    if (range) munmap(start, (was->nbytes + PAGE - 1) & ~(PAGE - 1));
    return range != NULL;
}
/* Zeros cost no memory: whole pages are dropped, and read as zeros again. */
void standin_fill(void *to, int value, size_t nbytes) {
    char *from = to, *end = from + nbytes;
    char *first = (char *)(((uintptr_t)from + PAGE - 1) & ~(PAGE - 1)), *last = (char *)((uintptr_t)end & ~(PAGE - 1));
    if (value || last <= first || madvise(first, (size_t)(last - first), MADV_DONTNEED)) {
        memset(to, value, nbytes);
        return;
    }
    memset(from, 0, (size_t)(first - from));
    memset(last, 0, (size_t)(end - last));
}

/* ---- expandable segments: physical pages, mapped into reserved address space */
struct pages { size_t nbytes; int device; int holders; }; /* holders: the handle itself, and each mapping of it */
struct mapping { char *start; size_t nbytes; struct pages *pages; struct mapping *next; };
#define BUCKETS 4096
static struct mapping *mappings[BUCKETS];
static struct mapping **bucket(uintptr_t start) { return &mappings[start / ALIGN % BUCKETS]; }

static int refused(const char *name) { /* as by drivers of some virtual machines, which say that they can */
    const char *call = getenv("STANDIN_GPU_REFUSED");
    return call && !strcmp(call, name);
}

static void drop(struct pages *pages) { /* the caller holds the mutex */
    if (--pages->holders) return;
    standin_give(pages->device, pages->nbytes);
    free(pages);
}
CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) {
    (void)p, (void)f;
    *size = ALIGN;
    return 0;
}
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t alignment, CUdeviceptr at, unsigned long long flags) {
    (void)alignment, (void)at, (void)flags;
    void *start = n && n % ALIGN == 0 ? standin_map(n, KIND_RESERVED, standin_current(), 0) : NULL;
    *p = (CUdeviceptr)start;
    return start ? 0 : n % ALIGN ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t n) {
    struct standin_range was;
    (void)n;
    return standin_unmap((void *)p, KIND_RESERVED, &was) ? 0 : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t n, const CUmemAllocationProp *p, unsigned long long f) {
    (void)f;
    int device = p->location.id;
    if (standin_failed()) return FAULT;
    if (refused("cuMemCreate")) return CUDA_ERROR_NOT_SUPPORTED;
    if (!n || n % ALIGN || p->location.type != CU_MEM_LOCATION_TYPE_DEVICE || standin_board(device) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!standin_take(device, n)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct pages *pages = malloc(sizeof *pages);
    if (!pages) abort();
    *pages = (struct pages){n, device, 1};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)pages;
    COUNT(physical_creates);
    return 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    pthread_mutex_lock(&mutex);
    drop((struct pages *)(uintptr_t)handle);
    pthread_mutex_unlock(&mutex);
    COUNT(physical_releases);
    return 0;
}
CUresult cuMemMap(CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    (void)flags;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    struct pages *pages = (struct pages *)(uintptr_t)handle;
    pthread_mutex_lock(&mutex);
    size_t at = place((void *)p);
    struct standin_range *range = at ? &ranges[at - 1] : NULL;
    int inside = range && range->kind == KIND_RESERVED && (char *)p + n <= range->start + range->nbytes;
    int taken = 0;
    for (struct mapping *m = *bucket(p); m; m = m->next) taken |= m->start == (char *)p;
    if (inside && !taken && offset + n <= pages->nbytes) {
        struct mapping *m = malloc(sizeof *m);
        if (!m) abort();
        *m = (struct mapping){(char *)p, n, pages, *bucket(p)};
        *bucket(p) = m;
        pages->holders++;
        range->device = pages->device;
        result = 0;
    }
    pthread_mutex_unlock(&mutex);
    COUNT(maps);
    return result;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    for (uintptr_t at = p; at < p + n; at += ALIGN)
        for (struct mapping **m = bucket(at); *m; m = &(*m)->next) {
            struct mapping *found = *m;
            if (found->start != (char *)at) continue;
            madvise(found->start, found->nbytes, MADV_DONTNEED);
            drop(found->pages);
            *m = found->next;
            free(found);
            result = 0;
            break;
        }
    pthread_mutex_unlock(&mutex);
    COUNT(unmaps);
    return result;
}
CUresult cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *d, size_t count) {
    (void)p, (void)n, (void)d, (void)count;
    return refused("cuMemSetAccess") ? CUDA_ERROR_NOT_SUPPORTED : 0;
}
