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
typedef float Eight __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));
typedef uint32_t EightUInts __attribute__((vector_size(32)));
typedef double FourDoubles __attribute__((vector_size(32)));

constexpr int kRounds = 6;      // data_free.py has the reasons for both
constexpr float kClip = 0.9f;
constexpr float kLargest = 3.402823466e38f;
constexpr float kNever = __builtin_inff();

NDP_INLINE void load_group(const Job& job, size_t start, size_t count, float* group) {
    typedef uint16_t Any __attribute__((aligned(1), may_alias));
    typedef uint32_t Bits __attribute__((may_alias));
    const char* weights = static_cast<const char*>(job.weights);
    if (job.dtype == DType::kFloat32) {
        memcpy(group, weights + 4 * start, 4 * count);
        return;
    }
    const Any* from = reinterpret_cast<const Any*>(weights + 2 * start);
    if (job.dtype == DType::kBfloat16) {
        Bits* to = reinterpret_cast<Bits*>(group);
        for (size_t i = 0; i < count; ++i) to[i] = uint32_t(from[i]) << 16;
    } else {
        for (size_t i = 0; i < count; ++i) group[i] = half_to_float(from[i]);
    }
}

NDP_INLINE Eight half_of(const Floats& v, size_t half) {
    Eight part;
    memcpy(&part, reinterpret_cast<const char*>(&v) + 32 * half, sizeof part);
    return part;
}

NDP_INLINE float sum(const Eight& v) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// What is compared at once: GCC compares vectors that are wider than the processor's lane by lane.
#if defined(__AVX512F__)

typedef Floats Part;
typedef Ints PartInts;
typedef __mmask16 Truths;
NDP_INLINE Truths above(const Part& a, const Part& b) {
    return _mm512_cmp_ps_mask(__m512(a), __m512(b), _CMP_GT_OQ);
}
NDP_INLINE uint32_t bits_of(Truths truths) { return truths; }
NDP_INLINE uint32_t bits_above(const Floats& a, const Floats& b) { return above(a, b); }
NDP_INLINE void add_where(Truths where, Part& total, const Part& more) {
    total = Part(_mm512_mask_add_ps(__m512(total), where, __m512(total), __m512(more)));
}
NDP_INLINE void append(PartInts& code, Truths bit) {
    code += code;
    code = PartInts(_mm512_mask_add_epi32(__m512i(code), bit, __m512i(code), _mm512_set1_epi32(1)));
}
// table[index[lane]], index 0 to 15.
NDP_INLINE Part look_up(const Part& table, const PartInts& index) {
    return __builtin_shuffle(table, index);  // the intrinsic warns of a value that GCC itself leaves open
}
NDP_INLINE Part picked(const Floats& table, const PartInts& index) { return look_up(table, index); }
NDP_INLINE Eight to_half_and_back(const Eight& values) {
    return Eight(_mm256_cvtph_ps(_mm256_cvtps_ph(__m256(values), _MM_FROUND_TO_NEAREST_INT)));
}

#else

typedef Eight Part;
typedef EightInts PartInts;
typedef EightInts Truths;
NDP_INLINE Truths above(const Part& a, const Part& b) { return a > b; }
NDP_INLINE uint32_t bits_of(const Truths& truths) {
#if defined(__AVX2__)
    return uint32_t(_mm256_movemask_ps(__m256(truths)));
#else
    uint32_t bits = 0;
    for (size_t lane = 0; lane < 8; ++lane) bits |= uint32_t(truths[lane] & 1) << lane;
    return bits;
#endif
}
NDP_INLINE uint32_t bits_above(const Floats& a, const Floats& b) {
    return bits_of(above(half_of(a, 0), half_of(b, 0))) | bits_of(above(half_of(a, 1), half_of(b, 1))) << 8;
}
NDP_INLINE void add_where(const Truths& where, Part& total, const Part& more) { total += Part(PartInts(more) & where); }
NDP_INLINE void append(PartInts& code, const Truths& bit) {
    code += code;
    code -= bit;
}
// table[index[lane]], index 0 to 7.
NDP_INLINE Part look_up(const Part& table, const PartInts& index) {
#if defined(__AVX2__)
    return Part(_mm256_permutevar8x32_ps(__m256(table), __m256i(index)));
#else
    Part found;
    for (size_t lane = 0; lane < 8; ++lane) found[lane] = table[index[lane]];
    return found;
#endif
}
// The same with index 0 to 15.
NDP_INLINE Part picked(const Floats& table, const PartInts& index) {
    float all[kLanes];
    store(all, table);
    Part found;
    for (size_t lane = 0; lane < 8; ++lane) found[lane] = all[index[lane]];
    return found;
}
NDP_INLINE Eight to_half_and_back(const Eight& values) {
    return round_all_to_half<Eight, EightInts, EightUInts>(values);
}

