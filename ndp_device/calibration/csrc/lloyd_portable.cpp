// The fit for any processor.
#include "lloyd.inc.h"

void ndp::data_free::fit_rows_portable(const Job& job, size_t first, size_t last, const Room& room) {
    fit_rows_of(job, first, last, room);
}
