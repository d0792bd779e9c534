/* A libnvidia-ml.so.1, and with -DFAKE_CUDA a libcuda.so.1, that answer from the file named by FAKE_GPUS. With -DOLD_DRIVER
 * it lacks the second version of the memory query, as drivers before 510 do.
 *
 * One line per fact, in any order after the board it belongs to:
 *   fail FUNCTION CODE [UUID]            FUNCTION returns CODE (for that device only, when a UUID is given)
 *   board UUID NAME DOMAIN:BUS:DEVICE TOTAL FREE
 *   mig UUID TOTAL FREE                  an instance on the last board, which is then in MIG mode
 *   emptyslot                            a MIG slot without an instance, on the last board
 *   cuda UUID TOTAL FREE INTEGRATED      the next device in the CUDA driver's order (libcuda only)
 *
 * Functions, structures and codes are those of nvml.h (API 12) and cuda.h: the real C ABI, so that the tests drive the
 * real pynvml. Calls are appended to the file named by FAKE_GPUS_LOG.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int nvmlReturn_t;
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       ARGUMENT_VERSION_MISMATCH = 25 };

typedef struct Device {
    char uuid[96], name[96];
    unsigned domain, bus, device;
    unsigned long long total, free;
    int parent;     /* index of the board of a MIG instance, -1 for a board */
    int slot;       /* slot of a MIG instance on its board */
    int slots;      /* MIG slots of a board; 0 when it is not in MIG mode */
    int integrated; /* CUDA only */
} Device;
typedef Device *nvmlDevice_t;

static Device devices[64];
static int device_count;
static struct { char function[64]; int code; char uuid[96]; } failures[64];
static int failure_count, initialized;

static void load(void) {
    const char *path = getenv("FAKE_GPUS");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512], word[32];
    int board = -1;
    (void)board; /* the driver knows of no boards */
    device_count = failure_count = 0;
    if (!file) { fprintf(stderr, "fake: FAKE_GPUS is not readable\n"); exit(99); }
    while (fgets(line, sizeof line, file)) {
        Device *d = &devices[device_count];
        if (sscanf(line, "%31s", word) != 1) continue;
        memset(d, 0, sizeof *d);
        d->parent = -1;
        if (!strcmp(word, "fail")) {
            sscanf(line, "%*s %63s %d %95s", failures[failure_count].function, &failures[failure_count].code,
                   failures[failure_count].uuid);
            failure_count++;
#ifdef FAKE_CUDA
        } else if (!strcmp(word, "cuda")) {
            sscanf(line, "%*s %95s %llu %llu %d", d->uuid, &d->total, &d->free, &d->integrated);
            device_count++;
#else
        } else if (!strcmp(word, "board")) {
            sscanf(line, "%*s %95s %95s %x:%x:%x %llu %llu", d->uuid, d->name, &d->domain, &d->bus, &d->device,
                   &d->total, &d->free);
            board = device_count++;
        } else if (!strcmp(word, "mig")) {
            sscanf(line, "%*s %95s %llu %llu", d->uuid, &d->total, &d->free);
            d->parent = board;
            d->slot = devices[board].slots++;
            device_count++;
        } else if (!strcmp(word, "emptyslot")) {
            devices[board].slots++;
#endif
        }
    }
    fclose(file);
}

/* The code that this call is told to return, having written it into the log. */
static int told(const char *function, const char *uuid) {
    const char *log = getenv("FAKE_GPUS_LOG");
    if (log) {
        FILE *file = fopen(log, "a");
        fprintf(file, "%s %s\n", function, uuid ? uuid : "");
        fclose(file);
    }
    for (int i = 0; i < failure_count; i++)
        if (!strcmp(failures[i].function, function) &&
            (!failures[i].uuid[0] || (uuid && !strcmp(failures[i].uuid, uuid))))
            return failures[i].code;
    return SUCCESS;
}

#ifndef FAKE_CUDA

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

