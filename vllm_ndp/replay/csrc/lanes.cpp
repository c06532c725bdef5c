// What replay does step by step because each step depends on the one before: expert caches, and a hot set that follows
// decode; and the search for what balances a layer. A lane is one layer of one group of requests. Exact doubles, no
// randomness but a hash, one thread; cache.py, adaptive.py and balanced.py are the users,
// tests/vllm_ndp/replay/lane_reference.py is the same in numpy.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace {

template <class T, size_t N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, size_t N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

constexpr uint8_t kHit = 1, kPredicted = 2, kKept = 4;
constexpr double kNever = -1e6;
constexpr double kInUse = 1e9;  // above any priority: experts in use come before all others

struct Lane {
    std::vector<double> last_used, frequency;
    std::vector<double> last_wanted;  // used, or brought in ahead of the next step: rows below 0
    std::vector<uint8_t> cached;
    std::vector<int64_t> held;  // the experts marked in cached, in any order
    std::vector<size_t> place;  // of each of them in held

    void hold(int64_t expert) {
        cached[expert] = 1;
        place[expert] = held.size();
        held.push_back(expert);
    }

    void drop(int64_t expert) {
        cached[expert] = 0;
        held[place[expert]] = held.back();
        place[held.back()] = place[expert];
        held.pop_back();
    }
};

void want(bool holds, const char* sentence) {
    if (!holds) throw std::invalid_argument(sentence);
}

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

