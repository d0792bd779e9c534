/* What the boards are, and who holds how much of each: shared by the stand-in's driver and its NVML.
 *
 * A board has the number that NVML gives it (PCI order). Use is kept per process in a file that all processes of one
 * stand-in machine map, so that NVML in one process sees what the others hold, as a real board does. */
#ifndef STANDIN_BOARD_H
#define STANDIN_BOARD_H
#include <stddef.h>

#define BOARDS_MAX 16

int board_count(void);
size_t board_total(int board);
size_t board_used(int board); /* others, and all living processes: allocations and contexts */
const char *board_name(int board);
void board_uuid(int board, unsigned char uuid[16]);
int board_capability(void); /* 90 for 9.0 */
int board_pci_bus(int board);

/* Living processes that have a context on the board; returns how many were written. */
int board_processes(int board, int *pids, size_t *nbytes, int most);

/* The boards that CUDA_VISIBLE_DEVICES leaves, in CUDA's order; returns their number. */
int board_visible(int boards[BOARDS_MAX]);

int board_take(int board, size_t nbytes); /* 1 if there was room for it */
void board_give(int board, size_t nbytes);
void board_touch(int board); /* this process has a context there from now on */
int board_touched(int board);

/* A setting's value for one board: the fields are separated by commas, the last one serves all further boards. */
double setting(const char *name, int field, double otherwise);
#endif