#define MEMORY_V2 (unsigned)(sizeof(nvmlMemory_v2_t) | (2 << 24))
#define ENTER(uuid)                                    \
    do {                                               \
        if (!initialized) return UNINITIALIZED;        \
        int code = told(__func__, uuid);               \
        if (code) return code;                         \
    } while (0)

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    load();
    int code = told(__func__, NULL);
    if (!code) initialized++;
    return code;
}
nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlShutdown(void) {
    ENTER(NULL);
    initialized--;
    return SUCCESS;
}
const char *nvmlErrorString(nvmlReturn_t code) {
    return code == ARGUMENT_VERSION_MISMATCH ? "Argument version mismatch" : code ? "Fake error" : "Success";
}

static Device *board_at(unsigned index) {
    for (int i = 0; i < device_count; i++)
        if (devices[i].parent < 0 && index-- == 0) return &devices[i];
    return NULL;
}
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER(NULL);
    for (*count = 0; board_at(*count); ++*count) {}
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    *device = board_at(index);
    if (!*device) return INVALID_ARGUMENT;
    ENTER((*device)->uuid);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    ENTER(uuid);
    for (int i = 0; i < device_count; i++)
        if (!strcmp(devices[i].uuid, uuid)) { *device = &devices[i]; return SUCCESS; }
    return NOT_FOUND;
}
static nvmlReturn_t give(const char *text, char *buffer, unsigned length) {
    if (strlen(text) + 1 > length) return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    ENTER(device->uuid);
    return give(device->uuid, uuid, length);
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    ENTER(device->uuid);
    return give(device->name, name, length);
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    ENTER(device->uuid);
    memset(pci, 0, sizeof *pci);
    pci->domain = device->domain;
    pci->bus = device->bus;
    pci->device = device->device;
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", device->domain, device->bus, device->device);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", device->domain & 0xffff, device->bus & 0xff,
             device->device & 0xff);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    ENTER(device->uuid);
    *current = *pending = device->slots > 0;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    ENTER(device->uuid);
    *count = (unsigned)device->slots;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *instance) {
    ENTER(device->uuid);
    for (int i = 0; i < device_count; i++)
        if (devices[i].parent >= 0 && &devices[devices[i].parent] == device && devices[i].slot == (int)index) {
            *instance = &devices[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    ENTER(device->uuid);
    memory->total = device->total;
    memory->free = device->free;
    memory->used = device->total - device->free;
    return SUCCESS;
}
#ifndef OLD_DRIVER
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    ENTER(device->uuid);
    if (memory->version != MEMORY_V2) return ARGUMENT_VERSION_MISMATCH;
    memory->total = device->total;
    memory->free = device->free;
    memory->reserved = 0;
    memory->used = device->total - device->free;
    return SUCCESS;
}
#endif

#else

#define ENTER()                          \
    do {                                 \
        int code = told(__func__, NULL); \
        if (code) return code;           \
    } while (0)

static int current = -1;

int cuInit(unsigned flags) {
    (void)flags;
    load();
    initialized = 1;
    ENTER();
    return device_count ? SUCCESS : 100; /* CUDA_ERROR_NO_DEVICE */
}
int cuGetErrorName(int code, const char **text) {
    *text = code == 999 ? "CUDA_ERROR_UNKNOWN" : "CUDA_ERROR_FAKE";
    return SUCCESS;
}
int cuDeviceGetCount(int *count) {
    ENTER();
    *count = device_count;
    return SUCCESS;
}
int cuDeviceGet(int *device, int ordinal) {
    ENTER();
    *device = ordinal;
    return SUCCESS;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    ENTER();
    const char *text = devices[device].uuid + 4; /* after "GPU-" or "MIG-" */
    for (int i = 0; i < 16; i++, text += 2) {
        unsigned byte;
        if (*text == '-') text++;
        sscanf(text, "%2x", &byte);
        uuid[i] = (unsigned char)byte;
    }
    return SUCCESS;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER();
    *value = attribute == 18 ? devices[device].integrated : 0;
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER();
    *context = &devices[device];
    return SUCCESS;
}
int cuCtxSetCurrent(void *context) {
    ENTER();
    current = (int)((Device *)context - devices);
    return SUCCESS;
}
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    ENTER();
    if (current < 0) return 201; /* CUDA_ERROR_INVALID_CONTEXT */
    *free = devices[current].free;
    *total = devices[current].total;
    return SUCCESS;
}

#endif
