// A CUDA runtime and driver that compute nothing: memory is the host's, copies happen at once, streams and events are
// done, launches return. Two of our own Triton kernels are computed, with a routing of this file's making, because nobody
// has computed what they should read. A captured graph keeps their launches, and a replay runs them in a thread of its
// own, so that the host meets what a GPU would do to it. tests/integration/test_cuda_without_gpu.py makes the rest of the
// names that torch, vLLM and Triton look for: functions that give 0.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
#define OK cudaSuccess

namespace {

std::mutex guard;
std::map<const char*, std::pair<size_t, int>> blocks;  // start -> size, type

void* block(size_t size, int type) {
    size_t whole = (size + 4095) / 4096 * 4096 + 4096;
    char* found = static_cast<char*>(mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (found == MAP_FAILED) return nullptr;
    std::lock_guard<std::mutex> lock(guard);
    blocks[found] = {whole, type};
    return found;
}
void release(const void* at) {
    std::lock_guard<std::mutex> lock(guard);
    auto it = blocks.find(static_cast<const char*>(at));
    if (it == blocks.end()) return;
    munmap(const_cast<char*>(it->first), it->second.first);
    blocks.erase(it);
}
int type_of(const void* at) {
    std::lock_guard<std::mutex> lock(guard);
    auto it = blocks.upper_bound(static_cast<const char*>(at));
    if (it == blocks.begin()) return cudaMemoryTypeUnregistered;
    --it;
    return static_cast<const char*>(at) < it->first + it->second.first ? it->second.second : cudaMemoryTypeUnregistered;
}

using Work = std::function<void()>;
struct Graph { std::vector<Work> works; };
std::atomic<Graph*> capturing{nullptr};
std::atomic<void*> capturing_on{nullptr};
std::atomic<int> running{0};
std::atomic<long> handles{0x1000}, replays{0}, own{0};
void* handle() { return reinterpret_cast<void*>(handles += 16); }

void until_idle() { while (running.load()) sched_yield(); }

void copy(void* to, const void* from, size_t size) {
    if (!capturing) memcpy(to, from, size);
}

// -- our kernels -----------------------------------------------------------------------------------------------------

template <class T> T arg(void** given, int i) { return *static_cast<T*>(given[i]); }

std::map<std::string, std::string*> kernels;  // by name, which is what a handle points to

}  // namespace

static const int null_top_k = 2, null_experts = 8, null_row_bytes = 256;  // of the bundled model in bfloat16
API long null_replays() { return replays; }
API long null_own() { return own; }

namespace {
// expert_map, ids, weights, x, stride, slots, x_here, weights_here, head, sent_rows, ids_out, weights_out, out, word,
// entries, noted_ids, noted_weights, live. Rows leave as zeros.
void split_rows(std::vector<void*> p, int rows) {
    static std::atomic<int> turn{0};
    const int k = null_top_k, shift = turn++;
    int32_t* map = (int32_t*)p[0];
    int32_t *head = (int32_t*)p[8], *ids_out = (int32_t*)p[10];
    int64_t* sent = (int64_t*)p[9];
    float* weights_out = (float*)p[11];
    char* out = (char*)p[12];
    int leaving = 0, num_sent = 0;
    const size_t bytes = null_row_bytes;
    for (int r = 0; r < rows; ++r) {
        int mine = 0;
        for (int c = 0; c < k; ++c) {
            int e = (r + shift + c * 3) % null_experts;
            ids_out[r * k + c] = e, weights_out[r * k + c] = 0.5f;
            mine += map[e] < 0 && map[e] != -3;
        }
        if (mine) {
            sent[num_sent] = r;
            memset(out + num_sent++ * bytes, 0, bytes);
        }
        leaving += mine;
    }
    head[0] = leaving; head[1] = num_sent;
    __atomic_store_n((uint32_t*)p[13], 1, __ATOMIC_RELEASE);
}
void wait_for(uint32_t* word) {
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != 1) sched_yield();
    __atomic_store_n(word, 0, __ATOMIC_RELEASE);
}
void submit(Work work) {
    if (Graph* graph = capturing) { graph->works.push_back(work); return; }
    until_idle();
    work();
}
}  // namespace

