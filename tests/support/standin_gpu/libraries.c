/* What the stand-in defines of the libraries over CUDA: handles, and the calls that give something back. A call that only
 * computes is generated: it counts as one launch and does nothing. */
#include <stdlib.h>
#include <string.h>

#include "device.h"

int standin_handle(void **handle) { /* opaque: nothing reads it but what is defined here */
    *handle = calloc(1, 256);
    return *handle ? 0 : 3; /* allocation failed, in all of these libraries */
}
/* torch gives each library call its stream on the handle; the current device's default stream stands for it */
int standin_compute(void) {
    standin_library_launch(0);
    return 0;
}

/* ---- cuBLAS */
int cublasCreate_v2(void **handle) { return standin_handle(handle); }
int cublasDestroy_v2(void *handle) { free(handle); return 0; }
int cublasGetMathMode(void *handle, int *mode) { (void)handle; *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { (void)handle; *mode = 0; return 0; }
int cublasLtCreate(void **handle) { return standin_handle(handle); }
int cublasLtDestroy(void *handle) { free(handle); return 0; }
int cublasLtMatmulDescCreate(void **d) { return standin_handle(d); }
int cublasLtMatmulDescDestroy(void *d) { free(d); return 0; }
int cublasLtMatrixLayoutCreate(void **d) { return standin_handle(d); }
int cublasLtMatrixLayoutDestroy(void *d) { free(d); return 0; }
int cublasLtMatmulPreferenceCreate(void **d) { return standin_handle(d); }
int cublasLtMatmulPreferenceDestroy(void *d) { free(d); return 0; }
struct heuristic { unsigned long long algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int asked, struct heuristic *results, int *found) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    *found = asked > 0;
    if (*found) memset(results, 0, sizeof *results), results->waves = 1.0f;
    return 0;
}

/* ---- the other libraries' handles */
int cusolverDnCreate(void **handle) { return standin_handle(handle); }
int cusolverDnDestroy(void *handle) { free(handle); return 0; }
int cusparseCreate(void **handle) { return standin_handle(handle); }
int cusparseDestroy(void *handle) { free(handle); return 0; }
