// FP4 codes as bfloat16, and codes of 4 bits as planes, without the GIL: checkpoint/values.py defines and uses them.
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

// Eight codes of four bits as four bytes: byte b has bit b of each. Four exchanges of bits that lie `by` apart.
uint32_t bytes_of_bits(uint32_t codes) {
    const auto exchange = [&](int by, uint32_t lower) {
        const uint32_t other = (codes ^ codes >> by) & lower;
        codes ^= other ^ other << by;
    };
    exchange(8, 0x0000ff00u);
    exchange(14, 0x0000ccccu);
    exchange(4, 0x00f000f0u);
    exchange(7, 0x00aa00aau);
    return codes;
}

// words [N, C / 8] in any strides: eight codes each, the first in the lowest bits; planes [4, N, C / 8], top bits first.
void planes_of_nibbles(nb::ndarray<const uint32_t, nb::ndim<2>, nb::device::cpu> words,
                       nb::ndarray<uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu> planes) {
    const size_t rows = words.shape(0), columns = words.shape(1);
    if (planes.shape(0) != 4 || planes.shape(1) != rows || planes.shape(2) != columns)
        throw std::invalid_argument("wanted words [N, C / 8] and planes [4, N, C / 8]");
    const uint32_t* word = words.data();
    const int64_t down = words.stride(0), right = words.stride(1);
    uint8_t* plane = planes.data();
    nb::gil_scoped_release release;
    constexpr size_t kRows = 64;  // of a transposed matrix: four lines of its words
    for (size_t first = 0; first < rows; first += kRows) {
        const size_t last = first + kRows < rows ? first + kRows : rows;
        for (size_t column = 0; column < columns; ++column)
            for (size_t row = first; row < last; ++row) {
                const uint32_t bits = bytes_of_bits(word[int64_t(row) * down + int64_t(column) * right]);
                uint8_t* to = plane + row * columns + column;
                for (int bit = 3; bit >= 0; --bit, to += rows * columns) *to = uint8_t(bits >> 8 * bit);
            }
    }
}

bool holds_nan_of_e4m3(nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> codes) {
    nb::gil_scoped_release release;
    uint8_t found = 0;
    for (size_t i = 0; i < codes.size(); ++i) found |= (codes.data()[i] & 0x7f) == 0x7f;
    return found;
}

}  // namespace

NB_MODULE(_values, m) {
    m.def("fp4_to_bfloat16", &fp4_to_bfloat16, nb::arg("codes"), nb::arg("scale"), nb::arg("values"));
    m.def("holds_nan_of_e4m3", &holds_nan_of_e4m3, nb::arg("codes"));
    m.def("planes_of_nibbles", &planes_of_nibbles, nb::arg("words"), nb::arg("planes"));
}
