// Every path of the kernels against float64, and masked experts against whole ones, run under the sanitizers (CMake
// option NDP_SANITIZE): shapes that are no multiple of anything, so that a read or write past a buffer is one that the
// address sanitizer sees.
#include <cmath>
#include <cstdio>
#include <random>
#include <thread>

#include "cpu.h"
#include "engine.h"

using namespace ndp;

namespace {

struct Case {
    int hidden, intermediate, group, tokens, threads;
};

constexpr Case kCases[] = {{40, 24, 32, 1, 1},   {40, 24, 32, 7, 2},     {128, 256, 128, 1, 1}, {128, 256, 128, 33, 3},
                           {136, 344, 128, 5, 2}, {72, 56, 16, 17, 2},   {8, 8, 8, 2, 1},       {384, 320, 1024, 3, 2},
                           {1000, 520, 128, 1, 3}, {1000, 520, 128, 18, 3}, {256, 384, 128, 2, 1},
                           {1000, 520, 128, 3, 2}, {1000, 520, 128, 4, 3}, {1024, 512, 128, 2, 2}};
constexpr double kLargestError[] = {4e-2, 2e-4};  // one limb, two limbs
constexpr uint16_t kScale = 0x2c00;  // fp16: weights are code / 16 - (2^bits - 1) / 32, centred
constexpr uint16_t kOffset[] = {0, 0xa800, 0xae00, 0xb300, 0xb780, 0, 0, 0, 0xc7f8};  // by bits

struct Matrix {
    int rows, cols;
    std::vector<uint8_t> planes;
    std::vector<int32_t> perm;
    std::vector<double> values;  // [rows][cols], columns in the order of the input
    PackedMatrix packed;
    std::vector<Component> wider;  // with one bit more, where bits is odd
};

std::vector<Component> pack_planes(Engine& engine, const Matrix& m, int bits, bool whole) {
    std::vector<Component> components;
    const ptrdiff_t plane = static_cast<ptrdiff_t>(m.rows) * m.cols / 8;
    engine.with_pool([&](ThreadPool& pool) {
        for (int first = 0; first < bits; first += components.back().width) {
            const int width = bits == 8 || (bits == 4 && whole) ? bits : bits - first < 2 ? 1 : 2;
            const uint8_t* planes = m.planes.data() + first * plane;
            components.push_back(
                {pack_component(engine.kernels(), pool, m.packed.geometry, planes, plane, width), width});
        }
        return 0;
    });
    return components;
}

Matrix random_matrix(Engine& engine, std::mt19937& random, int rows, int cols, int bits, int group_size, int halves) {
    const int held = bits + bits % 2;  // the lowest plane counts for nothing where bits is odd
    Matrix m{rows, cols, std::vector<uint8_t>(static_cast<size_t>(held) * rows * cols / 8), {}, {}, {}, {}};
    for (uint8_t& byte : m.planes) byte = static_cast<uint8_t>(random());
    for (int c = 0; c < cols; ++c) m.perm.push_back(cols - 1 - c);
    const int stored = (cols + group_size - 1) / group_size;
    std::vector<uint16_t> scale(static_cast<size_t>(rows) * stored, kScale), offset(scale.size(), kOffset[bits]);
    m.values.resize(static_cast<size_t>(rows) * cols);
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < cols; ++c) {
            int code = 0;
            for (int p = 0; p < bits; ++p)
                code = code * 2 + (m.planes[((static_cast<size_t>(p) * rows + r) * cols + c) / 8] >> (c % 8) & 1);
            m.values[static_cast<size_t>(r) * cols + m.perm[c]] = code / 16.0 - ((1 << bits) - 1) / 32.0;
        }
    }
    m.packed.geometry = {rows, cols, halves, kernel_group(group_size, cols)};
    m.packed.perm = m.perm;
    m.packed.components = pack_planes(engine, m, bits, halves == 1);
    m.packed.meta = engine.with_pool([&](ThreadPool& pool) {
        return pack_meta(pool, m.packed.geometry, scale.data(), offset.data(), group_size);
    });
    m.wider = pack_planes(engine, m, held, false);
    m.packed.check();
    return m;
}

