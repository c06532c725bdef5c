// One group of columns of a matrix that GPTQ quantizes: what ../gptq.py gives and takes. All widths ("tracks") of a
// container at once. Knows nothing of Python, threads or instruction sets.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ndp::gptq {

constexpr int kMaxBits = 4;

// All arrays are of this group's columns alone, [..., columns]. With E = W - Q of a track, what the other columns make of
// this group comes in as a product: GPTQ, E @ M of the columns before it; descent, E @ H of all columns.
struct Group {
    size_t rows, columns;  // columns: a multiple of 8
    int bits;              // of the codes
    float cost[kMaxBits];  // of an error at width 1, 2, ...; 0 for a width that is not made
    int track[kMaxBits];   // place of that width, -1 for none
    int sweeps;            // of refit and descent
    const float* weights;  // [rows, columns]
    float* product;        // [tracks, rows, columns]; replaced by E
    const float* square;   // [columns, columns], symmetric: the Hessian, or for GPTQ its Schur complement
    const float* feedback;    // [columns, columns] of GPTQ, null for descent: row c is what errors before c add to weight c
    const float* importance;  // [columns] of GPTQ: cost of a squared error once the columns behind answer it
    uint8_t* codes;           // [rows, columns]
    float *scale, *offset;    // [tracks, rows], as float16 holds them
};

// Floats of a thread's own room.
constexpr size_t room_floats(size_t columns) { return (5 * kMaxBits + 3) * 16 * (columns + 1); }

// What a build for one instruction set has. Both take rows first..last, and a room of room_floats().
struct Functions {
    void (*quantize)(const Group& group, size_t first, size_t last, float* room);
    void (*polish)(const Group& group, size_t first, size_t last, float* room);
};

extern const Functions portable;
#if defined(__x86_64__)
extern const Functions avx2;
extern const Functions avx512;
#endif

}  // namespace ndp::gptq
