// How a thread without Python asks which pairs of a layer go to the device (sender_thread.h); vllm_ndp/layer/csrc/split.cpp answers.
#pragma once

#include <cstdint>

namespace {

constexpr char kFinder[] = "ndp.Finder";  // name of the capsule that holds one

struct FoundPairs {
    uint64_t rows = 0, pairs = 0;
    const int32_t *local = nullptr, *experts = nullptr;  // [pairs]
    const uint8_t* bits = nullptr;
    const float* gates = nullptr;
};

// ids i32 and weights f32 [T, k] of a layer. False: this wants Python, and nothing was done.
struct Finder {
    bool (*find)(void* whose, int64_t layer, const int32_t* ids, const float* weights, FoundPairs& found);
    void* whose;
};

}  // namespace
