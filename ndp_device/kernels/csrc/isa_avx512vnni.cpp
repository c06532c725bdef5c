// AVX-512 with VNNI. Compiled with those flags, so reached only through its table (see cpu.cpp).
#include "avx512vnni.inc.h"
#include "rows64.inc.h"

namespace {

template <class Code, int LIMBS>
void multiply_width(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride) {
    multiply_in_registers<Code, LIMBS>(w, a, first, last, y, stride);
}

constexpr KernelTable kTable = make_table("avx512vnni");

}  // namespace

const ndp::KernelTable& ndp::avx512vnni_kernels() { return kTable; }
