// Lloyd's steps over the tracks of a nested container, one group of a row at a time: data_free.py says what they are.
// Included once per instruction set; everything here is in an anonymous namespace and uses no inline function of the
// standard library, so that no code with these instructions is shared with another file.
//
// Two facts make it fast. The cost of a code is linear in the weight once w**2 is left out, so the best codes follow
// from the lower envelope of at most 16 lines: a code is the number of thresholds below the weight. And codes that rise
// with the weight give scales >= 0, which give lines of rising slope, which give codes that rise again: always so.
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "lloyd.h"

namespace {

using namespace ndp::data_free;

typedef float Four __attribute__((vector_size(16)));  // one value per width
typedef double FourDoubles __attribute__((vector_size(32)));

constexpr int kRounds = 6;      // data_free.py has the reasons for both
constexpr float kClip = 0.9f;
constexpr float kLargest = 3.402823466e38f;
constexpr float kNever = __builtin_inff();

NDP_INLINE void load_group(const Job& job, size_t start, size_t count, float* group) {
    const char* weights = static_cast<const char*>(job.weights);
    if (job.dtype == DType::kFloat32) {
        memcpy(group, weights + 4 * start, 4 * count);
        return;
    }
    const char* first = weights + 2 * start;
    const bool bfloat = job.dtype == DType::kBfloat16;
    for (size_t i = 0; i < count; ++i) {
        uint16_t value;
        memcpy(&value, first + 2 * i, 2);
        group[i] = bfloat ? bits_to_float(uint32_t(value) << 16) : half_to_float(value);
    }
}

NDP_INLINE float sum(const Floats& v) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

NDP_INLINE Four sums(const Floats v[4]) {
#if defined(__AVX2__)
    const __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    return Four(_mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
#else
    return Four{sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3])};
#endif
}

NDP_INLINE bool all(const Ints& truths) {
#if defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_castsi256_ps(__m256i(truths))) == 0xff;
#else
    int32_t every = -1;
    for (size_t lane = 0; lane < kLanes; ++lane) every &= truths[lane];
    return every;
#endif
}

// table[index[lane]] for 8 places.
NDP_INLINE Floats look_up(const float* table, const Ints& index) {
#if defined(__AVX2__)
    return Floats(_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), __m256i(index)));
#else
    Floats found;
    for (size_t lane = 0; lane < kLanes; ++lane) found[lane] = table[index[lane]];
    return found;
#endif
}

// What one group is, whatever its codes: weights less their middle; the padding lies below every threshold.
struct Centred {
    size_t padded;
    double count, sum;
    float middle, span;
};

NDP_INLINE Centred centre(float* group, size_t count) {
    Centred c;
    c.padded = (count + kLanes - 1) / kLanes * kLanes;
    c.count = double(count);
    for (size_t i = count; i < c.padded; ++i) group[i] = group[0];
    Floats low = load(group), high = low;
    for (size_t i = kLanes; i < c.padded; i += kLanes) {
        const Floats w = load(group + i);
        low = w < low ? w : low;
        high = w > high ? w : high;
    }
    float lowest = low[0], highest = high[0];
    for (size_t lane = 1; lane < kLanes; ++lane) {
        lowest = low[lane] < lowest ? low[lane] : lowest;
        highest = high[lane] > highest ? high[lane] : highest;
    }
    c.middle = (highest + lowest) / 2;
    c.span = (highest - lowest) * kClip;
    c.sum = 0;
    Floats total = {};
    for (size_t i = 0; i < c.padded; i += kLanes) {
        Floats w = load(group + i) - c.middle;
        for (size_t lane = count - i; lane < kLanes && i + kLanes > count; ++lane) w[lane] = 0;
        store(group + i, w);
        total += w;
    }
    c.sum = sum(total);
    for (size_t i = count; i < c.padded; ++i) group[i] = -kLargest;
    return c;
}

// The code of a weight is the number of thresholds below it. Rising, so a search finds it bit by bit.
template <int BITS>
struct Thresholds {
    static constexpr int kCodes = 1 << BITS;
    static constexpr size_t kPadded = (kCodes + kLanes - 1) / kLanes * kLanes;
    float at[kPadded + 1];  // kCodes - 1 of them are used
};

// Sums over a group for every width, 0 beyond BITS: of the codes, of their squares, and of code times weight.
struct Sums {
    Four code, square, product;
};

