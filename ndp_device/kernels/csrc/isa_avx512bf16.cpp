// AVX-512 with VNNI and BF16: the VNNI path, but rows meet bfloat16 weights in vdpbf16ps, twice as many products at once.
// A row of floats becomes two of bfloat16, the nearest one and what is left: 16 bits of mantissa. What is left of rows
// that were bfloat16, as an engine of that type sends them, is 0 and is not multiplied; hidden units of such a row are
// rounded to bfloat16, as vLLM's own kernel does: 99.7 % of the outputs are then its own to the bit, else 58 %.
#include <immintrin.h>

#include "vectors.inc.h"

#define NDP_UNROLL(n) _Pragma(NDP_TEXT(GCC unroll n))
#define NDP_TEXT(words) #words

namespace {

constexpr int kCols = 32;       // of a vector
constexpr int kRowsAtOnce = 4;  // of weights, and of activations: 24 of 32 registers hold sums
constexpr int kMostTokens = 6;
constexpr int kRange = 256;           // columns of weights that stay in the first cache for all rows of a pass
constexpr int kPassBytes = 512 << 10;  // of activations, which stay in the second cache
constexpr int kPassTokens = 5 * kMostTokens;

typedef __m512 Sums[kRowsAtOnce][kMostTokens];

NDP_INLINE __m512bh bfloats(const uint16_t* p) { return load<__m512bh>(p); }

NDP_INLINE __m512bh some_bfloats(__mmask32 which, const uint16_t* p) {
    return (__m512bh)_mm512_maskz_loadu_epi16(which, p);
}

// to: [cols] bfloat16 and after them [cols] of what these leave, or zeros. An infinity or NaN leaves nothing.
bool split_row(const float* x, int cols, bool rest, float* to) {
    uint16_t* high = reinterpret_cast<uint16_t*>(to);
    bool any = false;
    for (int i = 0; i < cols; i += 16) {
        const __mmask16 which = cols - i < 16 ? (1u << (cols - i)) - 1 : 0xffff;
        const __m512 v = _mm512_maskz_loadu_ps(which, x + i);
        const __m256i near = (__m256i)_mm512_cvtneps_pbh(v);
        const __m512 left = _mm512_sub_ps(v, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(near), 16)));
        const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(left), _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ);
        const __m256i low = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(rest ? finite : 0, left));
        any |= _mm256_test_epi16_mask(low, _mm256_set1_epi16(0x7fff)) != 0;
        _mm256_mask_storeu_epi16(high + i, which, near);
        _mm256_mask_storeu_epi16(high + cols + i, which, low);
    }
    return any;
}

// Whether the second halves of these split rows hold anything but zeros.
bool leaves_any(const uint16_t* x, ptrdiff_t x_stride, int tokens, int cols) {
    for (int t = 0; t < tokens; ++t) {
        const uint16_t* low = x + t * x_stride + x_stride / 2;
        for (int i = 0; i < cols; i += kCols) {
            const __mmask32 which = cols - i < kCols ? (1u << (cols - i)) - 1 : ~0u;
            const __m512i v = _mm512_maskz_loadu_epi16(which, low + i);
            if (_mm512_test_epi16_mask(v, _mm512_set1_epi16(0x7fff))) return true;
        }
    }
    return false;
}

// Adds columns `from` to `to` of four rows times TOKENS rows of activations. `ahead`: what the four read next.
template <int TOKENS, int PARTS>
void add_products(const uint16_t* const* rows, const uint16_t* const* ahead, int from, int to, const uint16_t* x,
                  ptrdiff_t x_stride, Sums& sums) {
    __m512 sum[kRowsAtOnce][TOKENS];
    NDP_UNROLL(4)
    for (int r = 0; r < kRowsAtOnce; ++r) {
        NDP_UNROLL(6)
        for (int t = 0; t < TOKENS; ++t) sum[r][t] = sums[r][t];
    }
    int col = from;
    for (; col + kCols <= to; col += kCols) {
        __m512bh w[kRowsAtOnce];
        NDP_UNROLL(4)
        for (int r = 0; r < kRowsAtOnce; ++r) {
            if (ahead) __builtin_prefetch(ahead[r] + col - from);
            w[r] = bfloats(rows[r] + col);
        }
        NDP_UNROLL(2)
        for (int part = 0; part < PARTS; ++part) {  // outside: a sum must not wait for itself
            NDP_UNROLL(6)
            for (int t = 0; t < TOKENS; ++t) {
                const __m512bh v = bfloats(x + t * x_stride + part * (x_stride / 2) + col);
                NDP_UNROLL(4)
                for (int r = 0; r < kRowsAtOnce; ++r) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], w[r], v);
            }
        }
    }
    if (col < to) {
        const __mmask32 which = (1u << (to - col)) - 1;
        NDP_UNROLL(2)
        for (int part = 0; part < PARTS; ++part) {
            NDP_UNROLL(6)
            for (int t = 0; t < TOKENS; ++t) {
                const __m512bh v = some_bfloats(which, x + t * x_stride + part * (x_stride / 2) + col);
                NDP_UNROLL(4)
                for (int r = 0; r < kRowsAtOnce; ++r)
                    sum[r][t] = _mm512_dpbf16_ps(sum[r][t], some_bfloats(which, rows[r] + col), v);
            }
        }
    }
    NDP_UNROLL(4)
    for (int r = 0; r < kRowsAtOnce; ++r) {
        NDP_UNROLL(6)
        for (int t = 0; t < TOKENS; ++t) sums[r][t] = sum[r][t];
    }
}

