// Which paths this processor can run. Knows CPUID and the AMX permission of the kernel, no kernel code.
#pragma once

#include <string>
#include <vector>

#include "kernel_table.h"

namespace ndp {

// Names of the paths that run here, best first; always ends with "portable".
std::vector<std::string> supported_isas();

// The table of a supported path, or null.
const KernelTable* find_kernels(const std::string& isa);

}  // namespace ndp
