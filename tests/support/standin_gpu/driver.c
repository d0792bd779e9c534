/* A stand-in for libcuda.so.1: devices, contexts and counters. memory.c and streams.c are its other parts; calls that
 * none of them defines are generated to answer "not supported". */
#define _GNU_SOURCE
#include <cuda.h>
#undef cuGetProcAddress
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "board.h"
#include "device.h"

/* ---- counters */
unsigned long long standin_counts[COUNTERS];
static const char *const names[] = {
#define X(name) #name,
    STANDIN_COUNTERS(X)
#undef X
};
static unsigned long long held[BOARDS_MAX], peak[BOARDS_MAX];

/* The counters as JSON, with what this process holds of each device and held at most. Returns the text's length. */
int standin_report(char *text, int size) {
    int at = snprintf(text, size, "{");
    for (int i = 0; i < COUNTERS; i++) at += snprintf(text + at, size - at, "\"%s\": %llu, ", names[i], standin_counts[i]);
    for (int which = 0; which < 2; which++) {
        const unsigned long long *values = which ? peak : held;
        at += snprintf(text + at, size - at, "%s\"%s_bytes\": [", which ? ", " : "", which ? "peak" : "held");
        for (int d = 0; d < standin_devices(); d++) at += snprintf(text + at, size - at, "%s%llu", d ? ", " : "", values[d]);
        at += snprintf(text + at, size - at, "]");
    }
    return at + snprintf(text + at, size - at, "}\n");
}
void standin_reset(void) { /* counts from zero, peaks from what is held */
    for (int i = 0; i < COUNTERS; i++)
        if (i != COUNT_kernel_launches || !standin_failed()) standin_counts[i] = 0;
    memcpy(peak, held, sizeof peak);
}
__attribute__((destructor)) static void at_exit(void) {
    const char *folder = getenv("STANDIN_GPU_COUNTERS");
    char path[4096], text[4096];
    int touched = 0;
    for (int b = 0; b < BOARDS_MAX; b++) touched |= board_touched(b);
    if (!folder || !*folder || !touched) return;
    snprintf(path, sizeof path, "%s/%d.json", folder, (int)getpid());
    standin_report(text, sizeof text);
    FILE *file = fopen(path, "w");
    if (!file) return;
    fputs(text, file);
    fclose(file);
}

/* ---- devices */
static int visible[BOARDS_MAX], visible_count;
static __thread int current;
static __thread CUcontext bound;
static struct { int device; } contexts[BOARDS_MAX];

static void look(void) { visible_count = board_visible(visible); }
int standin_devices(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, look);
    return visible_count;
}
int standin_board(int device) { return device >= 0 && device < standin_devices() ? visible[device] : -1; }
int standin_current(void) { return current; }
int standin_select(int device) {
    if (standin_board(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
    current = device;
    bound = (CUcontext)&contexts[device];
    standin_touch(device);
    return 0;
}
void standin_touch(int device) {
    if (standin_board(device) < 0) return;
    board_touch(visible[device]);
    if (!bound && device == current) bound = (CUcontext)&contexts[device]; /* as the runtime's first call does */
}
void standin_memory(int device, size_t *free_, size_t *total) {
    int board = standin_board(device);
    size_t used = board_used(board);
    *total = board_total(board);
    *free_ = used < *total ? *total - used : 0;
}
int standin_take(int device, size_t nbytes) {
    standin_touch(device);
    if (!board_take(visible[device], nbytes)) {
        COUNT(failed_allocations);
        return 0;
    }
    unsigned long long now = __atomic_add_fetch(&held[device], nbytes, __ATOMIC_RELAXED);
    unsigned long long most = __atomic_load_n(&peak[device], __ATOMIC_RELAXED);
    while (now > most && !__atomic_compare_exchange_n(&peak[device], &most, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return 1;
}
void standin_give(int device, size_t nbytes) {
    board_give(visible[device], nbytes);
    __atomic_fetch_sub(&held[device], nbytes, __ATOMIC_RELAXED);
}
int standin_attribute(int device, int attribute) { /* an H100's, where there is no setting; 0: the device lacks it */
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return board_capability() / 10;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return board_capability() % 10;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return board_pci_bus(standin_board(device));
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 232448;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 233472;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 65536;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 50 << 20;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;
    }
}

CUresult cuInit(unsigned flags) { (void)flags; return standin_devices() ? 0 : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return 0; }
CUresult cuDeviceGetCount(int *count) { *count = standin_devices(); return 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return standin_board(ordinal) < 0 ? CUDA_ERROR_INVALID_DEVICE : 0;
}
CUresult cuDeviceGetName(char *name, int size, CUdevice d) {
    if (standin_board(d) < 0) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, size, "%s", board_name(visible[d]));
    return 0;
}
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice d) {
    if (standin_board(d) < 0) return CUDA_ERROR_INVALID_DEVICE;
    board_uuid(visible[d], (unsigned char *)uuid->bytes);
    return 0;
}
#undef cuDeviceGetUuid
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice d) { return cuDeviceGetUuid_v2(uuid, d); }
CUresult cuDeviceTotalMem_v2(size_t *nbytes, CUdevice d) {
    if (standin_board(d) < 0) return CUDA_ERROR_INVALID_DEVICE;
    *nbytes = board_total(visible[d]);
    return 0;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice d) {
    if (standin_board(d) < 0) return CUDA_ERROR_INVALID_DEVICE;
    *value = standin_attribute(d, attribute);
    return 0;
}
CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice d) {
    if (standin_board(d) < 0) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(text, size, "0000:%02X:00.0", board_pci_bus(visible[d]));
    return 0;
}
CUresult cuMemGetInfo_v2(size_t *free_, size_t *total) {
    if (!bound) return CUDA_ERROR_INVALID_CONTEXT;
    standin_memory(current, free_, total);
    return 0;
}

