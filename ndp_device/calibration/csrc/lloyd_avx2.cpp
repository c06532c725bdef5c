// The fit with AVX2. Compiled with that flag, so called only where the processor has it (module.cpp).
#include "lloyd.inc.h"

void ndp::data_free::fit_rows_avx2(const Job& job, size_t first, size_t last, const Room& room) {
    fit_rows_of(job, first, last, room);
}