// The same for 1 to TOKENS rows of activations.
template <int TOKENS, int PARTS>
void add_some(const uint16_t* const* rows, const uint16_t* const* ahead, int from, int to, const uint16_t* x,
              ptrdiff_t x_stride, int tokens, Sums& sums) {
    if (tokens == TOKENS) return add_products<TOKENS, PARTS>(rows, ahead, from, to, x, x_stride, sums);
    if constexpr (TOKENS > 1) add_some<TOKENS - 1, PARTS>(rows, ahead, from, to, x, x_stride, tokens, sums);
}

// Four rows of weights times the rows of one pass. `next`: the rows after them. y[t * y_stride + row]
template <int PARTS>
void four_rows(const uint16_t* const* rows, const uint16_t* const* next, int cols, const uint16_t* x,
               ptrdiff_t x_stride, int tokens, float* y, ptrdiff_t y_stride) {
    constexpr int kMostBlocks = kPassTokens / kMostTokens;
    const int blocks = (tokens + kMostTokens - 1) / kMostTokens, each = (tokens + blocks - 1) / blocks;
    Sums sums[kMostBlocks] = {};
    for (int from = 0; from < cols; from += kRange) {
        const int to = from + kRange < cols ? from + kRange : cols;
        const uint16_t* ahead[kRowsAtOnce];
        for (int r = 0; r < kRowsAtOnce; ++r) ahead[r] = to < cols ? rows[r] + to : next[r];
        for (int b = 0; b < blocks; ++b) {
            const int count = tokens - b * each < each ? tokens - b * each : each;
            add_some<kMostTokens, PARTS>(rows, b ? nullptr : ahead, from, to, x + b * each * x_stride, x_stride, count,
                                         sums[b]);
        }
    }
    for (int t = 0; t < tokens; ++t)
        for (int r = 0; r < kRowsAtOnce; ++r) y[t * y_stride + r] = _mm512_reduce_add_ps(sums[t / each][r][t % each]);
}

void multiply_bfloats(const FullView& w, const uint16_t* x, ptrdiff_t x_stride, int tokens, int first, int last,
                      float* y, ptrdiff_t y_stride) {
    const bool whole = leaves_any(x, x_stride, tokens, w.cols);
    const uint16_t* rows[kUnitRows + kRowsAtOnce];
    for (int unit = first; unit < last; ++unit) {
        float* to = y + (unit - first) * kUnitRows;
        bool is_past[kUnitRows];
        for (int r = 0; r < kUnitRows; ++r) {  // past the end: any row will do, its result is cleared below
            const void* matrix = w.second && r >= kBlockRows ? w.second : w.first;
            const int row = w.second ? unit * kBlockRows + r % kBlockRows : unit * kUnitRows + r;
            is_past[r] = row >= w.num_rows;
            rows[r] = static_cast<const uint16_t*>(matrix) + static_cast<ptrdiff_t>(is_past[r] ? w.num_rows - 1 : row) * w.cols;
        }
        for (int r = 0; r < kRowsAtOnce; ++r) rows[kUnitRows + r] = rows[kUnitRows - kRowsAtOnce + r];
        for (int r = 0; r < kUnitRows; r += kRowsAtOnce) {
            auto* const four = whole ? four_rows<2> : four_rows<1>;
            four(rows + r, rows + r + kRowsAtOnce, w.cols, x, x_stride, tokens, to + r, y_stride);
        }
        for (int r = 0; r < kUnitRows; ++r)
            if (is_past[r])
                for (int t = 0; t < tokens; ++t) to[t * y_stride + r] = 0.0f;
    }
}

void multiply_full(const FullView& w, const float* x, ptrdiff_t x_stride, int tokens, int first, int last, float* y,
                   ptrdiff_t y_stride) {
    if (w.dtype != DType::bfloat16)
        return ndp::avx512vnni_kernels().multiply_full(w, x, x_stride, tokens, first, last, y, y_stride);
    const int room = kPassBytes / (4 * w.cols) / kMostTokens * kMostTokens;
    const int most = room < kMostTokens ? kMostTokens : room < kPassTokens ? room : kPassTokens;
    const int passes = (tokens + most - 1) / most, each = (tokens + passes - 1) / passes;
    for (int t = 0; t < tokens; t += each) {
        const int count = tokens - t < each ? tokens - t : each;
        multiply_bfloats(w, reinterpret_cast<const uint16_t*>(x + t * x_stride), 2 * x_stride, count, first, last,
                         y + t * y_stride, y_stride);
    }
}

}  // namespace

const ndp::KernelTable& ndp::avx512bf16_kernels() {
    static const KernelTable table = [] {
        KernelTable own = avx512vnni_kernels();
        own.name = "avx512bf16";
        own.multiply_full = multiply_full;
        own.split_row = split_row;
        return own;
    }();
    return table;
}