#endif

typedef Part AnyPart __attribute__((aligned(4), may_alias));
constexpr size_t kPartLanes = sizeof(Part) / sizeof(float), kParts = kLanes / kPartLanes;

NDP_INLINE Part load_part(const float* p) { return *reinterpret_cast<const AnyPart*>(p); }

// In one order on every processor: that of the bytes.
NDP_INLINE Four sums(const Part all[4][kParts]) {
    Eight v[4];
    for (int i = 0; i < 4; ++i) {
        Floats whole;
        memcpy(&whole, all[i], sizeof whole);
        v[i] = half_of(whole, 0) + half_of(whole, 1);
    }
#if defined(__AVX2__)
    const __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    return Four(_mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
#else
    return Four{sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3])};
#endif
}

NDP_INLINE bool every(uint32_t bits, int count) {
    const uint32_t wanted = (1u << count) - 1;
    return (bits & wanted) == wanted;
}

// Each lane's neighbour behind it.
NDP_INLINE Floats following(const Floats& v) {
#if defined(__AVX512F__)
    return look_up(v, Ints{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 15});
#else
    float lanes[kLanes + 1];
    store(lanes, v);
    lanes[kLanes] = lanes[kLanes - 1];
    return load(lanes + 1);
#endif
}

// The least value of `low`, the largest of `high`.
NDP_INLINE void range_of(const Part& low, const Part& high, float* lowest, float* highest) {
    Four least[kPartLanes / 4], largest[kPartLanes / 4];
    memcpy(least, &low, sizeof least);
    memcpy(largest, &high, sizeof largest);
    for (size_t i = 1; i < kPartLanes / 4; ++i) {
        least[0] = least[i] < least[0] ? least[i] : least[0];
        largest[0] = largest[i] > largest[0] ? largest[i] : largest[0];
    }
    *lowest = least[0][0];
    *highest = largest[0][0];
    for (int i = 1; i < 4; ++i) {
        *lowest = least[0][i] < *lowest ? least[0][i] : *lowest;
        *highest = largest[0][i] > *highest ? largest[0][i] : *highest;
    }
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
    Part low = load_part(group), high = low;
    for (size_t i = kPartLanes; i < c.padded; i += kPartLanes) {
        const Part w = load_part(group + i);
        low = w < low ? w : low;
        high = w > high ? w : high;
    }
    float lowest, highest;
    range_of(low, high, &lowest, &highest);
    c.middle = (highest + lowest) / 2;
    c.span = (highest - lowest) * kClip;
    Floats total = {};
    for (size_t i = 0; i < c.padded; i += kLanes) {
        Floats w = load(group + i) - c.middle;
        for (size_t lane = count - i; lane < kLanes && i + kLanes > count; ++lane) w[lane] = 0;
        store(group + i, w);
        total += w;
    }
    c.sum = sum(half_of(total, 0) + half_of(total, 1));
    for (size_t i = count; i < c.padded; ++i) group[i] = -kLargest;
    return c;
}

// Sums over a group for every width, 0 beyond BITS: of the codes, of their squares, and of code times weight.
struct Sums {
    FourDoubles code, square, product;
};

