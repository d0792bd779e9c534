/* See board.h. */
#define _GNU_SOURCE
#include "board.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SLOTS 256
#define MIB ((size_t)1 << 20)

struct slot { /* one process */
    int pid;
    unsigned long long started; /* clock ticks since boot: tells a process from a later one with its number */
    unsigned long long nbytes[BOARDS_MAX];
    unsigned long long context[BOARDS_MAX];
    char touched[BOARDS_MAX];
};
struct machine { struct slot slots[SLOTS]; };

static struct machine *machine;
static struct slot *mine;
static int file = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* ---- settings */
static const char *field_of(const char *name, int field, char *out, size_t size) {
    const char *text = getenv(name), *end;
    if (!text || !*text) return NULL;
    while (field-- > 0 && (end = strchr(text, ','))) text = end + 1;
    end = strchrnul(text, ',');
    snprintf(out, size, "%.*s", (int)(end - text), text);
    return out;
}
double setting(const char *name, int field, double otherwise) {
    char text[64];
    return field_of(name, field, text, sizeof text) ? atof(text) : otherwise;
}
int board_count(void) {
    int count = 1;
    const char *gib = getenv("STANDIN_GPU_GIB");
    for (; gib && (gib = strchr(gib, ',')); gib++) count++;
    count = (int)setting("STANDIN_GPUS", 0, count);
    return count > BOARDS_MAX ? BOARDS_MAX : count;
}
size_t board_total(int board) { return (size_t)(setting("STANDIN_GPU_GIB", board, 16.0) * 1024.0) * MIB; }
static size_t board_others(int board) { return (size_t)(setting("STANDIN_GPU_OTHERS_MIB", board, 600.0) * MIB); }
const char *board_name(int board) {
    static char names[BOARDS_MAX][64];
    const char *name = field_of("STANDIN_GPU_NAME", board, names[board], sizeof names[board]);
    return name ? name : "Stand-in GPU";
}
int board_capability(void) { return (int)(setting("STANDIN_GPU_SM", 0, 9.0) * 10.0 + 0.5); }
int board_pci_bus(int board) { return board + 1; }
void board_uuid(int board, unsigned char uuid[16]) {
    static const unsigned char common[16] = {0x57, 0xa4, 0xd1, 0x40, 0, 0, 0x40, 0, 0x80, 0};
    memcpy(uuid, common, 16);
    uuid[0] += (unsigned char)(16 * board); /* a prefix of the UUID names one board, as on real machines */
    uuid[15] = (unsigned char)(board + 1);
}

