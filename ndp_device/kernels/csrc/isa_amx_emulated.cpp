// The AMX path with its tile instructions done in software, so that everything but the eight instructions themselves
// is tested on machines without AMX. Never chosen by itself.
#include "vectors.inc.h"

namespace {

template <int N>
struct Index {
    static constexpr int value = N;
};

struct TileConfig;

struct Tiles {
    static inline thread_local int8_t tile[6][16][64];

    static void configure(const TileConfig&) {}
    static void release() {}

    template <int BLOCKS>
    static void zero() {
        std::memset(tile, 0, BLOCKS * sizeof tile[0]);
    }
    template <int TILE>
    static void load(const void* base, ptrdiff_t stride) {
        for (int row = 0; row < 16; ++row) std::memcpy(tile[TILE][row], static_cast<const char*>(base) + row * stride, 64);
    }
    template <int TILE>
    static void multiply() {
        for (int row = 0; row < 16; ++row) {
            for (int n = 0; n < 16; ++n) {
                int32_t sum;
                std::memcpy(&sum, tile[TILE][row] + 4 * n, 4);
                for (int step = 0; step < 16; ++step)
                    for (int j = 0; j < 4; ++j)
                        sum += tile[4][row][4 * step + j] * static_cast<uint8_t>(tile[5][step][4 * n + j]);
                std::memcpy(tile[TILE][row] + 4 * n, &sum, 4);
            }
        }
    }
    template <int BLOCKS>
    static void save(void* base, ptrdiff_t stride) {
        for (int block = 0; block < BLOCKS; ++block)
            for (int row = 0; row < 16; ++row)
                std::memcpy(static_cast<char*>(base) + row * stride + 64 * block, tile[block][row], 64);
    }
};

}  // namespace

#include "amx.inc.h"

namespace {
constexpr KernelTable kTable = make_tile_table("amx_emulated");
}

const ndp::KernelTable& ndp::amx_emulated_kernels() { return kTable; }
