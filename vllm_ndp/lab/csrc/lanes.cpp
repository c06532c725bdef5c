// HOBBIT's two caches, which all layers share: each layer of each step depends on the one before. Exact doubles, one
// thread; hobbit.py is the user.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

#include "arrays.h"

namespace nb = nanobind;

namespace {

constexpr double kHighest = std::numeric_limits<double>::infinity();

template <class Array>
bool has_shape(const Array& array, std::initializer_list<size_t> shape) {
    size_t axis = 0;
    for (size_t size : shape)
        if (array.shape(axis++) != size) return false;
    return true;
}

template <class Ids>
void require_known(const Ids& ids, size_t num_experts) {
    for (size_t i = 0; i < ids.size(); ++i)
        want(ids.data()[i] >= 0 && ids.data()[i] < static_cast<int64_t>(num_experts), "expert ids must lie in 0..E-1");
}

// The lowest of some values; of equal ones the last.
size_t last_lowest(const double* values, size_t count) {
    double lowest[4] = {kHighest, kHighest, kHighest, kHighest};  // four at a time: each comparison waits for no other
    size_t i = 0;
    for (; i + 4 <= count; i += 4)
        for (size_t j = 0; j < 4; ++j) lowest[j] = values[i + j] < lowest[j] ? values[i + j] : lowest[j];
    for (; i < count; ++i) lowest[0] = std::min(lowest[0], values[i]);
    const double least = std::min(std::min(lowest[0], lowest[1]), std::min(lowest[2], lowest[3]));
    size_t at = count;
    while (at > 0 && values[at - 1] != least) --at;
    return at - 1;
}

// hobbit.py: one of HOBBIT's caches, which all layers of a group share. Experts are layer * E + id.
class SharedCache {
   public:
    SharedCache(size_t layers, size_t num_experts)
        : layers_(layers), num_experts_(num_experts), least_(layers), lowest_(layers) {}

    void begin(const bool* start, size_t places) {
        const size_t all = layers_ * num_experts_;
        held_.assign(start, start + all);
        leaving_.assign(all, kHighest);
        places_ = places;
        count_ = 0;
        for (size_t e = 0; e < all; ++e)
            if (held_[e]) leaving_[e] = 0.0, ++count_;
        for (size_t l = 0; l < layers_; ++l) look_at(l);
    }

    bool holds(size_t expert) const { return held_[expert]; }

    // Not thrown out before `unpin`. All of one layer.
    void pin(size_t expert, size_t layer) {
        leaving_[expert] = kHighest;
        pinned_.push_back(expert);
        is_lowest_pinned_ |= lowest_[layer] == expert;
    }

    // Takes the place of the expert of lowest value; is not kept where all others are pinned.
    void enter(size_t expert, size_t layer) {
        if (count_ == places_) {
            if (is_lowest_pinned_) look_at(layer), is_lowest_pinned_ = false;
            const size_t from = last_lowest(least_.data(), layers_);
            if (least_[from] == kHighest) return;
            held_[lowest_[from]] = 0, leaving_[lowest_[from]] = kHighest, --count_;
            look_at(from);
        }
        held_[expert] = 1, ++count_;  // and pinned: who enters is in use
    }

    void unpin(size_t layer, const std::vector<double>& value) {
        for (size_t expert : pinned_) {
            if (!held_[expert]) continue;
            const double own = leaving_[expert] = value[expert];
            if (own < least_[layer] || (own == least_[layer] && expert > lowest_[layer])) lowest_is(layer, expert);
        }
        pinned_.clear();
        if (is_lowest_pinned_) look_at(layer), is_lowest_pinned_ = false;
    }

   private:
    size_t layers_, num_experts_, places_ = 0, count_ = 0;
    std::vector<uint8_t> held_;
    std::vector<double> leaving_;  // what an expert is worth if it may leave, else above any
    std::vector<double> least_;    // the lowest of each layer
    std::vector<size_t> lowest_;   // and whose it is
    std::vector<size_t> pinned_;
    bool is_lowest_pinned_ = false;  // then the layer's lowest is to be looked for

    void look_at(size_t layer) {
        lowest_is(layer, layer * num_experts_ + last_lowest(leaving_.data() + layer * num_experts_, num_experts_));
    }

    void lowest_is(size_t layer, size_t expert) {
        lowest_[layer] = expert;
        least_[layer] = leaving_[expert];
    }
};

constexpr uint8_t kHit = 1, kLow = 2;

// A layer's choices are served in both caches. See hobbit.py.
void two_caches(In<int64_t, 4> experts, In<uint8_t, 4> need, In<bool, 2> high, In<bool, 2> low, int64_t high_places,
                int64_t low_places, In<double, 1> weights, Out<uint8_t, 4> flags) {
    const size_t groups = experts.shape(0), steps = experts.shape(1), layers = experts.shape(2);
    const size_t slots = experts.shape(3), num_experts = high.shape(1);
    want(has_shape(need, {groups, steps, layers, slots}) && has_shape(flags, {groups, steps, layers, slots}) &&
             has_shape(high, {layers, num_experts}) && has_shape(low, {layers, num_experts}) && has_shape(weights, {2}),
         "experts, need and flags must be [G, D, L, S], high and low [L, E], weights [2]");
    want(high_places >= 0 && low_places >= 0, "places must be at least 0");
    require_known(experts, num_experts);

    nb::gil_scoped_release release;
    const double* w = weights.data();
    SharedCache upper(layers, num_experts), lower(layers, num_experts);
    std::vector<double> value;
    for (size_t g = 0; g < groups; ++g) {
        upper.begin(high.data(), static_cast<size_t>(high_places));
        lower.begin(low.data(), static_cast<size_t>(low_places));
        value.assign(layers * num_experts, 0.0);
        for (size_t d = 0; d < steps; ++d) {
            for (size_t l = 0; l < layers; ++l) {
                const size_t cell = ((g * steps + d) * layers + l) * slots;
                const int64_t* ids = experts.data() + cell;
                const uint8_t* needs = need.data() + cell;
                uint8_t* flag = flags.data() + cell;
                for (size_t s = 0; s < slots; ++s) {
                    if (!needs[s]) continue;
                    const size_t e = l * num_experts + static_cast<size_t>(ids[s]);
                    value[e] += w[0] + (needs[s] == 1 ? w[1] : 0.0);
                    upper.pin(e, l), lower.pin(e, l);
                }
                for (size_t s = 0; s < slots; ++s) {
                    flag[s] = 0;
                    if (!needs[s]) continue;
                    const size_t e = l * num_experts + static_cast<size_t>(ids[s]);
                    if (upper.holds(e)) {
                        flag[s] = kHit;
                    } else if (needs[s] == 1) {
                        upper.enter(e, l);
                    } else if (lower.holds(e)) {
                        flag[s] = kHit | kLow;
                    } else {
                        flag[s] = kLow;
                        lower.enter(e, l);
                    }
                }
                upper.unpin(l, value), lower.unpin(l, value);
            }
        }
    }
}

}  // namespace

void add_stacks(nb::module_& module);  // stacks.cpp

NB_MODULE(_lanes, module) {
    add_stacks(module);
    module.def("two_caches", &two_caches, nb::arg("experts"), nb::arg("need"), nb::arg("high"), nb::arg("low"),
               nb::arg("high_places"), nb::arg("low_places"), nb::arg("weights"), nb::arg("flags"));
}
