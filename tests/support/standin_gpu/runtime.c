/* A stand-in for CUDA's runtime, preloaded before torch's own: what torch calls of it, on top of the stand-in's driver. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo
#undef cudaEventElapsedTime
#undef cudaEventRecord
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "board.h"
#include "device.h"

#define PAGE ((size_t)2 << 20)

static __thread cudaError_t last;
/* Keeps an error until it is asked for, as the runtime does; not-ready is an answer, and 700 stays for ever. */
static cudaError_t told(int code) {
    if (code && code != cudaErrorNotReady) last = (cudaError_t)code;
    return (cudaError_t)code;
}
cudaError_t cudaGetLastError(void) {
    cudaError_t was = standin_failed() ? (cudaError_t)FAULT : last;
    last = cudaSuccess;
    return was;
}
cudaError_t cudaPeekAtLastError(void) { return standin_failed() ? (cudaError_t)FAULT : last; }
const char *cudaGetErrorString(cudaError_t code) {
    const char *text;
    cuGetErrorString((CUresult)code, &text);
    return text;
}
const char *cudaGetErrorName(cudaError_t code) {
    switch ((int)code) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorInvalidValue";
    }
}
/* Generated stubs of what the stand-in lacks end here: they fail, and say so once. */
int standin_lacks(const char *name, int *said, int code) {
    if (!__atomic_exchange_n(said, 1, __ATOMIC_RELAXED)) fprintf(stderr, "stand-in GPU: it has no %s\n", name);
    return code;
}

