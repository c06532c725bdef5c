// How many hot experts of a decode layer run on the device instead: the rule of layer/balance.py, to the bit, once
// for the split of a layer and for the lab's whole traces. Knows times in ps. Does not know experts, prices or arrays.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

struct LayerTimes {
    double shared;        // the GPU, whatever becomes of hot experts
    double device;        // cold experts, with their message
    double opening;       // the message, where only offloaded experts need one
    double host = 0.0;    // warm experts: nothing is gained below it
    double beside = 1.0;  // how much of the shorter side, GPU or device, is over while the longer one runs

    double together(double gpu, double there) const {
        return std::max(std::max(gpu, there) + (1 - beside) * std::min(gpu, there), host);
    }
};

// The fewest of num_hot experts, lightest first, that make the layer shortest. gpu(n) and device(n): what the n-th
// lightest takes on either side. left: scratch.
template <class Gpu, class Device>
size_t fewest_offloaded(size_t num_hot, const LayerTimes& layer, std::vector<double>& left, Gpu gpu, Device device) {
    left.assign(num_hot + 1, layer.shared);  // on the GPU without the n lightest, for every n
    for (size_t n = num_hot; n-- > 0;) left[n] = left[n + 1] + gpu(n);
    double least = layer.together(left[0], layer.device), moved = 0.0;
    size_t best = 0;
    for (size_t n = 1; n <= num_hot; ++n) {
        moved += device(n - 1);
        const double took = layer.together(left[n], layer.device + moved + layer.opening);
        if (took < least) least = took, best = n;
    }
    return best;
}
