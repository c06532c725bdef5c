// The column loop with AVX-512, sixteen rows at a time. Compiled with these flags: see columns_avx2.cpp.
#define NDP_LANES 16
#include "columns.inc.h"

const ndp::gptq::Functions ndp::gptq::avx512 = {quantize, polish};
