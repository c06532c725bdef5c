// GPTQ's column loop within one group, and coordinate descent there, eight rows at a time: a lane is a row.
// Included once per instruction set; see floats.inc.h.
//
// Every width from FIRST + 1 to BITS has a place here; one that is not made costs nothing and is not written.
#include "columns.h"
#include "floats.inc.h"

namespace {

using namespace ndp::gptq;

constexpr float kClips[] = {1.0f, 0.85f, 0.7f, 0.55f};  // starting ranges of a group's levels, as parts of min..max
constexpr int kRounds = 4;
constexpr float kRidge = 1e-4f;
constexpr float kLeast = 1e-30f;

NDP_INLINE Floats all(float value) { return Floats{} + value; }
NDP_INLINE Floats select(const Ints& where, const Floats& yes, const Floats& no) { return where ? yes : no; }
NDP_INLINE Floats smaller(const Floats& a, const Floats& b) { return a < b ? a : b; }
NDP_INLINE Floats larger(const Floats& a, const Floats& b) { return a > b ? a : b; }
NDP_INLINE Floats real(const Ints& integers) { return __builtin_convertvector(integers, Floats); }

template <int BITS, int FIRST>
struct Columns {
    static constexpr int kTracks = BITS - FIRST;
    static constexpr int kCodes = 1 << BITS;

    struct Levels {
        Floats scale[kTracks], offset[kTracks];

        NDP_INLINE Floats of(int track, const Ints& code) const {
            return scale[track] * real(code >> (kTracks - 1 - track)) + offset[track];
        }
    };

    // sum_k cost_k (w_k - level_k)**2 differs between codes only in sum_k slope_k w_k + constant.
    struct Table {
        Floats slope[kTracks][kCodes], constant[kCodes];

        NDP_INLINE void fill(const Group& group, const Levels& levels) {
            for (int code = 0; code < kCodes; ++code) constant[code] = Floats{};
            for (int track = 0; track < kTracks; ++track) {
                const float cost = group.cost[FIRST + track];
                const int shift = kTracks - 1 - track;
                for (int prefix = 0; prefix < kCodes >> shift; ++prefix) {
                    const Floats level = levels.scale[track] * float(prefix) + levels.offset[track];
                    slope[track][prefix] = (-2 * cost) * level;
                    for (int code = prefix << shift; code < (prefix + 1) << shift; ++code)
                        constant[code] += cost * level * level;
                }
            }
        }
    };

    struct Best {
        Floats cost;
        Ints code;
    };

    // The codes are leaves of a tree, whose branches share what the narrower widths cost.
    template <int TRACK, int PREFIX>
    static NDP_INLINE void visit(const Table& table, const Floats* weights, const Floats& so_far, Best& best) {
        const Floats cost = so_far + table.slope[TRACK][PREFIX] * weights[TRACK];
        if constexpr (TRACK + 1 < kTracks) {
            visit<TRACK + 1, 2 * PREFIX>(table, weights, cost, best);
            visit<TRACK + 1, 2 * PREFIX + 1>(table, weights, cost, best);
        } else {
            const Floats whole = cost + table.constant[PREFIX];
            const Ints better = whole < best.cost;
            best.cost = select(better, whole, best.cost);
            best.code = better ? Ints{} + PREFIX : best.code;
        }
    }

    template <int PREFIX>
    static NDP_INLINE void visit_from(const Table& table, const Floats* weights, Best& best) {
        visit<0, PREFIX>(table, weights, Floats{}, best);
        if constexpr (PREFIX + 1 < kCodes >> (kTracks - 1)) visit_from<PREFIX + 1>(table, weights, best);
    }

    static NDP_INLINE Best nearest(const Table& table, const Floats* weights) {
        Best best{all(__builtin_inff()), Ints{}};
        visit_from<0>(table, weights, best);
        return best;
    }

    // Eight rows of a group. Behind the group's last row the lanes repeat it.
    struct Rows {
        const Group& group;
        size_t first, count;
        Floats *weights, *product, *error, *by_code, *work;  // [columns, tracks] but weights [columns]
        Ints* codes;

        NDP_INLINE Rows(const Group& of, size_t from, size_t last, float* room) : group(of), first(from) {
            count = last - from < kLanes ? last - from : kLanes;
            const size_t n = group.columns;
            Floats* at = reinterpret_cast<Floats*>(room);
            weights = at;
            product = at += n;
            error = at += n * kTracks;
            by_code = at += n * kTracks;
            work = at += n * kTracks;
            codes = reinterpret_cast<Ints*>(at + n * kTracks);
            for (size_t lane = 0; lane < kLanes; ++lane) {
                const size_t row = row_of(lane);
                for (size_t c = 0; c < n; ++c) weights[c][lane] = group.weights[row * n + c];
                for (int track = 0; track < kTracks; ++track) {
                    const int k = group.track[FIRST + track];
                    for (size_t c = 0; c < n; ++c)
                        product[c * kTracks + track][lane] = k < 0 ? 0 : group.product[(k * group.rows + row) * n + c];
                }
            }
        }