// The code of a weight is the number of thresholds below it, 2**BITS - 1 of which rise: a search finds it bit by bit.
// Leaves bit `b` of all codes, 64 to a word, from masks[b * words] on.
//
// A code of width b + 1 is twice the code of width b and a bit. So bits tell the sums: how many are set, alone and with
// each wider one, and what the weights that have them add up to.
template <int BITS>
NDP_INLINE Sums assign(const float* group, size_t padded, const Floats& thresholds, uint64_t* masks) {
    Part table[BITS];  // what decides on bit b, by the bits before it
#pragma GCC unroll 4
    for (int bit = 0; bit < BITS; ++bit) {
        PartInts at = {};
        for (int prefix = 0; prefix < 1 << bit; ++prefix) at[prefix] = ((2 * prefix + 1) << (BITS - 1 - bit)) - 1;
        table[bit] = picked(thresholds, at);
    }
    const size_t words = (padded + 63) / 64;
    Part weight_sum[kMaxBits][kParts] = {};
    int64_t set[BITS] = {}, with_before[BITS] = {};
    for (size_t word = 0; word < words; ++word) {
        uint64_t mask[BITS] = {};
        const size_t left = padded - 64 * word, blocks = left < 64 ? left / kLanes : 64 / kLanes;
#pragma GCC unroll 4
        for (size_t block = 0; block < 64 / kLanes; ++block) {
            if (block >= blocks) break;
#pragma GCC unroll 2
            for (size_t part = 0; part < kParts; ++part) {
                const size_t first = kLanes * block + kPartLanes * part;
                const Part w = load_part(group + 64 * word + first);
                PartInts code = {};
#pragma GCC unroll 4
                for (int bit = 0; bit < BITS; ++bit) {
                    const Truths one = above(w, look_up(table[bit], code));
                    add_where(one, weight_sum[bit][part], w);
                    append(code, one);
                    mask[bit] |= uint64_t(bits_of(one)) << first;
                }
            }
        }
#pragma GCC unroll 4
        for (int bit = 0; bit < BITS; ++bit) {
            set[bit] += __builtin_popcountll(mask[bit]);
            for (int wider = 0; wider < bit; ++wider)
                with_before[bit] += int64_t(__builtin_popcountll(mask[bit] & mask[wider])) << (bit - 1 - wider);
            masks[size_t(bit) * words + word] = mask[bit];
        }
    }
    Sums sums{};
    const FourDoubles added = __builtin_convertvector(::sums(weight_sum), FourDoubles);
    int64_t code = 0, square = 0;
    double product = 0;
#pragma GCC unroll 4
    for (int bit = 0; bit < BITS; ++bit) {
        square = 4 * square + 4 * with_before[bit] + set[bit];
        code = 2 * code + set[bit];
        product = 2 * product + added[bit];
        sums.code[bit] = double(code);
        sums.square[bit] = double(square);
        sums.product[bit] = product;
    }
    return sums;
}

// Scale and offset of every width as float16 holds them.
struct Fit {
    float scale[kMaxBits], offset[kMaxBits];
};

NDP_INLINE Fit fit(const Sums& sums, const Centred& c) {
    const FourDoubles mean_code = sums.code / c.count, none = mean_code * 0;
    const FourDoubles variance = sums.square - sums.code * mean_code;
    FourDoubles scale = sums.product - mean_code * c.sum;
    scale /= variance > none ? variance : none + 1;
    scale = (variance <= none) | (scale < none) ? 0 * scale : scale;  // below zero by rounding only; NaN stays
    const Four s = __builtin_convertvector(scale, Four);
    const Four o = __builtin_convertvector(c.middle + (c.sum / c.count - scale * mean_code), Four);
    const Eight rounded = to_half_and_back(Eight{s[0], s[1], s[2], s[3], o[0], o[1], o[2], o[3]});
    Fit fit;
    memcpy(&fit, &rounded, sizeof fit);
    return fit;
}

// What each width makes of a code, its first bits; and thresholds that are even, over 1.
template <int BITS>
struct Constants {
    float of[BITS][kLanes], even[kLanes];
    constexpr Constants() : of{}, even{} {
        for (size_t code = 0; code < kLanes; ++code) {
            for (int track = 0; track < BITS; ++track) of[track][code] = float(code >> (BITS - 1 - track));
            even[code] = (code + 0.5f) / ((1 << BITS) - 1) - 0.5f;
        }
    }
};

