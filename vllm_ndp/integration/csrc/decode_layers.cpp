// One MoE layer of a step with few decode rows, in one call: write the router's choices beside the KV cache, split the
// pairs into hot and cold, decide which hot experts the device takes over, lay out the device's message, count, and move
// the simulated clock. pairs.py, simulation/balance.py and simulation/gpu_timing.py say the same in Python, for any
// number of rows; tests/integration/test_decode_layers.py holds the two equal to the bit and to the picosecond.
// Knows arrays and prices. Does not know requests, policies, tensors or the device. One thread, which holds the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;

namespace {

template <class T, size_t N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, size_t N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kMostPairs = 128;  // of a layer, in one step
constexpr int64_t kAliasPairs = 32;  // as hot_slots.ALIAS_PAIRS: with more, hot pairs are listed, not aliased

void want(bool holds, const char* sentence) {
    if (!holds) throw std::invalid_argument(sentence);
}

float widened(uint16_t bfloat16) {
    const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint16_t rounded(float value) {  // to bfloat16, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // not a number
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

struct Expert {  // an expert of this layer that some row asked for
    int64_t id, rows;
    double weight;  // of all rows
};

struct Cold {
    int64_t expert, rows;
    uint8_t bits;
};

// What offloading is decided from; prices in simulated ps.
struct Prices {
    uint8_t offload_bits = 0;
    std::vector<double> gpu;      // [rows], a hot expert
    std::vector<double> message;  // [rows, pairs]
    std::vector<double> device;   // [bits, rows], NaN until somebody asked
    nb::object ask_device;        // (bits, rows) -> ps

    double of_message(int64_t rows, int64_t pairs) const { return message[rows * (kMostPairs + 1) + pairs]; }
    double of_device(uint8_t bits, int64_t rows) {
        double& price = device[bits * (kMostPairs + 1) + rows];
        if (std::isnan(price)) price = nb::cast<double>(ask_device(static_cast<int>(bits), rows));
        return price;
    }
};

class DecodeLayers {
   public:
    DecodeLayers(Out<int16_t, 3> routing_ids, Out<float, 3> routing_weights, std::vector<In<int32_t, 1>> expert_maps,
                 In<int64_t, 2> hot_ps, int64_t overhead_ps, Out<int32_t, 1> slots, Out<float, 1> topk_weights,
                 Out<int64_t, 1> sent_rows, Out<int32_t, 1> pair_rows, Out<int32_t, 1> pair_experts,
                 Out<uint8_t, 1> pair_bits, Out<float, 1> pair_weights, Out<uint8_t, 2> activations,
                 Out<int64_t, 1> hot_rows, bool weighs_input)
        : routing_ids_(std::move(routing_ids)),
          routing_weights_(std::move(routing_weights)),
          maps_(std::move(expert_maps)),
          overhead_ps_(overhead_ps),
          slots_(std::move(slots)),
          weights_(std::move(topk_weights)),
          sent_rows_(std::move(sent_rows)),
          pair_rows_(std::move(pair_rows)),
          pair_experts_(std::move(pair_experts)),
          pair_bits_(std::move(pair_bits)),
          pair_weights_(std::move(pair_weights)),
          activations_(std::move(activations)),
          hot_rows_(std::move(hot_rows)),
          weighs_input_(weighs_input) {
        num_layers_ = routing_ids_.shape(0);
        num_entries_ = routing_ids_.shape(1);
        top_k_ = routing_ids_.shape(2);
        for (size_t axis = 0; axis < 3; ++axis)
            want(routing_weights_.shape(axis) == routing_ids_.shape(axis), "routing ids and weights must be [L, N, k]");
        want(num_layers_ > 0 && maps_.size() == static_cast<size_t>(num_layers_), "one expert map per layer is needed");
        want(top_k_ > 0 && top_k_ <= kMostPairs, "top_k must lie in 1..128");
        num_experts_ = maps_[0].shape(0);
        for (const auto& map : maps_)
            want(map.shape(0) == static_cast<size_t>(num_experts_), "every expert map must be [E]");
        want(num_experts_ <= INT16_MAX, "expert ids must fit 16 bits");
        want(hot_ps.shape(0) == kMostPairs + 1 && hot_ps.shape(1) == kMostPairs + 1, "hot_ps must be [129, 129]");
        hot_ps_.assign(hot_ps.data(), hot_ps.data() + hot_ps.size());
        for (size_t size : {slots_.size(), weights_.size(), sent_rows_.size(), pair_rows_.size(), pair_experts_.size(),
                            pair_bits_.size(), pair_weights_.size(), hot_rows_.size(), activations_.shape(0)})
            want(size == kMostPairs, "outputs must have 128 entries");
        place_.assign(num_experts_, -1);
        slot_seen_.assign(num_experts_, 0);
        offloaded_.assign(num_experts_, 0);
    }

    void price(int offload_bits, In<double, 1> gpu_ps, In<double, 2> message_ps, nb::object device_ps) {
        want(offload_bits > 0 && offload_bits < 256, "offload_bits must fit a byte");
        want(gpu_ps.size() == kMostPairs + 1, "gpu_ps must be [129]");
        want(message_ps.shape(0) == kMostPairs + 1 && message_ps.shape(1) == kMostPairs + 1,
             "message_ps must be [129, 129]");
        prices_.offload_bits = static_cast<uint8_t>(offload_bits);
        prices_.gpu.assign(gpu_ps.data(), gpu_ps.data() + gpu_ps.size());
        prices_.message.assign(message_ps.data(), message_ps.data() + message_ps.size());
        prices_.device.assign(256 * (kMostPairs + 1), std::nan(""));
        prices_.ask_device = std::move(device_ps);
    }

    void begin_step(const std::vector<int64_t>& entries, const std::vector<int64_t>& owners,
                    std::vector<In<uint8_t, 2>> bits, int64_t now_ps, std::vector<int64_t> before_ps,
                    int64_t shared_ps) {
        want(!entries.empty() && static_cast<int64_t>(entries.size()) * top_k_ <= kMostPairs,
             "a step needs 1..128 pairs per layer");
        want(owners.size() == entries.size(), "every row needs an owner");
        want(before_ps.size() == static_cast<size_t>(num_layers_), "before_ps must be [L]");
        for (int64_t entry : entries) want(entry >= 0 && entry < num_entries_, "a KV entry lies outside the cache");
        for (int64_t owner : owners)
            want(owner >= 0 && owner < static_cast<int64_t>(bits.size()), "an owner has no plan");
        for (const auto& plan : bits)
            want(plan.shape(0) == static_cast<size_t>(num_layers_) &&
                     plan.shape(1) == static_cast<size_t>(num_experts_),
                 "bits must be [L, E]");
        entries_ = entries;
        owners_ = owners;
        bits_ = std::move(bits);
        counts_.assign(bits_.size() * 3, 0);
        now_ps_ = now_ps;
        before_ps_ = std::move(before_ps);
        shared_ps_ = shared_ps;
        waiting_ = false;
    }

    // ids i32 [T, k] and router weights f32 [T, k], contiguous, by address: an array argument costs more than the
    // layer. Returns how many pairs the device is to compute; without any, the layer's clock is done.
    int64_t split(int64_t layer, uintptr_t topk_ids, uintptr_t topk_weights, bool offload) {
        if (waiting_ || entries_.empty())
            throw std::runtime_error("split: once per layer, between begin_step and end_layer");
        want(layer >= 0 && layer < num_layers_, "no such layer");
        want(!offload || prices_.offload_bits, "offloading needs prices");
        const auto* ids = reinterpret_cast<const int32_t*>(topk_ids);
        const auto* weights = reinterpret_cast<const float*>(topk_weights);
        const int64_t pairs = static_cast<int64_t>(entries_.size()) * top_k_;
        for (int64_t i = 0; i < pairs; ++i)
            want(ids[i] >= 0 && ids[i] < num_experts_, "expert ids must lie in 0..E-1");
        layer_ = layer;
        note(ids, weights);
        for (int64_t expert : moved_) offloaded_[expert] = 0;
        moved_.clear();
        if (offload) decide(ids, weights);
        is_listed() ? list(ids, weights) : alias(ids, weights);
        submit_ps_ = now_ps_ + before_ps_[layer];
        waiting_ = num_cold_ > 0;
        if (!waiting_) now_ps_ = submit_ps_ + hot_layer_ps_ + overhead_ps_;
        return num_cold_;
    }

    // Rows of x that the message needs, one after the other.
    void gather(uintptr_t x, int64_t row_bytes) {
        want(row_bytes > 0 && row_bytes <= static_cast<int64_t>(activations_.shape(1)), "rows of x are too long");
        for (int64_t i = 0; i < num_sent_; ++i)
            std::memcpy(activations_.data() + i * row_bytes,
                        reinterpret_cast<const uint8_t*>(x) + sent_rows_.data()[i] * row_bytes, row_bytes);
    }

    // Add the device's partial sums f32 [sent, H] to the rows that were sent, as torch's add_ (every row was sent) and
    // index_add_ (some were: what is added is rounded first) do. out: [T, H], bfloat16 or float32.
    void add(uintptr_t out, In<float, 2> sums, bool bfloat16) const {
        want(static_cast<int64_t>(sums.shape(0)) == num_sent_, "a sum for every row that was sent is needed");
        const auto hidden = static_cast<int64_t>(sums.shape(1));
        const bool some = num_sent_ < static_cast<int64_t>(entries_.size());
        for (int64_t i = 0; i < num_sent_; ++i) {
            const float* sum = sums.data() + i * hidden;
            const int64_t at = sent_rows_.data()[i] * hidden;
            if (!bfloat16) {
                float* row = reinterpret_cast<float*>(out) + at;
                for (int64_t j = 0; j < hidden; ++j) row[j] += sum[j];
                continue;
            }
            uint16_t* row = reinterpret_cast<uint16_t*>(out) + at;
            for (int64_t j = 0; j < hidden; ++j)
                row[j] = rounded(widened(row[j]) + (some ? widened(rounded(sum[j])) : sum[j]));
        }
    }

    void end_layer(int64_t device_ps, int64_t stream_ps, bool answered) {
        if (!waiting_) throw std::runtime_error("end_layer: split must come first and find a pair for the device");
        waiting_ = false;
        now_ps_ = submit_ps_ + std::max({hot_layer_ps_, stream_ps, device_ps}) + overhead_ps_;
        for (int64_t i = 0; i < num_cold_; ++i) {
            const int64_t owner = owners_[sent_rows_.data()[pair_rows_.data()[i]]];
            ++counts_[owner * 3 + (answered ? (pair_offloaded_[i] ? 1 : 0) : 2)];
        }
    }

    std::vector<std::vector<int64_t>> counts() const {
        std::vector<std::vector<int64_t>> found;
        for (size_t i = 0; i < counts_.size(); i += 3) found.push_back({counts_[i], counts_[i + 1], counts_[i + 2]});
        return found;
    }

    std::vector<int64_t> moved() const {
        std::vector<int64_t> sorted(moved_);
        std::sort(sorted.begin(), sorted.end());
        return sorted;
    }

    int64_t now_ps() const { return now_ps_; }
    int64_t submit_ps() const { return submit_ps_; }
    bool is_listed() const { return static_cast<int64_t>(entries_.size()) * top_k_ > kAliasPairs; }
    int64_t num_hot() const { return num_hot_; }
    int64_t num_sent() const { return num_sent_; }
    int64_t num_columns() const { return num_columns_; }
    const std::vector<int64_t>& idle_rows() const { return idle_rows_; }

   private:
    uint8_t planned(int64_t row, int64_t expert) const {
        return bits_[owners_[row]].data()[layer_ * num_experts_ + expert];
    }

    void note(const int32_t* ids, const float* weights) {
        for (size_t row = 0; row < entries_.size(); ++row) {
            const int64_t at = (layer_ * num_entries_ + entries_[row]) * top_k_;
            for (int64_t column = 0; column < top_k_; ++column)
                routing_ids_.data()[at + column] = static_cast<int16_t>(ids[row * top_k_ + column]);
            std::memcpy(routing_weights_.data() + at, weights + row * top_k_, top_k_ * sizeof(float));
        }
    }

    // LayerLoad and Balancer.offloaded: the same additions in the same order.
    void decide(const int32_t* ids, const float* weights) {
        const int32_t* map = maps_[layer_].data();
        hot_.clear();
        cold_.clear();
        int64_t rows = 0, pairs = 0;
        for (int64_t row = 0; row < static_cast<int64_t>(entries_.size()); ++row) {
            const int64_t before = pairs;
            for (int64_t i = row * top_k_; i < (row + 1) * top_k_; ++i) {
                const int32_t expert = ids[i];
                if (map[expert] >= 0) {
                    if (place_[expert] < 0) {
                        place_[expert] = static_cast<int64_t>(hot_.size());
                        hot_.push_back({expert, 0, 0.0});
                    }
                    Expert& seen = hot_[place_[expert]];
                    ++seen.rows;
                    seen.weight += static_cast<double>(weights[i]);
                    continue;
                }
                const uint8_t bits = planned(row, expert);
                const auto same = [&](const Cold& c) { return c.expert == expert && c.bits == bits; };
                const auto found = std::find_if(cold_.begin(), cold_.end(), same);
                if (found == cold_.end())
                    cold_.push_back({expert, 1, bits});
                else
                    ++found->rows;
                ++pairs;
            }
            rows += pairs > before;
        }
        for (const Expert& expert : hot_) place_[expert.id] = -1;
        if (hot_.empty()) return;
        if (is_listed())  // as of_arrays has them; of_lists in the order of the rows
            std::sort(cold_.begin(), cold_.end(), [](const Cold& a, const Cold& b) {
                return a.expert < b.expert || (a.expert == b.expert && a.bits < b.bits);
            });
        double device_ps = 0.0;
        for (const Cold& cold : cold_) device_ps += prices_.of_device(cold.bits, cold.rows);
        if (!cold_.empty()) device_ps += prices_.of_message(rows, pairs);
        for (size_t i = 1; i < hot_.size(); ++i)  // least weight first; insertion: any weights give some order
            for (size_t j = i; j > 0 && before(hot_[j], hot_[j - 1]); --j) std::swap(hot_[j], hot_[j - 1]);
        gpu_ps_.assign(1, static_cast<double>(shared_ps_));  // and of the heaviest 0, 1, ... experts
        for (size_t i = hot_.size(); i-- > 0;) gpu_ps_.push_back(gpu_ps_.back() + prices_.gpu[hot_[i].rows]);
        const double opening = cold_.empty() ? prices_.of_message(1, 1) : 0.0;
        double best_ps = std::max(gpu_ps_.back(), device_ps), moved_ps = 0.0;
        size_t best = 0;
        for (size_t count = 1; count <= hot_.size(); ++count) {
            moved_ps += prices_.of_device(prices_.offload_bits, hot_[count - 1].rows);
            const double layer_ps = std::max(gpu_ps_[hot_.size() - count], device_ps + moved_ps + opening);
            if (layer_ps < best_ps) {
                best = count;
                best_ps = layer_ps;
            }
        }
        for (size_t i = 0; i < best; ++i) {
            moved_.push_back(hot_[i].id);
            offloaded_[hot_[i].id] = 1;
        }
    }

    static bool before(const Expert& a, const Expert& b) {
        return a.weight < b.weight || (a.weight == b.weight && a.id < b.id);
    }

    void begin_layout() {
        num_hot_ = num_cold_ = num_sent_ = touched_ = 0;
        ++stamp_;
        idle_rows_.clear();
    }

    void add_hot(int32_t slot) {
        want(slot < num_experts_, "a hot slot lies outside the layer");
        touched_ += slot_seen_[slot] != stamp_;
        slot_seen_[slot] = stamp_;
        ++num_hot_;
    }

    void add_cold(int64_t row, int32_t expert, float weight) {
        if (!num_sent_ || sent_rows_.data()[num_sent_ - 1] != row) sent_rows_.data()[num_sent_++] = row;
        uint8_t bits = planned(row, expert);
        if (!moved_.empty() && bits == 0) bits = prices_.offload_bits;
        pair_rows_.data()[num_cold_] = static_cast<int32_t>(num_sent_ - 1);
        pair_experts_.data()[num_cold_] = expert;
        pair_bits_.data()[num_cold_] = bits;
        pair_weights_.data()[num_cold_] = weight;
        pair_offloaded_[num_cold_++] = offloaded_[expert];
    }

    void end_layout() { hot_layer_ps_ = shared_ps_ + hot_ps_[touched_ * (kMostPairs + 1) + num_hot_]; }

    // pairs.split_lists: as many columns as the row with most hot pairs has. A row with fewer gets a hot slot that it
    // reads anyway, with weight 0; a row without any gets another row's and is idle.
    void alias(const int32_t* ids, const float* weights) {
        const int32_t* map = maps_[layer_].data();
        const auto slot_of = [&](int64_t i) { return offloaded_[ids[i]] ? -1 : map[ids[i]]; };
        const auto num_rows = static_cast<int64_t>(entries_.size());
        begin_layout();
        num_columns_ = 1;
        for (int64_t row = 0; row < num_rows; ++row) {
            int64_t hot = 0;
            for (int64_t i = row * top_k_; i < (row + 1) * top_k_; ++i) hot += slot_of(i) >= 0;
            num_columns_ = std::max(num_columns_, hot);
        }
        int32_t* slots = slots_.data();
        float* applied = weights_.data();
        int32_t another = -1;
        for (int64_t row = 0; row < num_rows; ++row, slots += num_columns_, applied += num_columns_) {
            int64_t hot = 0;
            for (int64_t i = row * top_k_; i < (row + 1) * top_k_; ++i) {
                const int32_t slot = slot_of(i);
                const float weight = weighs_input_ ? 1.0f : weights[i];
                if (slot < 0) {
                    add_cold(row, ids[i], weight);
                    continue;
                }
                if (another < 0) another = slot;
                slots[hot] = slot;
                applied[hot++] = weight;
                add_hot(slot);
            }
            if (!hot) idle_rows_.push_back(row);
            std::fill(slots + hot, slots + num_columns_, hot ? *std::max_element(slots, slots + hot) : -1);
            std::fill(applied + hot, applied + num_columns_, 0.0f);
        }
        for (int64_t row : idle_rows_) std::fill_n(slots_.data() + row * num_columns_, num_columns_, another);
        end_layout();
    }

    // pairs.split_arrays: the hot pairs one after the other, and the row of each.
    void list(const int32_t* ids, const float* weights) {
        const int32_t* map = maps_[layer_].data();
        begin_layout();
        num_columns_ = top_k_;
        for (int64_t row = 0; row < static_cast<int64_t>(entries_.size()); ++row)
            for (int64_t i = row * top_k_; i < (row + 1) * top_k_; ++i) {
                const int32_t slot = offloaded_[ids[i]] ? -1 : map[ids[i]];
                const float weight = weighs_input_ ? 1.0f : weights[i];
                if (slot < 0) {
                    add_cold(row, ids[i], weight);
                    continue;
                }
                slots_.data()[num_hot_] = slot;
                weights_.data()[num_hot_] = weight;
                hot_rows_.data()[num_hot_] = row;
                add_hot(slot);
            }
        end_layout();
    }

    Out<int16_t, 3> routing_ids_;
    Out<float, 3> routing_weights_;
    std::vector<In<int32_t, 1>> maps_;
    std::vector<int64_t> hot_ps_;
    int64_t overhead_ps_;
    Out<int32_t, 1> slots_;
    Out<float, 1> weights_;
    Out<int64_t, 1> sent_rows_;
    Out<int32_t, 1> pair_rows_, pair_experts_;
    Out<uint8_t, 1> pair_bits_;
    Out<float, 1> pair_weights_;
    Out<uint8_t, 2> activations_;
    Out<int64_t, 1> hot_rows_;
    bool weighs_input_;  // the rows come weighed: what they give is added as it is
    int64_t num_layers_ = 0, num_entries_ = 0, top_k_ = 0, num_experts_ = 0;
    Prices prices_;

    // of the step
    std::vector<int64_t> entries_, owners_;  // [T]
    std::vector<In<uint8_t, 2>> bits_;       // [R]
    std::vector<int64_t> counts_;            // [R, 3]
    std::vector<int64_t> before_ps_;         // [L], from the layer before to this one's experts
    int64_t now_ps_ = 0, shared_ps_ = 0;

    // of the layer
    int64_t layer_ = 0, submit_ps_ = 0, hot_layer_ps_ = 0, num_hot_ = 0, num_cold_ = 0, num_sent_ = 0;
    int64_t touched_ = 0;      // slots in use
    int64_t num_columns_ = 1;  // of slots and weights, where pairs are aliased
    bool waiting_ = false;
    std::vector<int64_t> idle_rows_, moved_;
    uint8_t pair_offloaded_[kMostPairs] = {};

    // scratch
    std::vector<int64_t> place_;       // [E], index into hot_
    std::vector<uint64_t> slot_seen_;  // [slots], stamp of the layer that used it last
    std::vector<uint8_t> offloaded_;   // [E]
    std::vector<Expert> hot_;
    std::vector<Cold> cold_;
    std::vector<double> gpu_ps_;
    uint64_t stamp_ = 0;
};

}  // namespace

NB_MODULE(_decode_layers, m) {
    m.attr("MOST_PAIRS") = kMostPairs;
    m.attr("ALIAS_PAIRS") = kAliasPairs;
    nb::class_<DecodeLayers>(m, "DecodeLayers")
        .def(nb::init<Out<int16_t, 3>, Out<float, 3>, std::vector<In<int32_t, 1>>, In<int64_t, 2>, int64_t,
                      Out<int32_t, 1>, Out<float, 1>, Out<int64_t, 1>, Out<int32_t, 1>, Out<int32_t, 1>,
                      Out<uint8_t, 1>, Out<float, 1>, Out<uint8_t, 2>, Out<int64_t, 1>, bool>(),
             nb::arg("routing_ids"), nb::arg("routing_weights"), nb::arg("expert_maps"), nb::arg("hot_ps"),
             nb::arg("overhead_ps"), nb::arg("slots"), nb::arg("topk_weights"), nb::arg("sent_rows"),
             nb::arg("pair_rows"), nb::arg("pair_experts"), nb::arg("pair_bits"), nb::arg("pair_weights"),
             nb::arg("activations"), nb::arg("hot_rows"), nb::arg("weighs_input") = false)
        .def("price", &DecodeLayers::price, nb::arg("offload_bits"), nb::arg("gpu_ps"), nb::arg("message_ps"),
             nb::arg("device_ps"))
        .def("begin_step", &DecodeLayers::begin_step, nb::arg("entries"), nb::arg("owners"), nb::arg("bits"),
             nb::arg("now_ps"), nb::arg("before_ps"), nb::arg("shared_ps"))
        .def("split", &DecodeLayers::split, nb::arg("layer"), nb::arg("topk_ids"), nb::arg("topk_weights"),
             nb::arg("offload"))
        .def("gather", &DecodeLayers::gather, nb::arg("x"), nb::arg("row_bytes"))
        .def("add", &DecodeLayers::add, nb::arg("out"), nb::arg("sums"), nb::arg("bfloat16"))
        .def("end_layer", &DecodeLayers::end_layer, nb::arg("device_ps"), nb::arg("stream_ps"), nb::arg("answered"))
        .def("counts", &DecodeLayers::counts)
        .def("moved", &DecodeLayers::moved)
        .def_prop_ro("now_ps", &DecodeLayers::now_ps)
        .def_prop_ro("submit_ps", &DecodeLayers::submit_ps)
        .def_prop_ro("is_listed", &DecodeLayers::is_listed)
        .def_prop_ro("num_hot", &DecodeLayers::num_hot)
        .def_prop_ro("num_sent", &DecodeLayers::num_sent)
        .def_prop_ro("num_columns", &DecodeLayers::num_columns)
        .def_prop_ro("idle_rows", &DecodeLayers::idle_rows);
}