        NDP_INLINE size_t row_of(size_t lane) const { return first + (lane < count ? lane : count - 1); }

        NDP_INLINE void load_solution(Levels& levels) {
            for (size_t lane = 0; lane < kLanes; ++lane) {
                const size_t row = row_of(lane);
                for (size_t c = 0; c < group.columns; ++c) codes[c][lane] = group.codes[row * group.columns + c];
                for (int track = 0; track < kTracks; ++track) {
                    const int k = group.track[FIRST + track];
                    levels.scale[track][lane] = k < 0 ? 0 : group.scale[k * group.rows + row];
                    levels.offset[track][lane] = k < 0 ? 0 : group.offset[k * group.rows + row];
                }
            }
        }

        NDP_INLINE void write(const Levels& levels) {
            for (size_t c = 0; c < group.columns; ++c)
                for (int track = 0; track < kTracks; ++track)
                    error[c * kTracks + track] = weights[c] - levels.of(track, codes[c]);
            for (size_t lane = 0; lane < count; ++lane) {
                const size_t row = first + lane;
                for (size_t c = 0; c < group.columns; ++c)
                    group.codes[row * group.columns + c] = static_cast<uint8_t>(codes[c][lane]);
                for (int track = 0; track < kTracks; ++track) {
                    const int k = group.track[FIRST + track];
                    if (k < 0) continue;
                    float* out = group.product + (k * group.rows + row) * group.columns;
                    for (size_t c = 0; c < group.columns; ++c) out[c] = error[c * kTracks + track][lane];
                    group.scale[k * group.rows + row] = levels.scale[track][lane];
                    group.offset[k * group.rows + row] = levels.offset[track][lane];
                }
            }
        }

        // Each track's levels by least squares for the codes, its weights `of` weighted by importance.
        NDP_INLINE void fit(const Floats* of, float total, Levels& levels) const {
            Floats code_sum[kTracks] = {}, square_sum[kTracks] = {}, sum[kTracks] = {}, product_sum[kTracks] = {};
            for (size_t c = 0; c < group.columns; ++c) {
                const float share = group.importance[c] / total;
                for (int track = 0; track < kTracks; ++track) {
                    const Floats prefix = real(codes[c] >> (kTracks - 1 - track));
                    const Floats part = share * prefix, weight = of[c * kTracks + track];
                    code_sum[track] += part;
                    square_sum[track] += part * prefix;
                    sum[track] += share * weight;
                    product_sum[track] += part * weight;
                }
            }
            for (int track = 0; track < kTracks; ++track) {
                const Floats variance = square_sum[track] - code_sum[track] * code_sum[track];
                const Floats covariance = product_sum[track] - code_sum[track] * sum[track];
                const Floats scale = select(variance > all(1e-6f), covariance / variance, Floats{});
                levels.scale[track] = round_to_half(scale);
                levels.offset[track] = round_to_half(sum[track] - levels.scale[track] * code_sum[track]);
            }
        }

        // Levels for weights `of` [columns, tracks]: Lloyd's steps from several ranges, the best per row.
        NDP_INLINE void fit_levels(const Floats* of, Levels& levels, Table& table) {
            const size_t n = group.columns;
            Floats low = all(__builtin_inff()), high = -low;
            float total = 0;
            for (size_t c = 0; c < n; ++c) {
                work[c] = Floats{};
                for (int track = 0; track < kTracks; ++track)
                    work[c] += group.cost[FIRST + track] * of[c * kTracks + track];
                low = smaller(low, work[c]);
                high = larger(high, work[c]);
                total += group.importance[c];
            }
            const Floats middle = (low + high) / 2, span = larger(high - low, all(1e-12f));
            const float top = kCodes - 1;
            Floats least = all(__builtin_inff());
            for (const float clip : kClips) {
                for (size_t c = 0; c < n; ++c) {
                    const Floats code = ((work[c] - middle) / (span * clip) + 0.5f) * top;
                    codes[c] = __builtin_convertvector(smaller(larger(code, Floats{}), all(top)) + 0.5f, Ints);
                }
                Levels tried;
                Floats cost;
                for (int round = 0; round < kRounds; ++round) {
                    fit(of, total, tried);
                    table.fill(group, tried);
                    cost = Floats{};
                    for (size_t c = 0; c < n; ++c) {
                        const Best best = nearest(table, of + c * kTracks);
                        codes[c] = best.code;
                        cost += best.cost * group.importance[c];
                    }
                }
                const Ints better = cost < least;
                least = select(better, cost, least);
                for (int track = 0; track < kTracks; ++track) {
                    levels.scale[track] = select(better, tried.scale[track], levels.scale[track]);
                    levels.offset[track] = select(better, tried.offset[track], levels.offset[track]);
                }
            }
        }

