// The AMX path with its tile instructions done in software, so that everything but the instructions themselves
// is tested on machines without AMX. Never chosen by itself.
#include "vectors.inc.h"

namespace {

struct TileConfig;

struct Tiles {
    static inline thread_local int8_t tile[8][16][64];

    static float value(const int8_t* bfloat) {
        uint16_t bits;
        std::memcpy(&bits, bfloat, 2);
        const uint32_t whole = static_cast<uint32_t>(bits) << 16;
        float result;
        std::memcpy(&result, &whole, 4);
        return result;
    }

    static void configure(const TileConfig&) {}
    static void release() {}
    static void zero() { std::memset(tile, 0, 4 * sizeof tile[0]); }

    template <int TILE>
    static void load(const void* base, ptrdiff_t stride) {
        for (int row = 0; row < 16; ++row)
            std::memcpy(tile[TILE][row], static_cast<const char*>(base) + row * stride, 64);
    }
    template <bool SIGNED, int SUM, int ACTIVATIONS, int CODES>
    static void multiply() {
        for (int row = 0; row < 16; ++row) {
            for (int n = 0; n < 16; ++n) {
                int32_t sum;
                std::memcpy(&sum, tile[SUM][row] + 4 * n, 4);
                for (int step = 0; step < 16; ++step)
                    for (int j = 0; j < 4; ++j)
                        sum += tile[ACTIVATIONS][row][4 * step + j] * (tile[CODES][step][4 * n + j] & (SIGNED ? -1 : 255));
                std::memcpy(tile[SUM][row] + 4 * n, &sum, 4);
            }
        }
    }
    template <int SUM, int A, int B>
    static void multiply_bfloats() {  // even columns, odd ones, then both to the sum
        for (int row = 0; row < 16; ++row) {
            for (int n = 0; n < 16; ++n) {
                float sum, sums[2] = {};
                std::memcpy(&sum, tile[SUM][row] + 4 * n, 4);
                for (int pair = 0; pair < 16; ++pair)
                    for (int j = 0; j < 2; ++j) sums[j] += value(tile[A][row] + 4 * pair + 2 * j) * value(tile[B][pair] + 4 * n + 2 * j);
                sum += sums[0] + sums[1];
                std::memcpy(tile[SUM][row] + 4 * n, &sum, 4);
            }
        }
    }
    template <int TILE>
    static void save(void* base, ptrdiff_t stride) {
        for (int row = 0; row < 16; ++row)
            std::memcpy(static_cast<char*>(base) + row * stride, tile[TILE][row], 64);
    }
};

}  // namespace

#include "amx.inc.h"

namespace {
constexpr KernelTable kTable = make_tile_table("amx_emulated");
}

const ndp::KernelTable& ndp::amx_emulated_kernels() { return kTable; }
