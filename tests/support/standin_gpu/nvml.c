/* A stand-in for libnvidia-ml.so.1: the same boards and the same use as the stand-in's driver, as seen from any process.
 * The structures are those of nvml.h (API 12); functions that it lacks are "not found" for pynvml. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "board.h"

enum { INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, VERSION_MISMATCH = 25 };

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };
struct process_v1 { unsigned pid; unsigned long long nbytes; };
struct process { unsigned pid; unsigned long long nbytes; unsigned instance, compute_instance; };
typedef struct board_handle *nvmlDevice_t;

static int board_of(nvmlDevice_t device) { return (int)(size_t)device - 1; }
static nvmlDevice_t handle_of(int board) { return (nvmlDevice_t)(size_t)(board + 1); }
static void uuid_of(int board, char *text, unsigned size) {
    unsigned char u[16];
    board_uuid(board, u);
    snprintf(text, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3],
             u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}
static void bus_of(int board, char *text, unsigned size) { snprintf(text, size, "00000000:%02X:00.0", board_pci_bus(board)); }

int nvmlInit_v2(void) { return 0; }
int nvmlInit(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) {
    return code == NOT_SUPPORTED ? "Not Supported" : code == NOT_FOUND ? "Not Found" : code ? "Invalid Argument" : "Success";
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.65.06"); return 0; }
int nvmlSystemGetNVMLVersion(char *text, unsigned size) { snprintf(text, size, "13.580.65.06"); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13020; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13020; return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)board_count(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    *device = handle_of((int)index);
    return (int)index < board_count() ? 0 : INVALID_ARGUMENT;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    char text[96];
    for (int b = 0; b < board_count(); b++) {
        uuid_of(b, text, sizeof text);
        *device = handle_of(b);
        if (!strcasecmp(text, uuid)) return 0;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device) {
    const char *colon = strchr(bus, ':');
    int board = colon ? (int)strtol(colon + 1, NULL, 16) - 1 : -1;
    *device = handle_of(board);
    return board >= 0 && board < board_count() ? 0 : NOT_FOUND;
}
int nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) { *index = (unsigned)board_of(device); return 0; }
int nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned size) {
    snprintf(text, size, "%s", board_name(board_of(device)));
    return 0;
}
int nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned size) { uuid_of(board_of(device), text, size); return 0; }
int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned)board_pci_bus(board_of(device));
    bus_of(board_of(device), pci->text, sizeof pci->text);
    bus_of(board_of(device), pci->legacy, sizeof pci->legacy);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    (void)device;
    *major = board_capability() / 10, *minor = board_capability() % 10;
    return 0;
}
int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *now, unsigned *pending) {
    (void)device;
    *now = *pending = 0;
    return NOT_SUPPORTED;
}
int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) { (void)device; *count = 0; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig) {
    (void)device, (void)index, (void)mig;
    return NOT_FOUND;
}

int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory *memory) {
    memory->total = board_total(board_of(device));
    memory->used = board_used(board_of(device));
    if (memory->used > memory->total) memory->used = memory->total;
    memory->free = memory->total - memory->used;
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_v2 *memory) {
    struct memory plain;
    if (memory->version != (sizeof *memory | 2u << 24)) return VERSION_MISMATCH;
    nvmlDeviceGetMemoryInfo(device, &plain);
    memory->total = plain.total, memory->reserved = 0, memory->free = plain.free, memory->used = plain.used;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, struct process *processes) {
    int pids[256];
    size_t nbytes[256];
    unsigned found = (unsigned)board_processes(board_of(device), pids, nbytes, 256), room = *count;
    *count = found;
    if (found > room) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < found; i++) processes[i] = (struct process){(unsigned)pids[i], nbytes[i], ~0u, ~0u};
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count, struct process_v1 *processes) {
    struct process found[256];
    unsigned room = *count, number = 256;
    nvmlDeviceGetComputeRunningProcesses_v3(device, &number, found);
    *count = number;
    if (number > room) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < number; i++) processes[i] = (struct process_v1){found[i].pid, found[i].nbytes};
    return 0;
}
int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, unsigned rates[2]) { (void)device; rates[0] = rates[1] = 0; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetP2PStatus(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfo(void) { return 0; } /* the caller's zeros: no fabric */
int nvmlDeviceGetGpuFabricInfoV(void) { return 0; }