// FIRST: the first bit whose width has a track. The sums of narrower ones stay 0, and their costs are.
template <int BITS, int FIRST>
NDP_INLINE Sums assign(const float* group, size_t padded, const Thresholds<BITS>& thresholds, uint8_t* codes) {
    float table[BITS][kLanes] = {};  // what decides on bit b, by the bits before it
    for (int bit = 0; bit < BITS; ++bit)
        for (int prefix = 0; prefix < 1 << bit; ++prefix)
            table[bit][prefix] = thresholds.at[((2 * prefix + 1) << (BITS - 1 - bit)) - 1];
    Floats code_sum[kMaxBits] = {}, square_sum[kMaxBits] = {}, product_sum[kMaxBits] = {};
    for (size_t i = 0; i < padded; i += kLanes) {
        const Floats w = load(group + i);
        Ints code = {};
#pragma GCC unroll 4
        for (int bit = 0; bit < BITS; ++bit) {
            code += code;
            code -= bit ? w > look_up(table[bit], code >> 1) : w > table[0][0];
            if (bit < FIRST) continue;
            const Floats prefix = __builtin_convertvector(code, Floats);  // the whole code of width bit + 1
            code_sum[bit] += prefix;
            square_sum[bit] += bit ? prefix * prefix : prefix;
            product_sum[bit] += prefix * w;
        }
        if (codes)
            for (size_t lane = 0; lane < kLanes; ++lane) codes[i + lane] = uint8_t(code[lane]);
    }
    return {sums(code_sum), sums(square_sum), sums(product_sum)};
}

// Scale and offset of every width as float16 holds them.
struct Fit {
    float scale[kMaxBits], offset[kMaxBits];
};

NDP_INLINE Fit fit(const Sums& sums, const Centred& c) {
    const FourDoubles code = __builtin_convertvector(sums.code, FourDoubles);
    const FourDoubles mean_code = code / c.count, none = code * 0;
    const FourDoubles variance = __builtin_convertvector(sums.square, FourDoubles) - code * mean_code;
    FourDoubles scale = __builtin_convertvector(sums.product, FourDoubles) - mean_code * c.sum;
    scale /= variance > none ? variance : none + 1;
    scale = (variance <= none) | (scale < none) ? 0 * scale : scale;  // below zero by rounding only; NaN stays
    const Four s = __builtin_convertvector(scale, Four);
    const Four o = __builtin_convertvector(c.middle + (c.sum / c.count - scale * mean_code), Four);
    const Floats rounded = round_to_half(Floats{s[0], s[1], s[2], s[3], o[0], o[1], o[2], o[3]});
    Fit fit;
    memcpy(&fit, &rounded, sizeof fit);
    return fit;
}

template <int BITS>
NDP_INLINE Thresholds<BITS> uniform(float span) {
    Thresholds<BITS> thresholds;
    constexpr int steps = (1 << BITS) - 1;
    for (int t = 0; t < steps; ++t) thresholds.at[t] = ((t + 0.5f) / steps - 0.5f) * span;
    return thresholds;
}

// The thresholds between the lines that are the lowest somewhere: those of the others coincide.
template <int BITS>
__attribute__((noinline)) Thresholds<BITS> hull(const float* slope, const float* constant) {
    constexpr int num_codes = 1 << BITS;
    int best[num_codes];    // the codes of the envelope, from the left
    float from[num_codes];  // where each becomes the best
    int num_best = 1;
    best[0] = 0;
    from[0] = -kLargest;
    for (int code = 1; code < num_codes; ++code) {
        float start;
        for (;;) {
            const int other = best[num_best - 1];
            const float rise = slope[code] - slope[other], excess = constant[code] - constant[other];
            start = rise > 0 ? excess / rise : excess < 0 ? -kLargest : kNever;
            if (num_best == 1 || !(start <= from[num_best - 1])) break;
            --num_best;
        }
        if (start == kNever) continue;
        best[num_best] = code;
        from[num_best++] = start;
    }
    Thresholds<BITS> thresholds;
    int next = 0;
    for (int i = 1; i < num_best; ++i)
        while (next < best[i]) thresholds.at[next++] = from[i];
    while (next < num_codes - 1) thresholds.at[next++] = kNever;
    return thresholds;
}

// What each width makes of a code: its first bits.
template <int BITS>
struct Prefixes {
    float of[BITS][Thresholds<BITS>::kPadded];
    constexpr Prefixes() : of{} {
        for (int track = 0; track < BITS; ++track)
            for (size_t code = 0; code < Thresholds<BITS>::kPadded; ++code)
                of[track][code] = float(code >> (BITS - 1 - track));
    }
};

// The lower envelope of the lines sum_k cost_k (level_k**2 - 2 level_k w), one per code, slopes falling.
template <int BITS>
NDP_INLINE Thresholds<BITS> envelope(const Job& job, const Fit& fit, float middle) {
    static constexpr Prefixes<BITS> prefixes;
    constexpr size_t padded = Thresholds<BITS>::kPadded;
    float slope[padded + 1], constant[padded + 1];
    for (size_t code = 0; code < padded; code += kLanes) {
        Floats slopes = {}, constants = {};
        for (int track = 0; track < BITS; ++track) {
            const float offset = fit.offset[track] - middle, cost = job.cost[track];
            const Floats level = fit.scale[track] * load(prefixes.of[track] + code) + offset;
            const Floats weighted = cost * level;
            slopes += 2 * weighted;
            constants += weighted * level;
        }
        store(slope + code, slopes);
        store(constant + code, constants);
    }
    slope[padded] = constant[padded] = kLargest;
    // Nearly always every code is the best somewhere, and neighbours meet in rising order.
    Thresholds<BITS> thresholds;
    Ints rising = {};
    rising -= 1;
    for (size_t t = 0; t < padded; t += kLanes) {
        const Floats rise = load(slope + t + 1) - load(slope + t);
        store(thresholds.at + t, (load(constant + t + 1) - load(constant + t)) / rise);
        rising &= rise > 0;
    }
    thresholds.at[padded - 1] = kLargest;
    thresholds.at[padded] = kNever;
    for (size_t t = 0; t < padded; t += kLanes) rising &= load(thresholds.at + t + 1) > load(thresholds.at + t);
    return all(rising) ? thresholds : hull<BITS>(slope, constant);
}

