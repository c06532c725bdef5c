// GPTQ's columns with AVX2 and FMA. Compiled with these flags, so called only where the processor has them (module.cpp).
#include "columns.inc.h"

const ndp::gptq::Functions ndp::gptq::avx2 = {quantize, polish};