/* ---- memory */
cudaError_t cudaMalloc(void **pointer, size_t nbytes) {
    *pointer = NULL;
    if (standin_failed()) return told(FAULT);
    if (!nbytes) return cudaSuccess;
    /* the device gives whole pages; what is smaller than half a page shares one with others */
    size_t unit = nbytes >= PAGE / 2 ? PAGE : 512, charged = (nbytes + unit - 1) / unit * unit;
    int device = standin_current();
    COUNT(mallocs);
    if (!standin_take(device, charged)) return told(cudaErrorMemoryAllocation);
    *pointer = standin_map(nbytes, KIND_DEVICE, device, charged);
    if (*pointer) return cudaSuccess;
    standin_give(device, charged);
    return told(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *pointer) {
    struct standin_range was;
    if (!pointer) {
        standin_touch(standin_current()); /* cudaFree(0): the well-known way to make a context */
        return cudaSuccess;
    }
    if (!standin_unmap(pointer, KIND_DEVICE, &was)) return told(cudaErrorInvalidValue);
    COUNT(frees);
    standin_give(was.device, was.charged);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_, size_t *total) {
    if (standin_failed()) return told(FAULT);
    standin_touch(standin_current());
    standin_memory(standin_current(), free_, total);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **pointer, size_t nbytes, unsigned flags) {
    (void)flags;
    COUNT(host_allocations);
    *pointer = nbytes ? standin_map(nbytes, KIND_HOST, standin_current(), 0) : NULL;
    return nbytes && !*pointer ? told(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaMallocHost(void **pointer, size_t nbytes) { return cudaHostAlloc(pointer, nbytes, 0); }
cudaError_t cudaFreeHost(void *pointer) {
    struct standin_range was;
    return !pointer || standin_unmap(pointer, KIND_HOST, &was) ? cudaSuccess : told(cudaErrorInvalidValue);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *about, const void *pointer) {
    struct standin_range range;
    memset(about, 0, sizeof *about);
    about->device = -1;
    if (!standin_find(pointer, &range)) {
        about->type = cudaMemoryTypeUnregistered, about->hostPointer = (void *)pointer;
        return cudaSuccess;
    }
    about->type = range.kind == KIND_HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    about->device = range.device;
    about->devicePointer = (void *)pointer;
    about->hostPointer = range.kind == KIND_HOST ? (void *)pointer : NULL;
    return cudaSuccess;
}
static cudaError_t copy(void *to, const void *from, size_t nbytes, cudaStream_t stream) {
    if (standin_failed()) return told(FAULT);
    COUNT(memcpys);
    memmove(to, from, nbytes);
    return told(standin_enqueue(stream));
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    return copy(to, from, n, stream);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) {
    (void)kind;
    cudaError_t code = copy(to, from, n, 0);
    return code ? code : told(standin_stream_wait(0));
}
cudaError_t cudaMemcpyPeerAsync(void *to, int d, const void *from, int s, size_t n, cudaStream_t stream) {
    (void)d, (void)s;
    return copy(to, from, n, stream);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    if (standin_failed()) return told(FAULT);
    COUNT(memcpys);
    for (size_t row = 0; row < height; row++) memmove((char *)to + row * pitch, (const char *)from + row * from_pitch, width);
    return told(standin_enqueue(stream));
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t n, cudaStream_t stream) {
    if (standin_failed()) return told(FAULT);
    COUNT(memsets);
    standin_fill(to, value, n);
    return told(standin_enqueue(stream));
}
cudaError_t cudaMemset(void *to, int value, size_t n) { return cudaMemsetAsync(to, value, n, 0); }
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t at, enum cudaMemcpyKind kind) {
    (void)symbol, (void)from, (void)n, (void)at, (void)kind;
    return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) { /* the host's shadow of a device variable */
    *pointer = (void *)symbol;
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *pointer, size_t n, unsigned flags) {
    (void)flags;
    return told(standin_register(pointer, n, KIND_HOST, standin_current()));
}

/* ---- devices */
cudaError_t cudaGetDeviceCount(int *count) {
    *count = standin_devices();
    return *count ? cudaSuccess : told(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device) { *device = standin_current(); return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return told(standin_select(device)); }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return told(standin_device_wait(standin_current())); }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { (void)a, (void)b; *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) { return told(cuDeviceGetPCIBusId(text, size, device)); }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    return told(cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, device)); /* both number them alike */
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    if (standin_board(device) < 0) return told(cudaErrorInvalidDevice);
#define A(name) standin_attribute(device, CU_DEVICE_ATTRIBUTE_##name)
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", board_name(standin_board(device)));
    board_uuid(standin_board(device), (unsigned char *)p->uuid.bytes);
    p->totalGlobalMem = board_total(standin_board(device));
    p->major = A(COMPUTE_CAPABILITY_MAJOR), p->minor = A(COMPUTE_CAPABILITY_MINOR);
    p->multiProcessorCount = A(MULTIPROCESSOR_COUNT), p->warpSize = A(WARP_SIZE), p->pciBusID = A(PCI_BUS_ID);
    p->maxThreadsPerBlock = A(MAX_THREADS_PER_BLOCK);
    p->maxThreadsPerMultiProcessor = A(MAX_THREADS_PER_MULTIPROCESSOR);
    p->maxBlocksPerMultiProcessor = A(MAX_BLOCKS_PER_MULTIPROCESSOR);
    p->maxThreadsDim[0] = A(MAX_BLOCK_DIM_X), p->maxThreadsDim[1] = A(MAX_BLOCK_DIM_Y), p->maxThreadsDim[2] = A(MAX_BLOCK_DIM_Z);
    p->maxGridSize[0] = A(MAX_GRID_DIM_X), p->maxGridSize[1] = A(MAX_GRID_DIM_Y), p->maxGridSize[2] = A(MAX_GRID_DIM_Z);
    p->sharedMemPerBlock = A(MAX_SHARED_MEMORY_PER_BLOCK);
    p->sharedMemPerBlockOptin = A(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    p->sharedMemPerMultiprocessor = A(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    p->reservedSharedMemPerBlock = A(RESERVED_SHARED_MEMORY_PER_BLOCK);
    p->regsPerBlock = A(MAX_REGISTERS_PER_BLOCK), p->regsPerMultiprocessor = A(MAX_REGISTERS_PER_MULTIPROCESSOR);
    p->totalConstMem = A(TOTAL_CONSTANT_MEMORY), p->l2CacheSize = A(L2_CACHE_SIZE);
    p->memoryBusWidth = A(GLOBAL_MEMORY_BUS_WIDTH), p->textureAlignment = A(TEXTURE_ALIGNMENT);
    p->asyncEngineCount = A(ASYNC_ENGINE_COUNT);
    p->unifiedAddressing = p->concurrentKernels = p->streamPrioritiesSupported = p->cooperativeLaunch = 1;
#undef A
    return cudaSuccess;
}

/* ---- streams and events */
cudaError_t cudaStreamCreate(cudaStream_t *s) { return told(standin_stream_new(s, 0)); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { (void)flags; return told(standin_stream_new(s, 0)); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    (void)flags;
    return told(standin_stream_new(s, priority));
}
cudaError_t cudaStreamDestroy(cudaStream_t s) { return told(standin_stream_delete(s)); }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { return told(standin_stream_priority(s, priority)); }
cudaError_t cudaStreamQuery(cudaStream_t s) { return told(standin_stream_ready(s)); }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return told(standin_stream_wait(s)); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { (void)flags; return told(standin_stream_after(s, e)); }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { (void)mode; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    (void)s;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    (void)id, (void)graph, (void)nodes, (void)edges, (void)count;
    return cudaStreamIsCapturing(s, status);
}
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t s, enum cudaStreamCaptureStatus *status) { return cudaStreamIsCapturing(s, status); }
cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t s, enum cudaStreamCaptureStatus *status) { return cudaStreamIsCapturing(s, status); }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) {
    f(data); /* all that was enqueued before it is done */
    return told(standin_enqueue(s));
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data, unsigned flags) {
    (void)flags;
    f(s, (cudaError_t)standin_failed(), data);
    return told(standin_enqueue(s));
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return told(standin_event_new(e, flags)); }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return told(standin_event_new(e, 0)); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return told(standin_event_delete(e)); }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return told(standin_event_record(e, s)); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { (void)flags; return told(standin_event_record(e, s)); }
cudaError_t cudaEventQuery(cudaEvent_t e) { return told(standin_event_ready(e)); }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return told(standin_event_wait(e)); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { return told(standin_event_elapsed(ms, a, b)); }
cudaError_t cudaEventElapsedTime_v2(float *ms, cudaEvent_t a, cudaEvent_t b) { return told(standin_event_elapsed(ms, a, b)); }

