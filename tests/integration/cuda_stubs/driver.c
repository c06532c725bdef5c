// A CUDA driver of a machine without a GPU: every call says so. What torch and vLLM's libraries want to find in one.
#define NO_DEVICE 100
#define NONE(name) int name(void) { return NO_DEVICE; }
int cuGetErrorString(int error, const char **text) { *text = "a stub: no CUDA device is here"; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 0; return NO_DEVICE; }
NONE(cuInit) NONE(cuCtxGetCurrent) NONE(cuCtxSetCurrent) NONE(cuDeviceGetAttribute) NONE(cuDevicePrimaryCtxRetain)
NONE(cuGetProcAddress_v2) NONE(cuMemAddressFree) NONE(cuMemAddressReserve) NONE(cuMemCreate) NONE(cuMemMap)
NONE(cuMemGetAllocationGranularity) NONE(cuMemRelease) NONE(cuMemSetAccess) NONE(cuMemUnmap)
NONE(cuPointerGetAttribute) NONE(cuTensorMapEncodeTiled)
