// A CUDA driver without a GPU that computes our two Triton kernels itself, for one row and a layer's own sizes.
//
// So a launch costs the host what Triton and its launcher cost; the real driver's part of it is missing. What a launch
// passes is what Triton leaves of the arguments: an integer that is 1 became a constant. Every other call succeeds.
#include <stdint.h>
#include <string.h>

#define NONE(name) int name(void) { return 0; }
NONE(cuCtxGetLimit) NONE(cuCtxSetCurrent) NONE(cuCtxSetLimit) NONE(cuDevicePrimaryCtxRetain) NONE(cuFuncSetAttribute)
NONE(cuFuncSetCacheConfig) NONE(cuInit) NONE(cuModuleUnload) NONE(cuOccupancyMaxActiveClusters)
NONE(cuTensorMapEncodeIm2col) NONE(cuTensorMapEncodeTiled)

static int context, num_launches, top_k, id_bytes, x_bytes;
static const char *const NAMES[] = {"split_rows", "add_partial"};

void launches_set(int k, int bytes_of_id, int bytes_of_x) { top_k = k, id_bytes = bytes_of_id, x_bytes = bytes_of_x; }
int launches_count(void) { return num_launches; }

int cuCtxGetCurrent(void **found) { *found = &context; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "of the driver without a GPU"; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuPointerGetAttribute(void *into, int attribute, uint64_t pointer) { *(uint64_t *)into = pointer; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = &context; return 0; }

// Of sm_90: 75 and 76 are the two parts of the capability, the rest are sizes that are large enough.
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 232448;
    return 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    for (int i = 0; i < 2; ++i)
        if (!strcmp(name, NAMES[i])) {
            *function = (void *)&NAMES[i];
            return 0;
        }
    return 500;  // not found
}

static float of_bf16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

#define POINTER(i) (*(void **)given[i])
#define INTEGER(i) (*(int32_t *)given[i])

// expert_map, ids, weights, x, stride, slots, x_here, weights_here, head, sent_rows, ids_out, weights_out, out, word,
// entries (sent_rows where nothing is noted), noted_ids, noted_weights, live (head where no row is padding),
// elsewhere, hidden
static void split_rows(void **given) {
    const int32_t *expert_map = POINTER(0);
    const void *ids = POINTER(1);
    const float *weights = POINTER(2);
    int32_t *slots = POINTER(5), *head = POINTER(8), *ids_out = POINTER(10);
    int64_t *sent_rows = POINTER(9), *entries = POINTER(14);
    float *weights_out = POINTER(11);
    const int32_t elsewhere = INTEGER(18), stays = -3;  // as layer/tiers.py
    const uint64_t row_bytes = (uint64_t)INTEGER(19) * x_bytes;
    int32_t leaving = 0;
    memcpy(POINTER(6), POINTER(3), row_bytes);
    memcpy(POINTER(7), weights, 4 * top_k);
    for (int k = 0; k < top_k; ++k) {
        const int64_t expert = id_bytes == 8 ? ((const int64_t *)ids)[k] : ((const int32_t *)ids)[k];
        const int32_t where = expert_map[expert];
        slots[k] = where >= 0 ? where : elsewhere;
        ids_out[k] = (int32_t)expert;
        weights_out[k] = weights[k];
        if (entries != sent_rows) {
            ((int16_t *)POINTER(15))[entries[0] * top_k + k] = (int16_t)expert;
            ((float *)POINTER(16))[entries[0] * top_k + k] = weights[k];
        }
        leaving += where < 0 && where != stays;
    }
    sent_rows[0] = 0;
    head[0] = leaving;
    head[1] = leaving > 0;
    if (leaving) memcpy(POINTER(12), POINTER(3), row_bytes);
    __atomic_store_n((uint32_t *)POINTER(13), 1, __ATOMIC_RELEASE);
}

static void add_partial(void **given) {  // out, stride, partial, rows, head, hidden
    uint16_t *out = POINTER(0);
    const float *partial = POINTER(2);
    for (int32_t i = 0; i < INTEGER(5); ++i) out[i] = to_bf16(of_bf16(out[i]) + partial[i]);
}

int cuLaunchKernelEx(const unsigned *config, void *function, void **given, void **extra) {
    ++num_launches;
    const char *const *name = function;
    if (name == &NAMES[0]) split_rows(given);
    else add_partial(given);
    return 0;
}