// The thresholds between the lines that are the lowest somewhere: those of the others coincide.
template <int BITS>
__attribute__((noinline)) Floats hull(const Floats& slope, const Floats& constant) {
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
    Floats thresholds = {};
    int next = 0;
    for (int i = 1; i < num_best; ++i)
        while (next < best[i]) thresholds[next++] = from[i];
    while (next < num_codes - 1) thresholds[next++] = kNever;
    return thresholds;
}

// The lower envelope of the lines sum_k cost_k (level_k**2 - 2 level_k w), one per code, slopes falling.
template <int BITS>
NDP_INLINE Floats envelope(const Job& job, const Fit& fit, float middle, const Constants<BITS>& constants) {
    constexpr int num_thresholds = (1 << BITS) - 1;
    Floats slope = {}, constant = {};
    for (int track = 0; track < BITS; ++track) {
        const float offset = fit.offset[track] - middle, cost = job.cost[track];
        const Floats level = fit.scale[track] * load(constants.of[track]) + offset;
        const Floats weighted = cost * level;
        slope += 2 * weighted;
        constant += weighted * level;
    }
    // Nearly always every code is the best somewhere, and neighbours meet in rising order.
    const Floats rise = following(slope) - slope, thresholds = (following(constant) - constant) / rise;
    const bool rising = every(bits_above(rise, Floats{}), num_thresholds) &&
                        every(bits_above(following(thresholds), thresholds), num_thresholds - 1);
    return rising ? thresholds : hull<BITS>(slope, constant);
}

template <int BITS>
NDP_INLINE Fit fit_group(const Job& job, float* group, size_t count, uint64_t* masks) {
    static constexpr Constants<BITS> constants;
    const Centred c = centre(group, count);
    Floats thresholds = load(constants.even) * c.span;
    Fit before{};
    for (int round = 0;; ++round) {
        const Fit now = fit(assign<BITS>(group, c.padded, thresholds, masks), c);
        // the last one, or every later one would give the same
        if (round == kRounds || (round > 0 && memcmp(&now, &before, sizeof now) == 0)) return now;
        thresholds = envelope<BITS>(job, now, c.middle, constants);
        before = now;
    }
}

template <int BITS>
void fit_rows(const Job& job, size_t first, size_t last, const Room& room) {
    const size_t num_groups = (job.cols + job.group_size - 1) / job.group_size, row_bytes = job.cols / 8;
    for (size_t row = first; row < last; ++row) {
        for (size_t g = 0; g < num_groups; ++g) {
            const size_t start = g * job.group_size, left = job.cols - start;
            const size_t count = left < job.group_size ? left : job.group_size, words = (count + 63) / 64;
            load_group(job, row * job.cols + start, count, room.group);
            const Fit fit = fit_group<BITS>(job, room.group, count, room.masks);
            for (int width = 0; width < BITS; ++width) {
                uint8_t* bytes = job.planes + (size_t(width) * job.rows + row) * row_bytes + start / 8;
                memcpy(bytes, room.masks + size_t(width) * words, count / 8);
                if (job.track[width] < 0) continue;
                const size_t at = (size_t(job.track[width]) * job.rows + row) * num_groups + g;
                job.scale[at] = half_bits(fit.scale[width]);
                job.offset[at] = half_bits(fit.offset[width]);
            }
        }
    }
}

void fit_rows_of(const Job& job, size_t first, size_t last, const Room& room) {
    switch (job.bits) {
        case 1: return fit_rows<1>(job, first, last, room);
        case 2: return fit_rows<2>(job, first, last, room);
        case 3: return fit_rows<3>(job, first, last, room);
        default: return fit_rows<4>(job, first, last, room);
    }
}

// scale * code + offset, rounded after each of the two: numpy's values to the bit.
void dequantize(const Quantized& matrix) {
    const EightInts lane_bit = {1, 2, 4, 8, 16, 32, 64, 128};
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
                EightInts code = {};
                for (int plane = 0; plane < matrix.bits; ++plane) {
                    const EightInts bits = (code & 0) + int32_t(planes[plane * plane_bytes + byte]);
                    code = code + code - ((bits & lane_bit) != 0);
                }
                const Eight eight = scale * __builtin_convertvector(code, Eight) + offset;
                memcpy(values + 8 * byte, &eight, sizeof eight);
            }
        }
    }
}

}  // namespace