/* ---- kernels: they are known, and do nothing but fill single values: a GradScaler reads its own */
#define FILLS 64 /* for each type and width of vectors one */
static struct { const void *entry; unsigned nbytes; } fills[FILLS];
static unsigned fill_count;
/* Torch's FillFunctor<T> for contiguous tensors: its arguments are the number of elements, the value, and the address. */
static unsigned value_bytes(const char *kernel) {
    const char *functor = strstr(kernel, "11FillFunctorI");
    if (!functor || !strstr(kernel, "29vectorized_elementwise_kernel")) return 0;
    switch (functor[sizeof "11FillFunctorI" - 1]) {
    case 'f': case 'i': return 4;
    case 'd': case 'l': return 8;
    case 'b': return 1;
    default: return 0;
    }
}
void __cudaRegisterFunction(void **handle, const void *entry, char *function, const char *name) {
    (void)handle, (void)function;
    unsigned nbytes = value_bytes(name);
    if (nbytes && fill_count < FILLS) fills[fill_count].entry = entry, fills[fill_count++].nbytes = nbytes;
}
static void fill_single(const void *kernel, void **arguments) {
    for (unsigned i = 0; i < fill_count; i++)
        if (fills[i].entry == kernel && *(int *)arguments[0] == 1) memcpy(*(void **)arguments[2], arguments[1], fills[i].nbytes);
}
static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    (void)grid, (void)block, (void)shared;
    if (!standin_failed()) fill_single(f, arguments);
    return told(standin_launch(stream));
}
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(f, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(f, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **arguments) {
    return cudaLaunchKernel(f, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, config->stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *entry) { *kernel = (cudaKernel_t)entry; return cudaSuccess; }
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[8];
    (void)binary;
    return handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { (void)handle; return 0; }
void __cudaRegisterVar(void) {}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute attribute, int value) {
    (void)f, (void)attribute, (void)value;
    return cudaSuccess;
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t f, enum cudaFuncAttribute attribute, int value, int device) {
    (void)f, (void)attribute, (void)value, (void)device;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *about, const void *f) {
    (void)f;
    memset(about, 0, sizeof *about);
    about->maxThreadsPerBlock = 1024, about->numRegs = 32;
    about->binaryVersion = about->ptxVersion = board_capability();
    about->maxDynamicSharedSizeBytes = standin_attribute(standin_current(), CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int size, size_t shared, unsigned flags) {
    (void)f, (void)size, (void)shared, (void)flags;
    *n = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int size, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, size, shared, 0);
}
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* ---- the driver, through the runtime */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    CUresult code = cuGetProcAddress_v2(name, f, (int)version, flags, NULL);
    if (result) *result = code ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
