#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ndp {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512vnni() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

bool has_avx512bf16() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kBfloat16 = 1u << 5;
    return has_avx512vnni() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kBfloat16) != 0;
}

// AMX needs the processor (tile, int8 and bfloat16), the operating system's state saving, and this process's permission.
bool has_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!has_avx512vnni() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned kBfloat16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBfloat16 | kTile | kInt8;
    if ((d & kAll) != kAll) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

struct Path {
    const char* name;
    const KernelTable& (*kernels)();
    bool (*runs_here)();
};

bool always() { return true; }

constexpr Path kPaths[] = {
#if defined(__x86_64__)
    {"amx", amx_kernels, has_amx},
    {"avx512bf16", avx512bf16_kernels, has_avx512bf16},
    {"avx512vnni", avx512vnni_kernels, has_avx512vnni},
    {"avx2", avx2_kernels, has_avx2},
#endif
    {"portable", portable_kernels, always},
};

}  // namespace

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const Path& path : kPaths)
        if (path.runs_here()) names.emplace_back(path.name);
    return names;
}

const KernelTable* find_kernels(const std::string& isa) {
    for (const Path& path : kPaths)
        if (isa == path.name && path.runs_here()) return &path.kernels();
    return nullptr;
}

}  // namespace ndp