        // GPTQ: each column's nearest code, with what the errors before it in the group add to its weight. Leaves in
        // `product` that weight less the level, the error that columns behind it cannot answer.
        NDP_INLINE void feed_back(const Levels& levels, const Table& table) {
            const size_t n = group.columns;
            for (size_t c = 0; c < n; ++c) {
                const float* added = group.feedback + c * n;
                Floats sum[kTracks] = {}, more[kTracks] = {};
                size_t before = 0;
                for (; before + 2 <= c; before += 2)
                    for (int track = 0; track < kTracks; ++track) {
                        sum[track] += added[before] * error[before * kTracks + track];
                        more[track] += added[before + 1] * error[(before + 1) * kTracks + track];
                    }
                if (before < c)
                    for (int track = 0; track < kTracks; ++track)
                        sum[track] += added[before] * error[before * kTracks + track];
                Floats wanted[kTracks];
                for (int track = 0; track < kTracks; ++track)
                    wanted[track] = weights[c] + product[c * kTracks + track] + (sum[track] + more[track]);
                codes[c] = nearest(table, wanted).code;
                for (int track = 0; track < kTracks; ++track) {
                    const Floats level = levels.of(track, codes[c]);
                    error[c * kTracks + track] = weights[c] - level;
                    product[c * kTracks + track] = wanted[track] - level;
                }
            }
        }

        // out = square @ in, both [columns, tracks]; columns are a multiple of 8.
        NDP_INLINE void multiply(const Floats* in, Floats* out) const {
            const size_t n = group.columns;
            for (size_t c = 0; c < n; c += 2) {
                const float *row = group.square + c * n, *next = row + n;
                Floats sum[kTracks] = {}, next_sum[kTracks] = {};
                for (size_t i = 0; i < n; ++i)
                    for (int track = 0; track < kTracks; ++track) {
                        const Floats value = in[i * kTracks + track];
                        sum[track] += row[i] * value;
                        next_sum[track] += next[i] * value;
                    }
                for (int track = 0; track < kTracks; ++track) {
                    out[c * kTracks + track] = sum[track];
                    out[(c + 1) * kTracks + track] = next_sum[track];
                }
            }
        }

        // `product` is E @ square of the whole row here, and is kept so. Levels that minimise E @ square @ E'.
        NDP_INLINE void refit(Levels& levels) {
            const size_t n = group.columns;
            for (size_t c = 0; c < n; ++c)
                for (int track = 0; track < kTracks; ++track)
                    work[c * kTracks + track] = real(codes[c] >> (kTracks - 1 - track));
            multiply(work, by_code);
            Floats code_code[kTracks] = {}, code_one[kTracks] = {}, code_wanted[kTracks] = {}, wanted[kTracks] = {};
            float one_one = 0;
            for (size_t c = 0; c < n; ++c) {
                for (size_t i = 0; i < n; ++i) one_one += group.square[c * n + i];
                for (int track = 0; track < kTracks; ++track) {
                    const size_t at = c * kTracks + track;
                    code_code[track] += work[at] * by_code[at];
                    code_one[track] += by_code[at];
                    code_wanted[track] += work[at] * product[at];
                    wanted[track] += product[at];
                }
            }
            Floats scale_step[kTracks], offset_step[kTracks];
            for (int track = 0; track < kTracks; ++track) {
                const Floats a = code_code[track] * (1 + kRidge) + kLeast, b = code_one[track];
                const float c = one_one * (1 + kRidge) + kLeast;
                const Floats determinant = a * c - b * b;
                // a group that the Hessian hardly knows of keeps its levels
                const Floats ds = (c * code_wanted[track] - b * wanted[track]) / determinant;
                const Floats to = (a * wanted[track] - b * code_wanted[track]) / determinant;
                Floats scale = round_to_half(levels.scale[track] + ds);
                Floats offset = round_to_half(levels.offset[track] + to);
                const Ints solved = (determinant > all(kLeast)) & (scale - scale == all(0)) & (offset - offset == all(0));
                scale = select(solved, scale, levels.scale[track]);
                offset = select(solved, offset, levels.offset[track]);
                scale_step[track] = scale - levels.scale[track];
                offset_step[track] = offset - levels.offset[track];
                levels.scale[track] = scale;
                levels.offset[track] = offset;
            }
            for (size_t c = 0; c < n; ++c) {
                float one = 0;
                for (size_t i = 0; i < n; ++i) one += group.square[c * n + i];
                for (int track = 0; track < kTracks; ++track)
                    product[c * kTracks + track] -=
                        scale_step[track] * by_code[c * kTracks + track] + offset_step[track] * one;
            }
        }

