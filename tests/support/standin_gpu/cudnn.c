/* The part of cuDNN that torch's convolutions, batch norm and attention call. Descriptors keep what is set in them; a graph
 * has one engine, whose plan wants STANDIN_GPU_CUDNN_MIB of workspace (8 unless set). RNNs and CTC are not supported.
 *
 * Numbers of attributes and types are those of cudnn_graph.h (cuDNN 9). */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "board.h"
#include "device.h"

enum { BAD_PARAM = 2000, NOT_SUPPORTED = 3000 };
enum { ENGINE = 2, ENGINECFG = 3, PLAN = 5 };
enum { HEUR_RESULTS = 202, CFG_ENGINE = 300, CFG_WORKSPACE = 303, PLAN_WORKSPACE = 402 };
enum { TYPE_HANDLE = 0, TYPE_BOOLEAN = 2, TYPE_INT64 = 3, TYPE_DOUBLE = 5, TYPE_VOID_PTR = 6, TYPE_DESCRIPTOR = 15,
       TYPE_CHAR = 24, TYPE_FRACTION = 26 };

static int64_t workspace(void) { return (int64_t)(setting("STANDIN_GPU_CUDNN_MIB", 0, 8.0) * (1 << 20)); }

static size_t size_of(int type) {
    switch (type) {
    case TYPE_HANDLE: case TYPE_INT64: case TYPE_DOUBLE: case TYPE_VOID_PTR: case TYPE_DESCRIPTOR: return 8;
    case TYPE_FRACTION: return 16;
    case TYPE_BOOLEAN: case TYPE_CHAR: return 1;
    default: return 4; /* enumerations, int32 and float */
    }
}
struct attribute { int name, type; int64_t count; void *values; struct attribute *next; };
struct descriptor { int kind; struct attribute *attributes; };

int cudnnCreate(void **handle) { *handle = calloc(1, 64); return *handle ? 0 : 1000; }
int cudnnDestroy(void *handle) { free(handle); return 0; }
int cudnnSetStream(void *handle, void *stream) { *(void **)handle = stream; return 0; }
int cudnnGetStream(void *handle, void **stream) { *stream = *(void **)handle; return 0; }

/* ---- the graph API */
int cudnnBackendCreateDescriptor(int kind, void **out) {
    struct descriptor *d = calloc(1, sizeof *d);
    if (!d) return 1000;
    d->kind = kind;
    *out = d;
    return 0;
}
static void forget(struct descriptor *d) {
    for (struct attribute *a = d->attributes, *next; a; a = next) {
        next = a->next;
        free(a->values);
        free(a);
    }
    d->attributes = NULL;
}
int cudnnBackendDestroyDescriptor(void *descriptor) {
    forget(descriptor);
    free(descriptor);
    return 0;
}
int cudnnBackendFinalize(void *descriptor) { return descriptor ? 0 : BAD_PARAM; }
static struct attribute *find(const struct descriptor *d, int name) {
    struct attribute *a = d->attributes;
    while (a && a->name != name) a = a->next;
    return a;
}
int cudnnBackendSetAttribute(void *descriptor, int name, int type, int64_t count, const void *values) {
    struct descriptor *d = descriptor;
    struct attribute *a = find(d, name);
    if (!a) {
        a = calloc(1, sizeof *a);
        if (!a) return 1000;
        a->name = name, a->next = d->attributes;
        d->attributes = a;
    }
    size_t nbytes = (size_t)count * size_of(type);
    a->type = type, a->count = count;
    a->values = realloc(a->values, nbytes ? nbytes : 1);
    if (nbytes && values) memcpy(a->values, values, nbytes);
    return 0;
}
int cudnnBackendGetAttribute(const void *descriptor, int name, int type, int64_t room, int64_t *count, void *values) {
    const struct descriptor *d = descriptor;
    if (name == HEUR_RESULTS || name == CFG_ENGINE) { /* the caller brings the descriptors to be filled: one is */
        if (count) *count = 1;
        return 0;
    }
    if (name == PLAN_WORKSPACE || name == CFG_WORKSPACE) {
        if (count) *count = 1;
        if (room > 0 && values) *(int64_t *)values = workspace();
        return 0;
    }
    const struct attribute *a = find(d, name);
    int64_t have = a ? a->count : 0;
    if (count) *count = have;
    if (room < have) have = room;
    if (have > 0 && values) memcpy(values, a->values, (size_t)have * size_of(a->type));
    /* what nobody set (notes, knobs, an engine's number) is an empty list, or zero where one value is asked for */
    if (!a && room == 1 && values && size_of(type) == 8 && type != TYPE_DESCRIPTOR) {
        *(int64_t *)values = 0;
        if (count) *count = 1;
    }
    return 0;
}
int cudnnBackendExecute(void *handle, void *plan, void *pack) {
    (void)plan, (void)pack;
    COUNT(cudnn_executions);
    standin_library_launch(*(CUstream *)handle);
    return 0;
}

/* ---- descriptors of the older API: torch only hands them back */
#define DESCRIPTOR(name) \
    int cudnnCreate##name##Descriptor(void **d) { *d = calloc(1, 256); return *d ? 0 : 1000; } \
    int cudnnDestroy##name##Descriptor(void *d) { free(d); return 0; }
DESCRIPTOR(Tensor)
DESCRIPTOR(Filter)
DESCRIPTOR(Convolution)
DESCRIPTOR(Activation)
DESCRIPTOR(Dropout)
DESCRIPTOR(Pooling)
DESCRIPTOR(SpatialTransformer)

/* ---- batch norm: a spatial one needs neither workspace nor reserve */
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int ops, void *x, void *z, void *y,
                                                             void *scale, void *activation, size_t *nbytes) {
    (void)handle, (void)mode, (void)ops, (void)x, (void)z, (void)y, (void)scale, (void)activation;
    *nbytes = 0;
    return 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int ops, void *x, void *y, void *dy, void *dz,
                                                      void *dx, void *scale, void *activation, size_t *nbytes) {
    (void)handle, (void)mode, (void)ops, (void)x, (void)y, (void)dy, (void)dz, (void)dx, (void)scale, (void)activation;
    *nbytes = 0;
    return 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int ops, void *activation, void *x,
                                                         size_t *nbytes) {
    (void)handle, (void)mode, (void)ops, (void)activation, (void)x;
    *nbytes = 0;
    return 0;
}
