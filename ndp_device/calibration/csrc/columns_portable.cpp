// GPTQ's columns for any processor.
#include "columns.inc.h"

const ndp::gptq::Functions ndp::gptq::portable = {quantize, polish};
