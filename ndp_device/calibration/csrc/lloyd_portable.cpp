// The fit for any processor.
#include "lloyd.inc.h"

const ndp::data_free::Functions ndp::data_free::portable = {fit_rows_of, dequantize};
