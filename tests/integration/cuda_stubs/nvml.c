// NVML of a machine that would have one GPU of Hopper's kind: vLLM asks it for the platform before any CUDA call.
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
static int device;
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = &device; return index ? 2 : 0; }
int nvmlDeviceGetName(void *handle, char *name, unsigned length) { strncpy(name, "Stub of a Hopper GPU", length); return 0; }
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) { strncpy(uuid, "GPU-stub", length); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) { memory->total = memory->free = 80ull << 30; memory->used = 0; return 0; }
int nvmlDeviceGetMemoryInfo_v2(void *handle, void *memory) { return 3; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) { strncpy(version, "580.0", length); return 0; }
const char *nvmlErrorString(int result) { return "a stub"; }