/* ---- contexts: each device has its primary one */
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice d) {
    if (standin_board(d) < 0) return CUDA_ERROR_INVALID_DEVICE;
    standin_touch(d);
    *context = (CUcontext)&contexts[d];
    return 0;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) { return standin_board(d) < 0 ? CUDA_ERROR_INVALID_DEVICE : 0; }
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) {
    if (standin_board(d) < 0) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = board_touched(visible[d]);
    return 0;
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = bound; return 0; }
CUresult cuCtxSetCurrent(CUcontext context) {
    bound = context;
    if (context) current = (int)(((char *)context - (char *)contexts) / sizeof contexts[0]);
    return 0;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { if (context) *context = bound; return 0; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = current; return bound ? 0 : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuCtxSynchronize(void) { return standin_device_wait(current); }
CUresult cuStreamSynchronize(CUstream stream) { return standin_stream_wait(stream); }

/* ---- modules and launches: a kernel is known, and does nothing */
static int anything;
CUresult cuModuleLoadData(CUmodule *module, const void *image) { (void)image; *module = (CUmodule)&anything; return 0; }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values) {
    (void)n, (void)options, (void)values;
    return cuModuleLoadData(module, image);
}
CUresult cuModuleLoad(CUmodule *module, const char *path) { (void)path; *module = (CUmodule)&anything; return 0; }
CUresult cuModuleUnload(CUmodule module) { (void)module; return 0; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
    (void)module, (void)name;
    *f = (CUfunction)&anything;
    return 0;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
    (void)f;
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return 0;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) {
    (void)f, (void)attribute, (void)value;
    return 0;
}
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { (void)f, (void)config; return 0; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int size, size_t shared) {
    (void)f, (void)size, (void)shared;
    *blocks = 2;
    return 0;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **parameters, void **extra) {
    (void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)parameters, (void)extra;
    return standin_launch(stream);
}
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                   unsigned bz, unsigned shared, CUstream stream, void **parameters) {
    return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, NULL);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra) {
    (void)f, (void)parameters, (void)extra;
    return standin_launch(config->hStream);
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave i, CUtensorMapSwizzle s,
                                CUtensorMapL2promotion p, CUtensorMapFloatOOBfill fill) {
    (void)type, (void)rank, (void)address, (void)dims, (void)strides, (void)box, (void)steps, (void)i, (void)s, (void)p,
        (void)fill;
    memset(map, 0, sizeof *map);
    return 0;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    struct standin_range range;
    if (!standin_find((void *)pointer, &range)) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = range.kind == KIND_HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return 0;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = pointer; return 0;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = range.device; return 0;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = (CUcontext)&contexts[range.device]; return 0;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

/* ---- errors, and calls by name */
CUresult cuLogsRegisterCallback(CUlogsCallback f, void *data, CUlogsCallbackHandle *handle) {
    (void)f, (void)data;
    *handle = NULL; /* nothing is ever logged */
    return 0;
}
CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle handle) { (void)handle; return 0; }
static const struct { int code; const char *name, *text; } errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};
static int known(CUresult code) {
    for (int i = 0; i < (int)(sizeof errors / sizeof errors[0]); i++)
        if (errors[i].code == (int)code) return i;
    return 1;
}
CUresult cuGetErrorName(CUresult code, const char **name) { *name = errors[known(code)].name; return 0; }
CUresult cuGetErrorString(CUresult code, const char **text) { *text = errors[known(code)].text; return 0; }
CUresult cuGetProcAddress_v2(const char *name, void **f, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *r) {
    char newer[128];
    (void)version, (void)flags;
    snprintf(newer, sizeof newer, "%s_v2", name);
    *f = dlsym(RTLD_DEFAULT, newer);
    if (!*f) *f = dlsym(RTLD_DEFAULT, name);
    if (r) *r = *f ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *f ? 0 : CUDA_ERROR_NOT_FOUND;
}
CUresult cuGetProcAddress(const char *name, void **f, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, f, version, flags, NULL);
}