template <int BITS, int FIRST>
NDP_INLINE Fit fit_group(const Job& job, float* group, size_t count, uint8_t* codes) {
    const Centred c = centre(group, count);
    Thresholds<BITS> thresholds = uniform<BITS>(c.span);
    Fit before;
    for (int round = 0; round < kRounds; ++round) {
        const Fit now = fit(assign<BITS, FIRST>(group, c.padded, thresholds, nullptr), c);
        if (round > 0 && memcmp(&now, &before, sizeof now) == 0) break;  // every later round would give the same
        thresholds = envelope<BITS>(job, now, c.middle);
        before = now;
    }
    return fit(assign<BITS, FIRST>(group, c.padded, thresholds, codes), c);
}

// Bit `bit` of eight codes, the first code lowest.
NDP_INLINE uint8_t plane_byte(const uint8_t* codes, int bit) {
    uint64_t eight = 0;
    for (int i = 0; i < 8; ++i) eight |= uint64_t(codes[i]) << (8 * i);
    return uint8_t(((eight >> bit & 0x0101010101010101u) * 0x0102040810204080u) >> 56);
}

template <int BITS, int FIRST>
void fit_rows(const Job& job, size_t first, size_t last, const Room& room) {
    const size_t num_groups = (job.cols + job.group_size - 1) / job.group_size;
    for (size_t row = first; row < last; ++row) {
        for (size_t g = 0; g < num_groups; ++g) {
            const size_t start = g * job.group_size, left = job.cols - start;
            const size_t count = left < job.group_size ? left : job.group_size;
            load_group(job, row * job.cols + start, count, room.group);
            // codes of the padding are overwritten by the next group or lie beyond the row
            const Fit fit = fit_group<BITS, FIRST>(job, room.group, count, room.codes + start);
            for (int width = 0; width < BITS; ++width) {
                if (job.track[width] < 0) continue;
                const size_t at = (size_t(job.track[width]) * job.rows + row) * num_groups + g;
                job.scale[at] = half_bits(fit.scale[width]);
                job.offset[at] = half_bits(fit.offset[width]);
            }
        }
        const size_t row_bytes = job.cols / 8;
        for (int plane = 0; plane < BITS; ++plane) {
            uint8_t* bytes = job.planes + (size_t(plane) * job.rows + row) * row_bytes;
            for (size_t i = 0; i < row_bytes; ++i) bytes[i] = plane_byte(room.codes + 8 * i, BITS - 1 - plane);
        }
    }
}

void fit_rows_of(const Job& job, size_t first, size_t last, const Room& room) {
    bool has_narrow = false;
    for (int width = 0; width + 1 < job.bits; ++width) has_narrow |= job.track[width] >= 0;
    switch (job.bits) {
        case 1: return fit_rows<1, 0>(job, first, last, room);
        case 2: return has_narrow ? fit_rows<2, 0>(job, first, last, room) : fit_rows<2, 1>(job, first, last, room);
        case 3: return has_narrow ? fit_rows<3, 0>(job, first, last, room) : fit_rows<3, 2>(job, first, last, room);
        default: return has_narrow ? fit_rows<4, 0>(job, first, last, room) : fit_rows<4, 3>(job, first, last, room);
    }
}

// scale * code + offset, rounded after each of the two: numpy's values to the bit (kernels/reference.py).
void dequantize(const Quantized& matrix) {
    const Ints lane_bit = {1, 2, 4, 8, 16, 32, 64, 128};
    const size_t row_bytes = matrix.cols / 8, group_bytes = matrix.group_size / 8;
    const size_t num_groups = (row_bytes + group_bytes - 1) / group_bytes, plane_bytes = matrix.rows * row_bytes;
    for (size_t row = 0; row < matrix.rows; ++row) {
        const uint8_t* planes = matrix.planes + row * row_bytes;
        float* values = matrix.values + row * matrix.cols;
        for (size_t group = 0; group < num_groups; ++group) {
            const float scale = half_to_float(matrix.scale[row * num_groups + group]);
            const float offset = half_to_float(matrix.offset[row * num_groups + group]);
            const size_t first = group * group_bytes, left = row_bytes - first;
            const size_t last = first + (left < group_bytes ? left : group_bytes);
            for (size_t byte = first; byte < last; ++byte) {
                Ints code = {};
                for (int plane = 0; plane < matrix.bits; ++plane) {
                    const Ints bits = (code & 0) + int32_t(planes[plane * plane_bytes + byte]);
                    code = code + code - ((bits & lane_bit) != 0);
                }
                store(values + 8 * byte, scale * __builtin_convertvector(code, Floats) + offset);
            }
        }
    }
}

}  // namespace