uint64_t scrambled(uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Whether an expert is among the `most` of highest key; of equal keys the lower id is higher.
bool among_highest(int64_t expert, int64_t most, const std::vector<double>& keys) {
    const double own = keys[expert];
    int64_t above = 0;
    for (double key : keys) above += key > own;
    for (int64_t other = 0; other < expert; ++other) above += keys[other] == own;
    return above < most;
}

// Holds the experts in use in step `now` and those of highest key, as far as the places go. Of equal ones the higher id
// leaves.
template <class Key>
void bring_in(Lane& lane, const int64_t* experts, const int64_t* rows, size_t slots, size_t places, double now,
              const Key& key, std::vector<std::pair<double, int64_t>>& lowest) {
    for (size_t s = 0; s < slots; ++s)
        if (rows[s] && !lane.cached[experts[s]]) lane.hold(experts[s]);
    if (lane.held.size() <= places) return;
    const size_t leaving = lane.held.size() - places;
    lowest.clear();  // a heap of those, the highest on top: most experts are above it and cost one comparison
    for (int64_t e : lane.held) {
        const std::pair<double, int64_t> own{key(e) + (lane.last_wanted[e] == now ? kInUse : 0.0), -e};
        if (lowest.size() < leaving) {
            lowest.push_back(own);
        } else if (own < lowest.front()) {
            std::pop_heap(lowest.begin(), lowest.end());
            lowest.back() = own;
        } else {
            continue;
        }
        std::push_heap(lowest.begin(), lowest.end());
    }
    for (const auto& [value, id] : lowest) lane.drop(-id);
}

struct Visit {
    In<int64_t, 4> experts, rows;  // [G, D, L, S]; rows below 0: brought in ahead, used by none
    In<bool, 3> start;             // [G, L, E]
    In<double, 3> frequency;       // [G, L, E]
    In<int64_t, 1> places;         // [L]
    int64_t predict;
    Out<uint8_t, 4> flags;  // [G, D, L, S]

    // key(lane, layer, step) -> function of an expert
    template <class KeyOf>
    void run(const KeyOf& key_of) const {
        const size_t groups = experts.shape(0), steps = experts.shape(1), layers = experts.shape(2);
        const size_t slots = experts.shape(3), num_experts = start.shape(2);
        Lane lane;
        std::vector<std::pair<double, int64_t>> lowest;
        std::vector<double> keys(predict ? num_experts : 0);
        for (size_t g = 0; g < groups; ++g) {
            for (size_t l = 0; l < layers; ++l) {  // a lane to its end: what it remembers stays in the processor's cache
                begin(lane, (g * layers + l) * num_experts, num_experts);
                for (size_t d = 0; d < steps; ++d) {
                    const size_t cell = ((g * steps + d) * layers + l) * slots;
                    const int64_t *ids = experts.data() + cell, *count = rows.data() + cell;
                    uint8_t* flag = flags.data() + cell;
                    const double now = static_cast<double>(d);
                    const auto key = key_of(lane, g * layers + l, l, d);
                    bool missing = false;
                    for (size_t s = 0; s < slots; ++s) {
                        flag[s] = count[s] && lane.cached[ids[s]] ? kHit : 0;
                        missing |= count[s] && !lane.cached[ids[s]];
                    }
                    if (missing && predict) {
                        for (size_t e = 0; e < num_experts; ++e) keys[e] = key(static_cast<int64_t>(e));
                        for (size_t s = 0; s < slots; ++s)
                            if (count[s] && !lane.cached[ids[s]] && among_highest(ids[s], predict, keys))
                                flag[s] |= kPredicted;
                    }
                    for (size_t s = 0; s < slots; ++s) {
                        if (!count[s]) continue;
                        lane.last_wanted[ids[s]] = now;
                        if (count[s] < 0) continue;
                        lane.last_used[ids[s]] = now;
                        lane.frequency[ids[s]] += static_cast<double>(count[s]);
                    }
                    if (missing && places.data()[l])
                        bring_in(lane, ids, count, slots, places.data()[l], now, key, lowest);
                    for (size_t s = 0; s < slots; ++s)
                        if (lane.cached[ids[s]]) flag[s] |= kKept;
                }
            }
        }
    }

    void begin(Lane& lane, size_t at, size_t num_experts) const {
        lane.last_used.assign(num_experts, kNever);
        lane.last_wanted.assign(num_experts, kNever);
        lane.frequency.assign(frequency.data() + at, frequency.data() + at + num_experts);
        lane.cached.assign(start.data() + at, start.data() + at + num_experts);
        lane.held.clear();
        lane.place.assign(num_experts, 0);
        for (size_t e = 0; e < num_experts; ++e)
            if (lane.cached[e]) lane.hold(static_cast<int64_t>(e));
    }
};

void visit(In<int64_t, 4> experts, In<int64_t, 4> rows, In<bool, 3> start, In<double, 3> frequency,
           In<int64_t, 1> places, const std::string& priority, In<double, 1> parameters, int64_t predict,
           Out<uint8_t, 4> flags) {
    const size_t groups = experts.shape(0), steps = experts.shape(1), layers = experts.shape(2);
    const size_t slots = experts.shape(3), num_experts = start.shape(2);
    want(has_shape(rows, {groups, steps, layers, slots}) && has_shape(flags, {groups, steps, layers, slots}) &&
             has_shape(start, {groups, layers, num_experts}) && has_shape(frequency, {groups, layers, num_experts}) &&
             has_shape(places, {layers}),
         "experts, rows and flags must be [G, D, L, S], start and frequency [G, L, E], places [L]");
    require_known(experts, num_experts);
    for (size_t l = 0; l < layers; ++l) want(places.data()[l] >= 0, "places must be at least 0");

    const Visit work{experts, rows, start, frequency, places, predict, flags};
    const double* p = parameters.data();
    const size_t count = parameters.size();
    nb::gil_scoped_release release;
    if (priority == "lru") {
        work.run([](const Lane& lane, size_t, size_t, size_t) { return [&](int64_t e) { return lane.last_used[e]; }; });
    } else if (priority == "lfu") {  // ties go to the one used last
        work.run([](const Lane& lane, size_t, size_t, size_t) {
            return [&](int64_t e) { return lane.frequency[e] + 1e-7 * (lane.last_used[e] - kNever); };
        });
    } else if (priority == "faded") {
        want(count > 0, "faded needs what a frequency is worth after 0, 1, ... steps");
        work.run([=](const Lane& lane, size_t, size_t, size_t d) {
            return [&lane, p, count, d](int64_t e) {
                const double since = static_cast<double>(d) - lane.last_used[e];
                const double longest = static_cast<double>(count - 1);
                return lane.frequency[e] * p[static_cast<size_t>(std::min(since, longest))];
            };
        });
    } else if (priority == "mixed") {
        want(count == 2, "mixed needs the weights of recency and frequency");
        work.run([=](const Lane& lane, size_t, size_t, size_t d) {
            return [&lane, p, steps = std::max<double>(d, 1)](int64_t e) {
                return p[0] * (std::max(lane.last_used[e], 0.0) / steps) + p[1] * lane.frequency[e] / steps;
            };
        });
    } else if (priority == "expected") {
        want(count == layers * num_experts, "expected needs a frequency known beforehand per layer and expert");
        work.run([=](const Lane& lane, size_t, size_t l, size_t) {
            return [&lane, known = p + l * num_experts](int64_t e) { return lane.frequency[e] + known[e]; };
        });
    } else if (priority == "random") {
        work.run([=](const Lane&, size_t lane, size_t, size_t d) {
            return [seed = scrambled(scrambled(lane) ^ d)](int64_t e) {
                return static_cast<double>(scrambled(seed ^ static_cast<uint64_t>(e)) >> 11);
            };
        });
    } else {
        throw std::invalid_argument("priority must be lru, lfu, faded, mixed, expected or random, got " + priority);
    }
}

// adaptive.py's rule for the hot set of each group: one exchange at a time while the link is idle. Returns how many.
int64_t follow(In<int64_t, 5> ids, In<int64_t, 4> experts, In<int64_t, 4> rows, In<double, 1> copies_per_step,
               double memory, double hysteresis, Out<double, 3> heat, Out<bool, 3> hot, Out<uint8_t, 4> bits,
               Out<uint8_t, 5> widths) {
    const size_t groups = ids.shape(0), requests = ids.shape(1), steps = ids.shape(2), layers = ids.shape(3);
    const size_t k = ids.shape(4), slots = experts.shape(3), num_experts = heat.shape(2);
    want(has_shape(widths, {groups, requests, steps, layers, k}) && has_shape(copies_per_step, {groups}) &&
             has_shape(experts, {groups, steps, layers, slots}) && has_shape(rows, {groups, steps, layers, slots}) &&
             has_shape(heat, {groups, layers, num_experts}) && has_shape(hot, {groups, layers, num_experts}) &&
             has_shape(bits, {groups, requests, layers, num_experts}),
         "ids and widths must be [G, B, D, L, k], experts and rows [G, D, L, S], heat and hot [G, L, E], "
         "bits [G, B, L, E]");
    require_known(experts, num_experts);
    require_known(ids, num_experts);

    nb::gil_scoped_release release;
    const double kept = 1.0 - 1.0 / memory;
    int64_t copied = 0;
    for (size_t g = 0; g < groups; ++g) {
        double* group_heat = heat.data() + g * layers * num_experts;
        bool* group_hot = hot.data() + g * layers * num_experts;
        double credit = 0.0;
        for (size_t d = 0; d < steps; ++d) {
            for (size_t b = 0; b < requests; ++b) {
                const size_t row = ((g * requests + b) * steps + d) * layers * k;
                const uint8_t* plan = bits.data() + (g * requests + b) * layers * num_experts;
                for (size_t l = 0; l < layers; ++l)
                    for (size_t j = row + l * k; j < row + (l + 1) * k; ++j)
                        widths.data()[j] = plan[l * num_experts + ids.data()[j]];
            }
            for (size_t i = 0; i < layers * num_experts; ++i) group_heat[i] *= kept;
            bool running = false;
            for (size_t l = 0; l < layers; ++l) {
                const size_t cell = ((g * steps + d) * layers + l) * slots;
                for (size_t s = cell; s < cell + slots; ++s) {
                    group_heat[l * num_experts + experts.data()[s]] += static_cast<double>(rows.data()[s]);
                    running |= rows.data()[s] > 0;
                }
            }
            credit = std::min(credit + copies_per_step.data()[g], 1.0);
            if (credit < 1.0 || !running) continue;
            double best = 0.0;
            size_t at = 0, coming = 0, leaving = 0;
            for (size_t l = 0; l < layers; ++l) {
                const double* h = group_heat + l * num_experts;
                size_t hottest = num_experts, coldest = num_experts;  // of the cold, of the hot
                for (size_t e = 0; e < num_experts; ++e) {
                    if (group_hot[l * num_experts + e]) {
                        if (coldest == num_experts || h[e] < h[coldest]) coldest = e;
                    } else if (hottest == num_experts || h[e] > h[hottest]) {
                        hottest = e;
                    }
                }
                if (hottest == num_experts || coldest == num_experts) continue;
                const double gain = h[hottest] - (1 + hysteresis) * h[coldest];
                if (gain > best) best = gain, at = l, coming = hottest, leaving = coldest;
            }
            if (best <= 0.0) continue;
            group_hot[at * num_experts + coming] = true;
            group_hot[at * num_experts + leaving] = false;
            for (size_t b = 0; b < requests; ++b) {
                uint8_t* plan = bits.data() + ((g * requests + b) * layers + at) * num_experts;
                plan[leaving] = plan[coming];
                plan[coming] = 0;
            }
            credit = 0.0;
            ++copied;
        }
    }
    return copied;
}

// balanced.py's rule, the same as balance.py's: of each layer's hot experts, those of least gate weight run on the device,
// as many as make max(GPU, device) smallest, fewer where equal. Marks them in spilled.
void spill(In<int64_t, 4> rows, In<double, 4> gates, In<double, 3> already, In<double, 1> device, In<double, 1> gpu,
           In<double, 2> shared, double opening, Out<bool, 4> spilled) {
    const size_t groups = rows.shape(0), steps = rows.shape(1), layers = rows.shape(2), slots = rows.shape(3);
    want(has_shape(gates, {groups, steps, layers, slots}) && has_shape(already, {groups, steps, layers}) &&
             has_shape(spilled, {groups, steps, layers, slots}) && has_shape(shared, {groups, steps}) &&
             device.size() == gpu.size(),
         "rows, gates and spilled must be [G, D, L, S], already [G, D, L], shared [G, D], device and gpu [rows + 1]");
    const int64_t most = static_cast<int64_t>(device.size()) - 1;
    for (size_t i = 0; i < rows.size(); ++i)
        want(rows.data()[i] >= 0 && rows.data()[i] <= most, "device and gpu must have an entry for every number of rows");

    nb::gil_scoped_release release;
    std::vector<size_t> order;
    std::vector<double> left;  // GPU time of order[n:], for every n
    for (size_t cell = 0; cell < groups * steps * layers; ++cell) {
        const int64_t* count = rows.data() + cell * slots;
        const double* gate = gates.data() + cell * slots;
        order.clear();
        for (size_t s = 0; s < slots; ++s)
            if (count[s]) order.push_back(s);
        if (order.empty()) continue;
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return gate[a] < gate[b]; });
        left.assign(order.size() + 1, shared.data()[cell / layers]);
        for (size_t n = order.size(); n-- > 0;) left[n] = left[n + 1] + gpu.data()[count[order[n]]];
        const double before = already.data()[cell], message = before == 0.0 ? opening : 0.0;
        double least = std::max(left[0], before), moved = 0.0;
        size_t best = 0;
        for (size_t n = 1; n <= order.size(); ++n) {
            moved += device.data()[count[order[n - 1]]];
            const double layer = std::max(left[n], before + moved + message);
            if (layer < least) least = layer, best = n;
        }
        for (size_t n = 0; n < best; ++n) spilled.data()[cell * slots + order[n]] = true;
    }
}

}  // namespace

NB_MODULE(_lanes, module) {
    module.def("visit", &visit, nb::arg("experts"), nb::arg("rows"), nb::arg("start"), nb::arg("frequency"),
               nb::arg("places"), nb::arg("priority"), nb::arg("parameters"), nb::arg("predict"), nb::arg("flags"));
    module.def("follow", &follow, nb::arg("ids"), nb::arg("experts"), nb::arg("rows"), nb::arg("copies_per_step"),
               nb::arg("memory"), nb::arg("hysteresis"), nb::arg("heat"), nb::arg("hot"), nb::arg("bits"),
               nb::arg("widths"));
    module.def("spill", &spill, nb::arg("rows"), nb::arg("gates"), nb::arg("already"), nb::arg("device"), nb::arg("gpu"),
               nb::arg("shared"), nb::arg("opening"), nb::arg("spilled"));
}