// MXFP4 or NVFP4, which `bits` of 0 and -1 stand for: every code, scales apart, of some matrices too far for groups of 128.
Matrix random_fp4_matrix(Engine& engine, std::mt19937& random, int rows, int cols, int halves, bool is_e4m3) {
    const int columns = is_e4m3 ? kNvfp4 : kMxfp4;
    Matrix m{rows, cols, {}, {}, std::vector<double>(static_cast<size_t>(rows) * cols), {}, {}};
    std::vector<uint8_t> codes(m.values.size() / 2), scales(m.values.size() / columns);
    const std::vector<float> of_rows(rows, 0.25f);
    for (uint8_t& byte : codes) byte = static_cast<uint8_t>(random());
    for (uint8_t& scale : scales) {
        if (is_e4m3) scale = random() % 20 || cols % 3 ? 40 + random() % 30 : random() % 120;
        else scale = random() % 20 ? 120 + random() % 3 : cols % 3 ? 128 : random() % 120;
    }
    for (size_t i = 0; i < m.values.size(); ++i) {
        const int level = kFp4Levels[codes[i / 2] >> (i % 2 * 4) & 15] - kFp4Zero, scale = scales[i / columns];
        const double of_block = is_e4m3 ? of_rows[0] * std::ldexp(scale % 8 + (scale < 8 ? 0 : 8), std::max(scale / 8, 1) - 10)
                                        : std::ldexp(1.0, scale - 127);
        m.values[i] = level / 2.0 * of_block;
    }
    m.packed.geometry = {rows, cols, halves, kChunkCols};
    m.packed.fp4 = columns;
    engine.with_pool([&](ThreadPool& pool) {
        const Packed packed = pack_fp4(pool, m.packed.geometry, codes.data(), scales.data(), is_e4m3 ? of_rows.data() : nullptr);
        m.packed.components = {{packed.codes, 4}};
        m.packed.meta = packed.meta;
        return 0;
    });
    m.packed.check();
    return m;
}

// An expert of int8 or E4M3, which `bits` of -2 and -3 stand for, in blocks of 2 rows and a group's columns.
PreparedExpert random_bytes(Engine& engine, std::mt19937& random, const Case& c, bool is_int8, int limbs, Matrix& w13, Matrix& w2) {
    std::vector<uint8_t> codes[3];
    std::vector<float> scales[3];
    FullView views[3];
    for (int part = 0; part < 3; ++part) {  // gate, up, down
        const int rows = part < 2 ? c.intermediate : c.hidden, cols = part < 2 ? c.hidden : c.intermediate;
        const int across = (cols + c.group - 1) / c.group;
        codes[part].resize(static_cast<size_t>(rows) * cols);
        scales[part].resize(static_cast<size_t>(rows + 1) / 2 * across);
        for (float& scale : scales[part]) scale = 0.001f + random() % 8 * 0.0005f;
        Matrix& m = part < 2 ? w13 : w2;
        m.rows += rows;
        m.cols = cols;
        for (size_t i = 0; i < codes[part].size(); ++i) {
            const uint8_t code = codes[part][i] = random() % 127 + random() % 2 * 128;
            const double e4m3 = std::ldexp(code % 8 + (code % 128 < 8 ? 0 : 8), std::max(code % 128 / 8, 1) - 10) * (code < 128 ? 1 : -1);
            m.values.push_back((is_int8 ? static_cast<int8_t>(code) : e4m3) * scales[part][i / cols / 2 * across + i % cols / c.group]);
        }
        views[part] = {is_int8 ? DType::int8 : DType::float8, codes[part].data(), nullptr, rows, cols,
                       {scales[part].data(), nullptr, 2, c.group, across}};
    }
    PreparedExpert source;
    source.full_w13 = views[0];
    source.full_w13.second = views[1].first;
    source.full_w13.scales.second = views[1].scales.first;
    source.full_w2 = views[2];
    return engine.pack_bytes(source, limbs);
}

