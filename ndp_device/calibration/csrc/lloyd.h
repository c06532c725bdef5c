// What the fit of data-free replicas is given: rows of a checkpoint's matrix in, planes, scales and offsets out.
// Knows nothing of Python, threads or instruction sets.
#pragma once
#include <cstddef>
#include <cstdint>

#define NDP_LANES 16  // on every processor, so that all add up in one order and give the same bytes
#include "floats.inc.h"

namespace ndp::data_free {

constexpr int kMaxBits = 4;

enum class DType { kFloat32, kFloat16, kBfloat16 };

struct Job {
    DType dtype;
    const void* weights;  // [rows, cols]
    size_t rows, cols, group_size;
    int bits;                 // of the codes
    float cost[kMaxBits];     // of an error at width 1, 2, ...; 0 for a width that is not made
    int track[kMaxBits];      // place of that width in scale and offset, -1 for none
    uint8_t* planes;          // [bits, rows, cols / 8]
    uint16_t *scale, *offset;  // float16 [tracks, rows, groups]
};

// A thread's own room: one group of weights as float, rounded up to kLanes, and its codes bit by bit, 64 to a word.
struct Room {
    float* group;
    uint64_t* masks;
};

// A quantized matrix, and where its values go.
struct Quantized {
    const uint8_t* planes;  // [bits, rows, cols / 8]
    int bits;
    size_t rows, cols, group_size;  // whole bytes of codes
    const uint16_t *scale, *offset;  // float16 [rows, groups]
    float* values;                   // [rows, cols]
};

// What a build for one instruction set has.
struct Functions {
    void (*fit_rows)(const Job& job, size_t first, size_t last, const Room& room);
    void (*dequantize)(const Quantized& matrix);
};

extern const Functions portable;
#if defined(__x86_64__)
extern const Functions avx2;
extern const Functions avx512;
#endif

}  // namespace ndp::data_free
