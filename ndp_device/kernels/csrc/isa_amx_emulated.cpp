// The AMX path with its tile instructions done in software, so that everything but the eight instructions themselves
// is tested on machines without AMX. Never chosen by itself.
#include "vectors.inc.h"

namespace {

struct TileConfig;

struct Tiles {
    static inline thread_local int8_t tile[8][16][64];

    static void configure(const TileConfig&) {}
    static void release() {}
    static void zero() { std::memset(tile, 0, 4 * sizeof tile[0]); }

    template <int TILE>
    static void load(const void* base, ptrdiff_t stride) {
        for (int row = 0; row < 16; ++row)
            std::memcpy(tile[TILE][row], static_cast<const char*>(base) + row * stride, 64);
    }
    template <int SUM, int ACTIVATIONS, int CODES>
    static void multiply() {
        for (int row = 0; row < 16; ++row) {
            for (int n = 0; n < 16; ++n) {
                int32_t sum;
                std::memcpy(&sum, tile[SUM][row] + 4 * n, 4);
                for (int step = 0; step < 16; ++step)
                    for (int j = 0; j < 4; ++j)
                        sum += tile[ACTIVATIONS][row][4 * step + j] *
                               static_cast<uint8_t>(tile[CODES][step][4 * n + j]);
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