        // Each code again with all others fixed. An input that never came leaves its code as it is.
        NDP_INLINE void descend(const Levels& levels, const Table& table) {
            const size_t n = group.columns;
            for (size_t c = 0; c < n; ++c) {
                const float* row = group.square + c * n;
                if (!(row[c] > kLeast)) continue;
                Floats wanted[kTracks], before[kTracks];
                for (int track = 0; track < kTracks; ++track) {
                    before[track] = levels.of(track, codes[c]);
                    wanted[track] = before[track] + product[c * kTracks + track] / row[c];
                }
                const Ints code = nearest(table, wanted).code;
                const Ints changed = code != codes[c];
                int any = 0;
                for (size_t lane = 0; lane < kLanes; ++lane) any |= changed[lane];
                if (!any) continue;
                codes[c] = code;
                Floats step[kTracks];
                for (int track = 0; track < kTracks; ++track) step[track] = levels.of(track, code) - before[track];
                for (size_t i = 0; i < n; ++i)
                    for (int track = 0; track < kTracks; ++track) product[i * kTracks + track] -= row[i] * step[track];
            }
        }

        NDP_INLINE void sweep(Levels& levels, Table& table) {
            for (int i = 0; i < group.sweeps; ++i) {
                refit(levels);
                table.fill(group, levels);
                descend(levels, table);
            }
            if (group.sweeps && !group.feedback) refit(levels);  // else the sweeps of the whole row begin with it
        }
    };

    static void quantize(const Group& group, size_t first, size_t last, float* room) {
        const size_t n = group.columns;
        Table table;
        for (; first < last; first += kLanes) {
            Rows rows(group, first, last, room);
            Levels levels{};
            for (size_t c = 0; c < n; ++c)
                for (int track = 0; track < kTracks; ++track)
                    rows.error[c * kTracks + track] = rows.weights[c] + rows.product[c * kTracks + track];
            rows.fit_levels(rows.error, levels, table);
            table.fill(group, levels);
            rows.feed_back(levels, table);
            if (group.sweeps) {
                // what a change here costs once the columns behind answer: feedback @ diag(importance) @ feedback'
                for (size_t c = 0; c < n; ++c)
                    for (int track = 0; track < kTracks; ++track)
                        rows.work[c * kTracks + track] = group.importance[c] * rows.product[c * kTracks + track];
                for (size_t c = 0; c < n; ++c) {
                    Floats sum[kTracks];
                    for (int track = 0; track < kTracks; ++track) sum[track] = rows.work[c * kTracks + track];
                    for (size_t i = c + 1; i < n; ++i)
                        for (int track = 0; track < kTracks; ++track)
                            sum[track] += group.feedback[i * n + c] * rows.work[i * kTracks + track];
                    for (int track = 0; track < kTracks; ++track) rows.product[c * kTracks + track] = sum[track];
                }
                rows.sweep(levels, table);
            }
            rows.write(levels);
        }
    }

    static void polish(const Group& group, size_t first, size_t last, float* room) {
        Table table;
        for (; first < last; first += kLanes) {
            Rows rows(group, first, last, room);
            Levels levels{};
            rows.load_solution(levels);
            rows.sweep(levels, table);
            rows.write(levels);
        }
    }
};

template <template <int, int> class Of, class Run>
NDP_INLINE void dispatch(const Group& group, const Run& run) {
    bool has_narrow = false;
    for (int width = 0; width + 1 < group.bits; ++width) has_narrow |= group.track[width] >= 0;
    switch (group.bits) {
        case 1: return run(Of<1, 0>{});
        case 2: return has_narrow ? run(Of<2, 0>{}) : run(Of<2, 1>{});
        case 3: return has_narrow ? run(Of<3, 0>{}) : run(Of<3, 2>{});
        default: return has_narrow ? run(Of<4, 0>{}) : run(Of<4, 3>{});
    }
}

void quantize(const Group& group, size_t first, size_t last, float* room) {
    dispatch<Columns>(group, [&](auto columns) { decltype(columns)::quantize(group, first, last, room); });
}

void polish(const Group& group, size_t first, size_t last, float* room) {
    dispatch<Columns>(group, [&](auto columns) { decltype(columns)::polish(group, first, last, room); });
}

}  // namespace