/* ---- which boards CUDA shows */
static int by_uuid(const char *word, size_t length) {
    int found = -1;
    for (int b = 0; b < board_count(); b++) {
        unsigned char u[16];
        char text[48];
        board_uuid(b, u);
        snprintf(text, sizeof text, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
                 u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
        if (strncasecmp(text, word, length)) continue;
        if (found >= 0) return -1; /* ambiguous */
        found = b;
    }
    return found;
}
int board_visible(int boards[BOARDS_MAX]) {
    int order[BOARDS_MAX], all = board_count(), count = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *by = getenv("CUDA_DEVICE_ORDER");
    int by_pci = by && !strcmp(by, "PCI_BUS_ID");
    for (int i = 0; i < all; i++) order[i] = by_pci ? i : (int)setting("STANDIN_GPU_ORDER", i, i);
    if (!visible) {
        memcpy(boards, order, sizeof order);
        return all;
    }
    while (count < BOARDS_MAX) {
        size_t length = strcspn(visible, ",");
        int board = -1;
        if (!strncmp(visible, "GPU-", 4)) {
            board = by_uuid(visible, length);
        } else {
            char *end;
            long number = strtol(visible, &end, 10);
            if (end != visible && number >= 0 && number < all) board = order[number];
        }
        if (board < 0) break;
        for (int i = 0; i < count; i++)
            if (boards[i] == board) return 0;
        boards[count++] = board;
        if (!visible[length]) break;
        visible += length + 1;
    }
    return count;
}

/* ---- who holds what */
static unsigned long long started(int pid) { /* 0 if it has ended */
    char path[32], text[1024], state = 'X';
    unsigned long long ticks = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int stat = open(path, O_RDONLY | O_CLOEXEC);
    if (stat < 0) return 0;
    ssize_t length = read(stat, text, sizeof text - 1);
    close(stat);
    if (length <= 0) return 0;
    text[length] = 0;
    const char *rest = strrchr(text, ')'); /* the name before it may hold anything */
    if (!rest || sscanf(rest + 2, "%c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state,
                        &ticks) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : ticks;
}
static int lives(const struct slot *slot) {
    int pid = __atomic_load_n(&slot->pid, __ATOMIC_ACQUIRE);
    return pid && (slot == mine || (slot->started && started(pid) == slot->started));
}
static void forked(void) { /* the child holds nothing, and needs a lock of its own */
    mine = NULL;
    file = -1;
    if (machine) munmap(machine, sizeof *machine);
    machine = NULL;
    pthread_mutex_init(&mutex, NULL);
}
static void attach(void) { /* the caller holds the mutex */
    static int watched;
    char otherwise[64];
    const char *path = getenv("STANDIN_GPU_STATE");
    if (machine) return;
    if (!path || !*path) {
        snprintf(otherwise, sizeof otherwise, "/tmp/standin-gpu-%d.state", (int)getuid());
        path = otherwise;
    }
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    struct stat about;
    if (file < 0 || fstat(file, &about) ||
        (about.st_size < (off_t)sizeof *machine && ftruncate(file, sizeof *machine)) ||
        (machine = mmap(0, sizeof *machine, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)) == MAP_FAILED) {
        fprintf(stderr, "stand-in GPU: STANDIN_GPU_STATE=%s cannot be opened: %s\n", path, strerror(errno));
        abort();
    }
    if (!watched++) pthread_atfork(NULL, NULL, forked);
}
static void lock(void) { /* against threads by the mutex, against processes by a lock that ends with its owner */
    pthread_mutex_lock(&mutex);
    attach();
    struct flock all = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    while (fcntl(file, F_OFD_SETLKW, &all) && errno == EINTR) {}
    if (mine) return;
    for (int i = 0; i < SLOTS; i++) {
        struct slot *slot = &machine->slots[i];
        if (lives(slot)) continue;
        memset(slot, 0, sizeof *slot);
        slot->started = started(getpid());
        __atomic_store_n(&slot->pid, getpid(), __ATOMIC_RELEASE);
        mine = slot;
        return;
    }
    fprintf(stderr, "stand-in GPU: more than %d processes use it at once\n", SLOTS);
    abort();
}
static void unlock(void) {
    struct flock all = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
    fcntl(file, F_OFD_SETLK, &all);
    pthread_mutex_unlock(&mutex);
}
static size_t in_use(int board) {
    size_t sum = board_others(board);
    for (int i = 0; i < SLOTS; i++) {
        const struct slot *slot = &machine->slots[i];
        unsigned long long held = slot->nbytes[board] + slot->context[board];
        if (held && lives(slot)) sum += held;
    }
    return sum;
}
size_t board_used(int board) {
    pthread_mutex_lock(&mutex);
    attach();
    size_t sum = in_use(board);
    pthread_mutex_unlock(&mutex);
    return sum;
}
int board_processes(int board, int *pids, size_t *nbytes, int most) {
    int count = 0;
    pthread_mutex_lock(&mutex);
    attach();
    for (int i = 0; i < SLOTS && count < most; i++) {
        const struct slot *slot = &machine->slots[i];
        if (!slot->touched[board] || !lives(slot)) continue;
        pids[count] = slot->pid;
        nbytes[count++] = slot->nbytes[board] + slot->context[board];
    }
    pthread_mutex_unlock(&mutex);
    return count;
}
int board_take(int board, size_t nbytes) {
    lock();
    int room = in_use(board) + nbytes <= board_total(board);
    if (room) mine->nbytes[board] += nbytes;
    unlock();
    return room;
}
void board_give(int board, size_t nbytes) {
    lock();
    mine->nbytes[board] -= nbytes;
    unlock();
}
int board_touched(int board) { return mine && mine->touched[board]; }
void board_touch(int board) {
    if (board_touched(board)) return;
    lock();
    mine->context[board] = (unsigned long long)(setting("STANDIN_GPU_CONTEXT_MIB", 0, 300.0) * MIB);
    mine->touched[board] = 1;
    unlock();
}