// -- runtime ---------------------------------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int* n) { *n = 1; return OK; }
API cudaError_t cudaGetDevice(int* d) { *d = 0; return OK; }
API cudaError_t cudaSetDevice(int) { return OK; }
API cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return OK; }
API cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return OK; }
API cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int) { strncpy(s, "0000:01:00.0", n); return OK; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return OK; }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return OK; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H100 that computes nothing");
    p->totalGlobalMem = 80ull << 30; p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536; p->warpSize = 32;
    p->maxThreadsPerBlock = 1024; p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535; p->major = 9; p->minor = 0;
    p->multiProcessorCount = 132; p->canMapHostMemory = 1; p->concurrentKernels = 1; p->unifiedAddressing = 1;
    p->l2CacheSize = 50 << 20; p->maxThreadsPerMultiProcessor = 2048; p->sharedMemPerMultiprocessor = 233472;
    p->regsPerMultiprocessor = 65536; p->sharedMemPerBlockOptin = 232448; p->memoryBusWidth = 5120; p->asyncEngineCount = 3;
    return OK;
}
static int attribute(int which) {
    switch (which) {
    case 1: return 1024; case 2: case 3: return 1024; case 4: return 64; case 5: return 2147483647; case 6: case 7: return 65535;
    case 8: return 49152; case 10: return 32; case 12: return 65536; case 13: return 1980000; case 16: return 132; case 19: return 1;
    case 39: return 2048; case 75: return 9; case 76: return 0; case 81: return 233472; case 82: return 65536; case 97: return 232448;
    case 36: return 2619000; case 37: return 5120; case 38: return 50 << 20;
    default: return 0;
    }
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) { *v = attribute(a); return OK; }
API cudaError_t cudaDeviceSynchronize() { until_idle(); return OK; }
API cudaError_t cudaMalloc(void** p, size_t n) { *p = block(n, cudaMemoryTypeDevice); return *p ? OK : cudaErrorMemoryAllocation; }
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
API cudaError_t cudaFree(void* p) { until_idle(); release(p); return OK; }
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { *p = block(n, cudaMemoryTypeHost); return *p ? OK : cudaErrorMemoryAllocation; }
API cudaError_t cudaFreeHost(void* p) { release(p); return OK; }
API cudaError_t cudaHostGetDevicePointer(void** d, void* h, unsigned) { *d = h; return OK; }
API cudaError_t cudaMemGetInfo(size_t* f, size_t* t) { *f = 79ull << 30; *t = 80ull << 30; return OK; }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
    memset(a, 0, sizeof *a);
    a->type = static_cast<cudaMemoryType>(type_of(p));
    a->devicePointer = a->hostPointer = const_cast<void*>(p);
    return OK;
}
API cudaError_t cudaMemcpy(void* t, const void* f, size_t n, cudaMemcpyKind) { until_idle(); copy(t, f, n); return OK; }
API cudaError_t cudaMemcpyAsync(void* t, const void* f, size_t n, cudaMemcpyKind, cudaStream_t) { copy(t, f, n); return OK; }
API cudaError_t cudaMemcpyPeerAsync(void* t, int, const void* f, int, size_t n, cudaStream_t) { copy(t, f, n); return OK; }
API cudaError_t cudaMemset(void* t, int v, size_t n) { memset(t, v, n); return OK; }
API cudaError_t cudaMemsetAsync(void* t, int v, size_t n, cudaStream_t) { if (!capturing) memset(t, v, n); return OK; }
API cudaError_t cudaMemcpy2DAsync(void* t, size_t tp, const void* f, size_t fp, size_t w, size_t h, cudaMemcpyKind, cudaStream_t) {
    for (size_t i = 0; i < h; ++i) copy((char*)t + i * tp, (const char*)f + i * fp, w);
    return OK;
}
API cudaError_t cudaStreamCreate(cudaStream_t* s) { *s = (cudaStream_t)handle(); return OK; }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { *s = (cudaStream_t)handle(); return OK; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) { *p = 0; return OK; }
API cudaError_t cudaStreamQuery(cudaStream_t) { return running ? cudaErrorNotReady : OK; }
API cudaError_t cudaStreamSynchronize(cudaStream_t) { until_idle(); return OK; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* c) {
    *c = capturing && s == capturing_on ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return OK;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* c, unsigned long long* id, cudaGraph_t* g, const cudaGraphNode_t** n, const cudaGraphEdgeData** e, size_t* count) {
    cudaStreamIsCapturing(s, c);
    if (id) *id = 7; if (g) *g = (cudaGraph_t)capturing.load(); if (n) *n = nullptr; if (e) *e = nullptr; if (count) *count = 0;
    return OK;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) { capturing_on = s; capturing = new Graph; return OK; }
API cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* g) { *g = (cudaGraph_t)capturing.load(); capturing = nullptr; return OK; }
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) { *e = (cudaGraphExec_t)g; return OK; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* nodes, size_t* n) { if (!nodes) *n = 1; else nodes[0] = nullptr; return OK; }
API cudaError_t cudaGraphDestroy(cudaGraph_t) { return OK; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return OK; }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t) {
    until_idle();
    ++replays;
    running = 1;
    std::thread([works = ((Graph*)e)->works] { for (auto& work : works) work(); running = 0; }).detach();
    return OK;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) { *e = (cudaEvent_t)handle(); return OK; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { *e = (cudaEvent_t)handle(); return OK; }
API cudaError_t cudaEventQuery(cudaEvent_t) { return running ? cudaErrorNotReady : OK; }
API cudaError_t cudaEventSynchronize(cudaEvent_t) { until_idle(); return OK; }
API cudaError_t cudaEventElapsedTime(float* t, cudaEvent_t, cudaEvent_t) { *t = 1; return OK; }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
    memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->binaryVersion = a->ptxVersion = 90; a->numRegs = 32; a->maxDynamicSharedSizeBytes = 232448; return OK;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { *n = 2; return OK; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { *n = 2; return OK; }
API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return OK; }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return OK; }
API cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return OK; }
API cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t) { return OK; }
API cudaError_t __cudaGetKernel(void** k, const void* f) { *k = const_cast<void*>(f); return OK; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* d) { if (!capturing) f(d); return OK; }
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* d, unsigned) { f(s, OK, d); return OK; }
API cudaError_t cudaGetSymbolAddress(void** p, const void*) { static char some[1 << 20]; *p = some; return OK; }
API const char* cudaGetErrorString(cudaError_t e) { return e ? "of the runtime that computes nothing" : "no error"; }
API const char* cudaGetErrorName(cudaError_t e) { return e ? "cudaErrorNull" : "cudaSuccess"; }
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int) { *p = (cudaMemPool_t)handle(); return OK; }
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return OK; }
API void** __cudaRegisterFatBinary(void*) { static void* one; return &one; }
API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* s, void* t) { *g = *b = dim3(1, 1, 1); *s = 0; *(void**)t = nullptr; return OK; }
API char __cudaInitModule(void**) { return 1; }
static int nothing() { return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* r) {
    *f = dlsym(RTLD_DEFAULT, name);
    if (!*f) *f = (void*)nothing;
    if (r) *r = cudaDriverEntryPointSuccess;
    return OK;
}

// -- driver ----------------------------------------------------------------------------------------------------------

static int context;
API int cuGetProcAddress_v2(const char* name, void** f, int, uint64_t, void*) { *f = dlsym(RTLD_DEFAULT, name); if (!*f) *f = (void*)nothing; return 0; }
API int cuCtxGetCurrent(void** c) { *c = &context; return 0; }
API int cuCtxGetDevice(int* d) { *d = 0; return 0; }
API int cuDeviceGet(int* d, int i) { *d = i; return 0; }
API int cuDeviceGetCount(int* n) { *n = 1; return 0; }
API int cuDevicePrimaryCtxRetain(void** c, int) { *c = &context; return 0; }
API int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
API int cuGetErrorString(int, const char** t) { *t = "of the driver that computes nothing"; return 0; }
API int cuStreamIsCapturing(void* s, int* c) { *c = capturing && s == capturing_on ? 1 : 0; return 0; }
API int cuPointerGetAttribute(void* into, int which, uint64_t pointer) {
    if (which == 3 || which == 1) *(uint64_t*)into = pointer;
    else if (which == 2) *(unsigned*)into = type_of((void*)pointer) == cudaMemoryTypeHost ? 1 : 2;
    else *(uint64_t*)into = 0;
    return 0;
}
API int cuFuncGetAttribute(int* v, int a, void*) { *v = a ? 0 : 1024; return 0; }
API int cuModuleLoadData(void** m, const void*) { *m = &context; return 0; }
API int cuDeviceGetAttribute(int* v, int a, int) { *v = attribute(a); return 0; }
API int cuModuleGetFunction(void** f, void*, const char* name) {
    std::lock_guard<std::mutex> lock(guard);
    auto& known = kernels[name];
    if (!known) known = new std::string(name);
    *f = known;
    return 0;
}
API int cuLaunchKernelEx(const void* config, void* function, void** given, void**) {
    const std::string& name = *(std::string*)function;
    const unsigned* grid = (const unsigned*)config;
    if (name == "split_rows") {
        ++own;
        std::vector<void*> p(18);
        for (int i = 0; i < 18; ++i)
            if (i != 4) p[i] = arg<void*>(given, i);
        const int rows = grid[0];
        submit([p, rows] { split_rows(p, rows); });
    } else if (name == "wait_for") {
        ++own;
        uint32_t* word = arg<uint32_t*>(given, 0);
        submit([word] { wait_for(word); });
    }
    return 0;
}
