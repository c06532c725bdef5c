// Codes of 4 bits as numbers of 16 and as planes, without the GIL: checkpoint/values.py defines and uses them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace nb = nanobind;

namespace {

template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The nearest bfloat16, ties to even.
uint16_t bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The nearest float16, ties to even; infinite from 65520 on.
uint16_t float16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (bits >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    if (bits < 0x38800000u) {  // less than 2^-14: beside 0.5 a float has steps of 2^-24, and rounds to them
        float steps;
        memcpy(&steps, &bits, 4);
        steps += 0.5f;
        memcpy(&bits, &steps, 4);
        return uint16_t(sign | (bits - 0x3f000000u));
    }
    return uint16_t(sign | (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13);
}

// Of a transposed matrix: four lines of its words.
constexpr size_t kRows = 64;

using Words = nb::ndarray<const uint32_t, nb::ndim<2>, nb::device::cpu>;

// words [N, C / 8] in any strides: eight codes each, the first in the lowest bits; levels [16]; scale, zero [N, groups];
// values [N, C] = (levels[code] - zero) * scale, rounded to bfloat16 or float16.
void values_of_nibbles(Words words, nb::ndarray<const float, nb::shape<16>, nb::c_contig, nb::device::cpu> levels,
                       Matrix<const float> scale, Matrix<const float> zero, Matrix<uint16_t> values, bool is_bfloat16) {
    const size_t rows = words.shape(0), columns = words.shape(1), groups = scale.shape(1);
    if (scale.shape(0) != rows || zero.shape(0) != rows || zero.shape(1) != groups || values.shape(0) != rows ||
        values.shape(1) != 8 * columns || !groups || columns % groups)
        throw std::invalid_argument("wanted words [N, C / 8], scale and zero [N, groups] of whole words, values [N, C]");
    const size_t group_words = columns / groups;
    const int64_t down = words.stride(0), right = words.stride(1);
    const uint32_t* word = words.data();
    uint16_t* value = values.data();
    nb::gil_scoped_release release;
    for (size_t first = 0; first < rows; first += kRows) {
        const size_t last = first + kRows < rows ? first + kRows : rows;
        for (size_t group = 0; group < groups; ++group) {
            uint16_t table[kRows][16];
            for (size_t row = first; row < last; ++row)
                for (int i = 0; i < 16; ++i) {
                    const size_t of = row * groups + group;
                    const float exact = (levels.data()[i] - zero.data()[of]) * scale.data()[of];
                    table[row - first][i] = is_bfloat16 ? bfloat16(exact) : float16(exact);
                }
            for (size_t column = group * group_words; column < (group + 1) * group_words; ++column)
                for (size_t row = first; row < last; ++row) {
                    uint32_t codes = word[int64_t(row) * down + int64_t(column) * right];
                    uint16_t* to = value + 8 * (row * columns + column);
                    for (int i = 0; i < 8; ++i, codes >>= 4) to[i] = table[row - first][codes & 15];
                }
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

// Of four planes, whose lines a first cache holds together even where rows and planes are powers of two apart.
constexpr size_t kPlaneRows = 32;

// words [N, C / 8] in any strides: eight codes each, the first in the lowest bits; planes [4, N, C / 8], top bits first.
void planes_of_nibbles(Words words,
                       nb::ndarray<uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu> planes) {
    const size_t rows = words.shape(0), columns = words.shape(1);
    if (planes.shape(0) != 4 || planes.shape(1) != rows || planes.shape(2) != columns)
        throw std::invalid_argument("wanted words [N, C / 8] and planes [4, N, C / 8]");
    const uint32_t* word = words.data();
    const int64_t down = words.stride(0), right = words.stride(1);
    uint8_t* plane = planes.data();
    nb::gil_scoped_release release;
    for (size_t first = 0; first < rows; first += kPlaneRows) {
        const size_t last = first + kPlaneRows < rows ? first + kPlaneRows : rows;
        for (size_t column = 0; column < columns; ++column)
            for (size_t row = first; row < last; ++row) {
                const uint32_t bits = bytes_of_bits(word[int64_t(row) * down + int64_t(column) * right]);
                uint8_t* to = plane + row * columns + column;
                for (int bit = 3; bit >= 0; --bit, to += rows * columns) *to = uint8_t(bits >> 8 * bit);
            }
    }
}

// stored [C, N / 8]: the codes of eight rows, in AWQ's order; words [N, C / 8 rounded up] of eight columns, behind C zeros.
void words_of_awq(Words stored, Matrix<uint32_t> words) {
    constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // where the k-th value lies: packed in the order 0 2 4 6 1 3 5 7
    const size_t columns = stored.shape(0), octets = stored.shape(1), width = words.shape(1);
    if (words.shape(0) != 8 * octets || width != (columns + 7) / 8)
        throw std::invalid_argument("wanted stored [C, N / 8] and words [N, C / 8]");
    const uint32_t* from = stored.data();
    const int64_t down = stored.stride(0), right = stored.stride(1);
    uint32_t* to = words.data();
    nb::gil_scoped_release release;
    for (size_t octet = 0; octet < octets; ++octet)
        for (size_t column = 0; column < width; ++column) {
            uint32_t eight[8] = {};
            for (size_t i = 0; i < 8 && 8 * column + i < columns; ++i)
                eight[i] = from[int64_t(8 * column + i) * down + int64_t(octet) * right];
            const auto exchange = [&](int at, int apart, uint32_t lower) {  // codes that lie `apart` words and codes apart
                const uint32_t other = (eight[at] >> 4 * apart ^ eight[at + apart]) & lower;
                eight[at + apart] ^= other;
                eight[at] ^= other << 4 * apart;
            };
            for (int at : {0, 1, 2, 3}) exchange(at, 4, 0x0000ffffu);
            for (int at : {0, 1, 4, 5}) exchange(at, 2, 0x00ff00ffu);
            for (int at : {0, 2, 4, 6}) exchange(at, 1, 0x0f0f0f0fu);
            for (int row = 0; row < 8; ++row) to[(8 * octet + row) * width + column] = eight[kOrder[row]];
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
    m.def("holds_nan_of_e4m3", &holds_nan_of_e4m3, nb::arg("codes"));
    m.def("planes_of_nibbles", &planes_of_nibbles, nb::arg("words"), nb::arg("planes"));
    m.def("words_of_awq", &words_of_awq, nb::arg("stored"), nb::arg("words"));
    m.def("values_of_nibbles", &values_of_nibbles, nb::arg("words"), nb::arg("levels"), nb::arg("scale"),
          nb::arg("zero"), nb::arg("values"), nb::arg("is_bfloat16"));
}