std::vector<double> times(const Matrix& m, const std::vector<double>& v) {
    std::vector<double> y(m.rows);
    for (int r = 0; r < m.rows; ++r)
        for (int c = 0; c < m.cols; ++c) y[r] += m.values[static_cast<size_t>(r) * m.cols + c] * v[c];
    return y;
}

double error_of(const std::string& isa, const Case& c, int bits, int limbs) {
    std::mt19937 random(c.hidden + bits);
    std::normal_distribution<float> normal;
    Engine engine(isa, c.threads);
    const auto matrix = [&](int rows, int cols, int halves) {
        return bits > 0 ? random_matrix(engine, random, rows, cols, bits, c.group, halves)
                    : random_fp4_matrix(engine, random, rows, cols, halves, bits < 0);
    };
    Matrix w13{}, w2{};
    PreparedExpert expert;
    if (bits < -1) {
        expert = random_bytes(engine, random, c, bits == -2, limbs, w13, w2);
    } else {
        w13 = matrix(2 * c.intermediate, c.hidden, 2), w2 = matrix(c.hidden, c.intermediate, 1);
        expert.w13 = w13.packed;
        expert.w2 = w2.packed;
    }
    expert.hidden = c.hidden;
    expert.intermediate = c.intermediate;
    expert.limbs = limbs;
    std::vector<float> x(static_cast<size_t>(c.tokens) * c.hidden), y(x.size()), gates(c.tokens, 0.5f);
    for (float& value : x) value = normal(random);
    std::vector<int32_t> rows(c.tokens), experts(c.tokens);
    for (int t = 0; t < c.tokens; ++t) rows[t] = c.tokens - 1 - t;
    // Two callers at once: they take turns.
    const Pairs pairs{c.tokens, rows.data(), experts.data(), gates.data()};
    std::vector<float> other(y.size());
    std::thread rival([&] { engine.execute(x.data(), c.tokens, c.hidden, {&expert}, pairs, other.data()); });
    engine.execute(x.data(), c.tokens, c.hidden, {&expert}, pairs, y.data());
    rival.join();
    if (y != other) return INFINITY;
    if (bits > 0 && bits % 2) {
        const PreparedExpert masked = expert.masked(w13.wider, w2.wider);
        engine.execute(x.data(), c.tokens, c.hidden, {&masked}, pairs, other.data());
        if (y != other) return INFINITY;
    }

    double wrong = 0, all = 0;
    for (int t = 0; t < c.tokens; ++t) {
        const std::vector<double> row(x.begin() + t * c.hidden, x.begin() + (t + 1) * c.hidden);
        const std::vector<double> both = times(w13, row);
        std::vector<double> hidden(c.intermediate);
        for (int i = 0; i < c.intermediate; ++i) hidden[i] = both[i] / (1 + std::exp(-both[i])) * both[c.intermediate + i];
        const std::vector<double> wanted = times(w2, hidden);
        for (int h = 0; h < c.hidden; ++h) {
            wrong += std::pow(y[static_cast<size_t>(t) * c.hidden + h] - 0.5 * wanted[h], 2);
            all += std::pow(0.5 * wanted[h], 2);
        }
    }
    return std::sqrt(wrong / all);
}

}  // namespace

int main() {
    int checks = 0, failures = 0;
    for (const std::string& isa : supported_isas()) {
        for (const Case& c : kCases) {
            for (int bits : {-3, -2, -1, 0, 1, 2, 3, 4, 8}) {
                if ((bits == -1 || bits == 0) && (c.hidden % kChunkCols || c.intermediate % kChunkCols)) continue;
                for (int limbs = 1; limbs <= 2; ++limbs) {
                    const double error = error_of(isa, c, bits, limbs);
                    ++checks;
                    if (error < kLargestError[limbs - 1]) continue;
                    ++failures;
                    std::fprintf(stderr, "%s, %d bits, %d limbs, %d x %d in groups of %d, %d tokens: error %g\n",
                                 isa.c_str(), bits, limbs, c.hidden, c.intermediate, c.group, c.tokens, error);
                }
            }
        }
    }
    std::printf("{\"checks\": %d, \"failures\": %d}\n", checks, failures);
    return failures ? 1 : 0;
}
