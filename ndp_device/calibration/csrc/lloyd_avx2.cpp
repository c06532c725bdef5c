// The fit with AVX2. Compiled with that flag, so called only where the processor has it (module.cpp).
#include "lloyd.inc.h"

const ndp::data_free::Functions ndp::data_free::avx2 = {fit_rows_of, dequantize};
