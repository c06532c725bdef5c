// FP4 codes as bfloat16, without the GIL: checkpoint/values.py has the definition in numpy and is the user.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace nb = nanobind;

namespace {

template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr float kFp4[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

// The nearest bfloat16, ties to even.
uint16_t bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// codes [N, C / 2], the low nibble first; scale [N, blocks]; values [N, C].
void fp4_to_bfloat16(Matrix<const uint8_t> codes, Matrix<const float> scale, Matrix<uint16_t> values) {
    const size_t rows = codes.shape(0), bytes = codes.shape(1), blocks = scale.shape(1);
    if (scale.shape(0) != rows || values.shape(0) != rows || values.shape(1) != 2 * bytes || !blocks || bytes % blocks)
        throw std::invalid_argument("wanted codes [N, C / 2], scale [N, blocks] of whole bytes, and values [N, C]");
    const size_t block_bytes = bytes / blocks;
    const uint8_t* code = codes.data();
    const float* factor = scale.data();
    uint16_t* value = values.data();
    nb::gil_scoped_release release;
    for (size_t block = 0; block < rows * blocks; ++block, code += block_bytes, value += 2 * block_bytes) {
        uint16_t table[16];
        for (int i = 0; i < 16; ++i) table[i] = bfloat16(kFp4[i] * factor[block]);
        for (size_t i = 0; i < block_bytes; ++i) {
            value[2 * i] = table[code[i] & 15];
            value[2 * i + 1] = table[code[i] >> 4];
        }
    }
}

}  // namespace

NB_MODULE(_values, m) {
    m.def("fp4_to_bfloat16", &fp4_to_bfloat16, nb::arg("codes"), nb::arg("scale"), nb::arg("values"));
}
