// The fit with AVX-512. Compiled with these flags, so called only where the processor has them (module.cpp).
#include "lloyd.inc.h"

const ndp::data_free::Functions ndp::data_free::avx512 = {fit_rows_of, dequantize};
