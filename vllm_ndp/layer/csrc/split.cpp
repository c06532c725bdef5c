// Where each (row, expert) pair of one MoE layer runs, for any rows: prompts, decode or both. One call writes the
// router's choices beside the KV cache, decides which hot experts the device takes over, puts each pair in its place,
// lays out the messages, and counts. The yardstick in tests/vllm_ndp/layer/ says the same in numpy, to the bit.
// Knows arrays and prices. Does not know requests, policies, tensors or clocks. One thread, which holds the GIL.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arrays.h"
#include "find_pairs.h"
#include "offload.h"

namespace nb = nanobind;

namespace {

// As tiers.py: what a table says of an expert without a slot here. kStream is a place of pairs only.
constexpr int32_t kDevice = -1, kWarm = -2, kElsewhere = -3, kStream = -4;
constexpr int64_t kAliasPairs = 32;    // with more, hot pairs are listed, not aliased: docs/log/kernels.md
constexpr int64_t kWidths = 32;        // bits of a pair lie below
constexpr uint8_t kFullPrecision = 16;
constexpr uint8_t kNested = 4;           // widest replica whose first planes are the narrower ones
// What pairs are counted as, as split.PAIR_KINDS: of decode rows, then of prompt rows.
enum Kind { kHot, kSpilled, kByHost, kCold, kFallback, kPrompt, kPromptDevice, kPromptFallback, kKinds };

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

struct Expert {  // a hot expert of this layer that some row asked for
    int64_t id, rows;
    double weight;  // of all rows
};

struct Cold {
    int64_t expert, rows;
    uint8_t bits;
};

// A price that is asked for once. key: any number that fits a table.
class Known {
   public:
    template <class... Args>
    double of(size_t key, const nb::object& ask, Args... args) {
        if (key >= table_.size()) table_.resize(key + 1, std::nan(""));
        if (std::isnan(table_[key])) table_[key] = nb::cast<double>(ask(args...));
        return table_[key];
    }
    void clear() { table_.clear(); }

   private:
    std::vector<double> table_;
};

// What offloading is decided from; prices in ps. Each is asked for once.
struct Prices {
    uint8_t offload_bits = 0;
    double beside = 1.0;  // how much of the shorter side is over while the longer one runs
    nb::object ask_gpu, ask_message, ask_device, ask_shared;
    Known gpu, shared;
    std::array<Known, kWidths> device;
    std::unordered_map<uint64_t, double> messages;

    double of_gpu(int64_t rows) { return gpu.of(rows, ask_gpu, rows); }
    double of_shared(int64_t rows) { return shared.of(rows, ask_shared, rows); }
    double of_device(uint8_t bits, int64_t rows) {
        return device[bits].of(rows, ask_device, static_cast<int>(bits), rows);
    }
    double of_message(int64_t rows, int64_t pairs) {
        const uint64_t key = static_cast<uint64_t>(rows) << 32 | static_cast<uint64_t>(pairs);
        const auto found = messages.find(key);
        if (found != messages.end()) return found->second;
        const double ps = nb::cast<double>(ask_message(rows, pairs));
        messages.emplace(key, ps);
        return ps;
    }
};

// What the host's CPU takes for warm experts, in whole ps: rows there and back, and each expert by its rows.
struct HostPrices {
    nb::object ask_rows, ask_expert;
    Known rows, experts;

    int64_t of_rows(int64_t count) { return static_cast<int64_t>(rows.of(count, ask_rows, count)); }
    int64_t of_expert(int64_t count) { return static_cast<int64_t>(experts.of(count, ask_expert, count)); }
};

// The pairs of one place, in the order of their rows, as a message has them.
struct Part {
    std::optional<Out<int64_t, 1>> sent;     // [T], distinct rows
    std::optional<Out<int32_t, 1>> local;    // [P], index into sent
    std::optional<Out<int32_t, 1>> experts;  // [P]
    std::optional<Out<uint8_t, 1>> bits;     // [P]
    std::optional<Out<float, 1>> weights;    // [P]
    int64_t rows = 0, pairs = 0;

    void use(Out<int64_t, 1> a, Out<int32_t, 1> b, Out<int32_t, 1> c, Out<uint8_t, 1> d, Out<float, 1> e) {
        sent.emplace(std::move(a));
        local.emplace(std::move(b));
        experts.emplace(std::move(c));
        bits.emplace(std::move(d));
        weights.emplace(std::move(e));
        rows = pairs = 0;
    }
    int64_t capacity() const {
        return sent ? static_cast<int64_t>(std::min({sent->size(), local->size(), experts->size(), bits->size(),
                                                     weights->size()}))
                    : 0;
    }
    void clear() { rows = pairs = 0; }
    void add(int64_t row, int32_t expert, uint8_t width, float weight) {
        if (!rows || sent->data()[rows - 1] != row) sent->data()[rows++] = row;
        local->data()[pairs] = static_cast<int32_t>(rows - 1);
        experts->data()[pairs] = expert;
        bits->data()[pairs] = width;
        weights->data()[pairs++] = weight;
    }
};

class Splitter {
   public:
    // where [L] of i32 [E]: a slot of this worker, or kDevice, kWarm, kElsewhere; read in every call, whoever writes it.
    // owners [L] of i64 [E]: the GPU that holds each hot expert whole, -1 where none does; empty: each has a part of all.
    // hot_bits [L] of u8 [E] and bytes_of_width [256]: of hot experts where each has a width of its own; empty: all have
    // one. gathers_prompts and prompts_anywhere: see split.Splitter. prompt_bits: at which the device computes them.
    Splitter(std::vector<In<int32_t, 1>> where, int64_t top_k, bool aliases, bool weighs_input, bool gathers_prompts,
             bool prompts_anywhere, uint8_t prompt_bits, std::vector<In<int64_t, 1>> owners, std::vector<In<uint8_t, 1>> hot_bits,
             std::vector<int64_t> bytes_of_width)
        : where_(std::move(where)),
          gpu_of_(std::move(owners)),
          hot_bits_(std::move(hot_bits)),
          bytes_of_width_(std::move(bytes_of_width)),
          top_k_(top_k),
          aliases_(aliases),
          weighs_input_(weighs_input),
          gathers_prompts_(gathers_prompts),
          prompts_anywhere_(prompts_anywhere),
          prompt_bits_(prompt_bits) {
        want(prompt_bits < kWidths, "prompt_bits must lie in 0..31");
        want(!where_.empty() && top_k_ > 0, "a layer and an expert per row at least are needed");
        num_experts_ = where_[0].shape(0);
        check(where_);
        if (!gpu_of_.empty()) check(gpu_of_);
        if (!hot_bits_.empty()) check(hot_bits_);
        want(hot_bits_.empty() || bytes_of_width_.size() == 256, "bytes_of_width must be [256]");
        place_.assign(num_experts_, -1);
        seen_.assign(num_experts_, 0);
        offloaded_.assign(num_experts_, 0);
        there_.assign(num_experts_, 0);
    }

    // Where the router's choices are noted from now on, [L, N, k]; nowhere without this.
    void note_into(Out<int16_t, 3> ids, Out<float, 3> weights) {
        want(num_experts_ <= INT16_MAX, "expert ids must fit 16 bits");
        want(ids.shape(0) == where_.size() && ids.shape(2) == static_cast<size_t>(top_k_),
             "routing ids must be [L, N, k]");
        for (size_t axis = 0; axis < 3; ++axis)
            want(weights.shape(axis) == ids.shape(axis), "routing ids and weights must match");
        num_rows_ = 0;
        routing_ids_.emplace(std::move(ids));
        routing_weights_.emplace(std::move(weights));
    }

    void price(int offload_bits, double beside, nb::object gpu_ps, nb::object message_ps, nb::object device_ps,
               nb::object shared_ps) {
        want(offload_bits > 0 && offload_bits < kWidths, "offload_bits must lie in 1..31");
        prices_ = Prices{};
        prices_.offload_bits = static_cast<uint8_t>(offload_bits);
        prices_.beside = beside;
        prices_.ask_gpu = std::move(gpu_ps);
        prices_.ask_message = std::move(message_ps);
        prices_.ask_device = std::move(device_ps);
        prices_.ask_shared = std::move(shared_ps);
    }

    void price_host(nb::object rows_ps, nb::object expert_ps) {
        host_ = HostPrices{std::move(rows_ps), std::move(expert_ps), {}, {}};
    }

    // Where results are written, for steps of up to `capacity` pairs.
    void use_hot(Out<int32_t, 1> where, Out<int32_t, 1> slots, Out<float, 1> weights, Out<int64_t, 1> rows) {
        capacity_ = static_cast<int64_t>(std::min({where.size(), slots.size(), weights.size(), rows.size()}));
        pairs_.emplace(std::move(where));
        slots_.emplace(std::move(slots));
        hot_weights_.emplace(std::move(weights));
        hot_rows_.emplace(std::move(rows));
    }
    void use(int place, Out<int64_t, 1> sent, Out<int32_t, 1> local, Out<int32_t, 1> experts, Out<uint8_t, 1> bits,
             Out<float, 1> weights) {
        part(place).use(std::move(sent), std::move(local), std::move(experts), std::move(bits), std::move(weights));
    }

    // entries [T]: of the KV cache, where routing is noted; owners [T]: the request of each row; is_decode [T];
    // bits [R] of u8 [L, E]: each request's plan; from_weights [R] of f32 [L, E, 3] or None: the router weights from
    // which its cold pairs read 2, 3 and 4 bits; counts [R, kinds]: is added to, layer by layer.
    void begin_step(std::optional<In<int64_t, 1>> entries, In<int32_t, 1> owners, In<uint8_t, 1> is_decode,
                    std::vector<In<uint8_t, 2>> bits, std::vector<std::optional<In<float, 3>>> from_weights,
                    Out<int64_t, 2> counts) {
        num_rows_ = 0;
        const auto rows = static_cast<int64_t>(owners.shape(0));
        want(rows > 0 && static_cast<int64_t>(is_decode.shape(0)) == rows, "a step needs rows, each of a request");
        want(pairs_.has_value() && rows * top_k_ <= std::min({capacity_, device_.capacity(), warm_.capacity(),
                                                              stream_.capacity()}),
             "a step needs room for all its pairs");
        want(entries.has_value() == routing_ids_.has_value(), "routing is noted in every step, or in none");
        if (entries) {
            want(static_cast<int64_t>(entries->shape(0)) == rows, "every row needs a KV entry");
            for (int64_t i = 0; i < rows; ++i)
                want(entries->data()[i] >= 0 && entries->data()[i] < static_cast<int64_t>(routing_ids_->shape(1)),
                     "a KV entry lies outside the cache");
        }
        for (int64_t i = 0; i < rows; ++i)
            want(owners.data()[i] >= 0 && owners.data()[i] < static_cast<int64_t>(bits.size()), "an owner has no plan");
        for (const auto& plan : bits)
            want(plan.shape(0) == where_.size() && plan.shape(1) == static_cast<size_t>(num_experts_),
                 "bits must be [L, E]");
        want(from_weights.size() == bits.size(), "every plan says from which weights pairs are wider, or None");
        for (const auto& from : from_weights)
            want(!from || (from->shape(0) == where_.size() && from->shape(1) == static_cast<size_t>(num_experts_) &&
                           from->shape(2) == kNested - 1),
                 "weights from which pairs are wider must be [L, E, 3]");
        want(counts.shape(0) == bits.size() && counts.shape(1) == static_cast<size_t>(kKinds),
             "counts must be [R, kinds]");
        entries_ = std::move(entries);
        owners_.emplace(std::move(owners));
        is_decode_.emplace(std::move(is_decode));
        bits_ = std::move(bits);
        from_weights_ = std::move(from_weights);
        counts_.emplace(std::move(counts));
        all_decode_ = std::all_of(is_decode_->data(), is_decode_->data() + rows, [](uint8_t flag) { return flag; });
        num_rows_ = rows;
    }

    // ids i32 [T, k] and router weights f32 [T, k], contiguous, by address: an array argument costs more than the
    // layer. offload: False; True = the rule below; or a rule, called with (hot, cold, message rows, message pairs,
    // host ps), that returns experts. prompts: None, or a rule, called with (experts, rows of each, experts and bits of
    // the decode pairs that the same message holds), that returns the experts that the device computes for prompts.
    // Returns (rows, pairs) of device, warm and stream, and what split.Split has besides: in one value, since to ask for
    // one after the other takes longer than the split of few rows.
    nb::tuple split(int64_t layer, uintptr_t topk_ids, uintptr_t topk_weights, nb::handle offload, nb::handle prompts) {
        if (!num_rows_) throw std::runtime_error("split: begin_step must come first");
        want(layer >= 0 && layer < static_cast<int64_t>(where_.size()), "no such layer");
        const auto* ids = reinterpret_cast<const int32_t*>(topk_ids);
        want(is_known(ids), "expert ids must lie in 0..E-1");
        place(layer, ids, reinterpret_cast<const float*>(topk_weights), offload, prompts);
        return found();
    }

    // The same for a thread without Python (sender_thread.h): hot experts stay, and no row is of a prompt. False where an expert
    // is warm, since prices are Python's, or unknown.
    static bool find(void* whose, int64_t layer, const int32_t* ids, const float* weights, FoundPairs& pairs) {
        auto& mine = *static_cast<Splitter*>(whose);
        if (!mine.num_rows_ || !mine.all_decode_ || layer < 0 || layer >= static_cast<int64_t>(mine.where_.size()) ||
            !mine.is_known(ids))
            return false;
        const int32_t* table = mine.where_[layer].data();
        for (int64_t i = 0; i < mine.num_rows_ * mine.top_k_; ++i)
            if (table[ids[i]] == kWarm) return false;
        mine.place(layer, ids, weights, nb::handle(Py_False), nb::handle(Py_None));
        const Part& device = mine.device_;
        pairs = {static_cast<uint64_t>(device.rows), static_cast<uint64_t>(device.pairs), device.local->data(),
                 device.experts->data(), device.bits->data(), device.weights->data()};
        return true;
    }
    nb::capsule finder() {  // keeps this alive
        struct Held {
            Finder finder;
            nb::object splitter;
        };
        return nb::capsule(new Held{{&Splitter::find, this}, nb::find(this)}, kFinder,
                           [](void* held) noexcept { delete static_cast<Held*>(held); });
    }

    // As `split` has given it, or `find` would have.
    nb::tuple found() const {
        std::optional<int64_t> hot_bytes;
        if (!hot_bits_.empty()) hot_bytes = layer_hot_bytes_;
        return nb::make_tuple(device_.rows, device_.pairs, warm_.rows, warm_.pairs, stream_.rows, stream_.pairs,
                              num_hot_, loads_, hot_bytes, num_stream_experts_, num_stream_pairs_, host_ps_,
                              num_columns_, idle_rows_);
    }

    // The device gave no answer: its pairs count as computed here. How many distinct experts are streamed with them.
    int64_t fall_back() {
        for (int64_t i = 0; i < device_.pairs; ++i) {
            const int64_t row = device_.sent->data()[device_.local->data()[i]];
            const int32_t expert = device_.experts->data()[i];
            int64_t* counts = counts_->data() + owners_->data()[row] * kKinds;
            const bool decode = is_decode_->data()[row];
            --counts[!decode ? kPromptDevice : offloaded_[expert] ? kSpilled : kCold];
            ++counts[decode ? kFallback : kPromptFallback];
        }
        ++stamp_;
        int64_t distinct = 0;
        for (int64_t i = 0; i < device_.pairs; ++i) distinct += first_time(device_.experts->data()[i]);
        for (int64_t i = 0; i < stream_.pairs; ++i)  // hot ones are here already
            distinct += !is_hot(stream_.experts->data()[i]) && first_time(stream_.experts->data()[i]);
        return distinct;
    }

    std::vector<int64_t> moved() const {
        std::vector<int64_t> sorted(moved_);
        std::sort(sorted.begin(), sorted.end());
        return sorted;
    }

   private:
    bool is_known(const int32_t* ids) const {
        return std::all_of(ids, ids + num_rows_ * top_k_, [this](int32_t id) { return id >= 0 && id < num_experts_; });
    }

    void place(int64_t layer, const int32_t* ids, const float* weights, nb::handle offload, nb::handle prompts) {
        layer_ = layer;
        table_ = where_[layer].data();
        if (entries_) note(ids, weights);
        for (int64_t expert : moved_) offloaded_[expert] = 0;
        moved_.clear();
        for (int64_t expert : sent_prompts_) there_[expert] = 0;
        sent_prompts_.clear();
        host_ps_ = warm_ps(ids);
        if (offload.ptr() != Py_False && all_decode_) decide(ids, weights, offload);
        if (!prompts.is_none() && !all_decode_) decide_prompts(ids, weights, prompts);
        lay_out(ids, weights);
    }

    template <class Table>
    void check(const std::vector<Table>& tables) const {
        want(tables.size() == where_.size(), "one table per layer is needed");
        for (const auto& table : tables)
            want(table.shape(0) == static_cast<size_t>(num_experts_), "every table must be [E]");
    }

    Part& part(int place) {
        want(place == kDevice || place == kWarm || place == kStream, "pairs are listed of device, warm and stream");
        return place == kDevice ? device_ : place == kWarm ? warm_ : stream_;
    }

    uint8_t planned(int64_t row, int64_t expert, float weight) const {
        const int32_t owner = owners_->data()[row];
        const int64_t at = layer_ * num_experts_ + expert;
        const uint8_t bits = bits_[owner].data()[at];
        if (!from_weights_[owner] || bits == 0 || bits > kNested) return bits;
        const float* from = from_weights_[owner]->data() + at * (kNested - 1);
        return static_cast<uint8_t>(1 + (weight >= from[0]) + (weight >= from[1]) + (weight >= from[2]));
    }

    bool first_time(int32_t expert) {
        const bool first = seen_[expert] != stamp_;
        seen_[expert] = stamp_;
        return first;
    }

    void note(const int32_t* ids, const float* weights) {
        for (int64_t row = 0; row < num_rows_; ++row) {
            const int64_t at = (layer_ * routing_ids_->shape(1) + entries_->data()[row]) * top_k_;
            for (int64_t column = 0; column < top_k_; ++column)
                routing_ids_->data()[at + column] = static_cast<int16_t>(ids[row * top_k_ + column]);
            std::memcpy(routing_weights_->data() + at, weights + row * top_k_, top_k_ * sizeof(float));
        }
    }

    // Warm decode pairs: experts one after the other, and the rows' hop.
    int64_t warm_ps(const int32_t* ids) {
        if (!host_.ask_rows.is_valid()) return 0;
        warm_counts_.clear();
        int64_t rows = 0;
        for (int64_t row = 0; row < num_rows_; ++row) {
            if (!is_decode_->data()[row]) continue;
            bool any = false;
            for (int64_t i = row * top_k_; i < (row + 1) * top_k_; ++i) {
                if (table_[ids[i]] != kWarm) continue;
                any = true;
                ++warm_counts_[ids[i]];
            }
            rows += any;
        }
        if (!rows) return 0;
        int64_t total = host_.of_rows(rows);
        for (const auto& [expert, count] : warm_counts_) total += host_.of_expert(count);
        return total;
    }

    bool is_hot(int32_t expert) const { return table_[expert] >= 0 || table_[expert] == kElsewhere; }

    // LayerLoad and Balancer.fewest: the same additions in the same order.
    void decide(const int32_t* ids, const float* weights, nb::handle rule) {
        hot_.clear();
        cold_.clear();
        int64_t rows = 0, pairs = 0;
        for (int64_t row = 0; row < num_rows_; ++row) {
            const int64_t before = pairs;
            for (int64_t i = row * top_k_; i < (row + 1) * top_k_; ++i) {
                const int32_t expert = ids[i];
                if (is_hot(expert)) {
                    if (place_[expert] < 0) {
                        place_[expert] = static_cast<int64_t>(hot_.size());
                        hot_.push_back({expert, 0, 0.0});
                    }
                    Expert& seen = hot_[place_[expert]];
                    ++seen.rows;
                    seen.weight += static_cast<double>(weights[i]);
                } else if (table_[expert] == kDevice) {
                    cold_.push_back({expert, 1, planned(row, expert, weights[i])});
                    ++pairs;
                }
            }
            rows += pairs > before;
        }
        for (const Expert& expert : hot_) place_[expert.id] = -1;
        if (hot_.empty()) return;
        want(prices_.offload_bits, "offloading needs prices");
        std::sort(cold_.begin(), cold_.end(), [](const Cold& a, const Cold& b) {
            return a.expert < b.expert || (a.expert == b.expert && a.bits < b.bits);
        });
        size_t last = 0;  // each (expert, bits) once
        for (size_t i = 1; i < cold_.size(); ++i) {
            if (cold_[i].expert == cold_[last].expert && cold_[i].bits == cold_[last].bits)
                ++cold_[last].rows;
            else
                cold_[++last] = cold_[i];
        }
        if (!cold_.empty()) cold_.resize(last + 1);
        if (rule.ptr() == Py_True)
            choose(rows, pairs);
        else
            ask(rule, rows, pairs);
        for (int64_t expert : moved_) offloaded_[expert] = 1;
    }

    void ask(nb::handle rule, int64_t rows, int64_t pairs) {
        nb::dict hot, cold;
        for (const Expert& each : hot_) hot[nb::int_(each.id)] = nb::make_tuple(each.rows, each.weight);
        for (const Cold& each : cold_)
            cold[nb::make_tuple(each.expert, static_cast<int>(each.bits))] = nb::int_(each.rows);
        for (nb::handle expert : nb::cast<nb::iterable>(rule(hot, cold, rows, pairs, num_rows_, host_ps_))) {
            moved_.push_back(nb::cast<int64_t>(expert));
            want(moved_.back() >= 0 && moved_.back() < num_experts_, "an offloaded expert must lie in 0..E-1");
        }
    }

    void choose(int64_t rows, int64_t pairs) {
        double device_ps = 0.0;
        for (const Cold& cold : cold_) device_ps += prices_.of_device(cold.bits, cold.rows);
        if (!cold_.empty()) device_ps += prices_.of_message(rows, pairs);
        std::sort(hot_.begin(), hot_.end(), [](const Expert& a, const Expert& b) {  // least weight first
            return a.weight < b.weight || (a.weight == b.weight && a.id < b.id);
        });
        const LayerTimes layer{prices_.of_shared(num_rows_), device_ps, cold_.empty() ? prices_.of_message(1, 1) : 0.0,
                               static_cast<double>(host_ps_), prices_.beside};
        const size_t best = fewest_offloaded(
            hot_.size(), layer, gpu_ps_,
            [&](size_t n) { return prices_.of_gpu(hot_[n].rows) + (n + 1 == hot_.size() ? prices_.of_gpu(0) : 0.0); },
            [&](size_t n) { return prices_.of_device(prices_.offload_bits, hot_[n].rows); });
        for (size_t i = 0; i < best; ++i) moved_.push_back(hot_[i].id);
    }

    void decide_prompts(const int32_t* ids, const float* weights, nb::handle rule) {
        std::vector<int64_t> counts(num_experts_, 0), experts, rows, decode_experts, decode_bits;
        for (int64_t row = 0; row < num_rows_; ++row)
            for (int64_t i = row * top_k_; i < (row + 1) * top_k_; ++i) {
                const int32_t where = table_[ids[i]];
                const bool hot = where >= 0 || where == kElsewhere;
                if (!is_decode_->data()[row])
                    counts[ids[i]] += prompts_anywhere_ || !hot;
                else if (where == kDevice) {
                    decode_experts.push_back(ids[i]);
                    decode_bits.push_back(planned(row, ids[i], weights[i]));
                }
            }
        for (int64_t expert = 0; expert < num_experts_; ++expert)
            if (counts[expert]) {
                experts.push_back(expert);
                rows.push_back(counts[expert]);
            }
        if (experts.empty()) return;
        for (nb::handle expert : nb::cast<nb::iterable>(rule(experts, rows, decode_experts, decode_bits))) {
            sent_prompts_.push_back(nb::cast<int64_t>(expert));
            want(sent_prompts_.back() >= 0 && sent_prompts_.back() < num_experts_, "an expert must lie in 0..E-1");
            there_[sent_prompts_.back()] = 1;
        }
    }

    int32_t place_of(int32_t expert, bool decode) const {
        const int32_t where = table_[expert];
        if (!decode && there_[expert]) return kDevice;
        if (where >= 0 || where == kElsewhere) return offloaded_[expert] ? kDevice : where;
        return decode ? where : kStream;
    }

    uint8_t width_of(int64_t row, int32_t expert, bool decode, float weight) const {
        if (!decode) return prompt_bits_;
        const uint8_t bits = planned(row, expert, weight);
        return bits || moved_.empty() ? bits : prices_.offload_bits;
    }

    // A pair in a slot of another GPU is hot as well.
    void count_hot(int32_t expert) {
        const int64_t gpu = gpu_of_.empty() ? 0 : gpu_of_[layer_].data()[expert];
        const bool first = first_time(expert);
        if (first && !hot_bits_.empty()) layer_hot_bytes_ += bytes_of_width_[hot_bits_[layer_].data()[expert]];
        if (gpu < 0) return;
        if (static_cast<size_t>(gpu) >= loads_.size()) loads_.resize(gpu + 1, {0, 0});
        loads_[gpu].first += first;
        ++loads_[gpu].second;
    }

    void lay_out(const int32_t* ids, const float* weights) {
        device_.clear();
        warm_.clear();
        stream_.clear();
        ++stamp_;
        num_hot_ = num_stream_experts_ = num_stream_pairs_ = layer_hot_bytes_ = 0;
        loads_.clear();
        int32_t* where = pairs_->data();
        for (int64_t row = 0; row < num_rows_; ++row) {
            const bool decode = is_decode_->data()[row];
            int64_t* counts = counts_->data() + owners_->data()[row] * kKinds;
            for (int64_t i = row * top_k_; i < (row + 1) * top_k_; ++i) {
                const int32_t expert = ids[i], place = where[i] = place_of(expert, decode);
                const float weight = weighs_input_ ? 1.0f : weights[i];
                switch (place) {
                    case kDevice:
                        device_.add(row, expert, width_of(row, expert, decode, weights[i]), weight);
                        ++counts[!decode ? kPromptDevice : offloaded_[expert] ? kSpilled : kCold];
                        break;
                    case kWarm:
                        warm_.add(row, expert, kFullPrecision, weight);
                        ++counts[kByHost];
                        break;
                    case kStream:
                        stream_.add(row, expert, kFullPrecision, weight);
                        num_stream_experts_ += first_time(expert);
                        ++num_stream_pairs_;
                        ++counts[kPrompt];
                        break;
                    default:
                        count_hot(expert);
                        ++counts[decode ? kHot : kPrompt];
                        if (gathers_prompts_ && !decode && place >= 0) {
                            stream_.add(row, expert, kFullPrecision, weight);
                            where[i] = kStream;
                        } else {
                            num_hot_ += place >= 0;
                        }
                }
            }
        }
        !aliases_ || num_rows_ * top_k_ > kAliasPairs ? list(weights) : alias(weights);
    }

    // As many columns as the row with most hot pairs has. A row with fewer gets a hot slot that it reads anyway, with
    // weight 0; a row without any gets another row's and is idle.
    void alias(const float* weights) {
        const int32_t* where = pairs_->data();
        idle_rows_.clear();
        num_columns_ = 1;
        for (int64_t row = 0; row < num_rows_; ++row) {
            int64_t hot = 0;
            for (int64_t i = row * top_k_; i < (row + 1) * top_k_; ++i) hot += where[i] >= 0;
            num_columns_ = std::max(num_columns_, hot);
        }
        int32_t* slots = slots_->data();
        float* applied = hot_weights_->data();
        int32_t another = -1;
        for (int64_t row = 0; row < num_rows_; ++row, slots += num_columns_, applied += num_columns_) {
            int64_t hot = 0;
            for (int64_t i = row * top_k_; i < (row + 1) * top_k_; ++i) {
                if (where[i] < 0) continue;
                if (another < 0) another = where[i];
                slots[hot] = where[i];
                applied[hot++] = weighs_input_ ? 1.0f : weights[i];
            }
            if (!hot) idle_rows_.push_back(row);
            std::fill(slots + hot, slots + num_columns_, hot ? *std::max_element(slots, slots + hot) : -1);
            std::fill(applied + hot, applied + num_columns_, 0.0f);
        }
        for (int64_t row : idle_rows_) std::fill_n(slots_->data() + row * num_columns_, num_columns_, another);
    }

    // The hot pairs one after the other, and the row of each.
    void list(const float* weights) {
        const int32_t* where = pairs_->data();
        idle_rows_.clear();
        num_columns_ = 0;
        int64_t hot = 0;
        for (int64_t i = 0; i < num_rows_ * top_k_; ++i) {
            if (where[i] < 0) continue;
            slots_->data()[hot] = where[i];
            hot_weights_->data()[hot] = weighs_input_ ? 1.0f : weights[i];
            hot_rows_->data()[hot++] = i / top_k_;
        }
    }

    std::vector<In<int32_t, 1>> where_;
    std::optional<Out<int16_t, 3>> routing_ids_;
    std::optional<Out<float, 3>> routing_weights_;
    std::vector<In<int64_t, 1>> gpu_of_;
    std::vector<In<uint8_t, 1>> hot_bits_;
    std::vector<int64_t> bytes_of_width_;
    int64_t top_k_, num_experts_ = 0, capacity_ = 0;
    bool aliases_, weighs_input_, gathers_prompts_, prompts_anywhere_;  // weighs_input: the rows come weighed, so what they give is added as it is
    uint8_t prompt_bits_;
    Prices prices_;
    HostPrices host_;
    std::optional<Out<int32_t, 1>> pairs_, slots_;  // [T * k]: where each pair runs; slots of the hot ones
    std::optional<Out<float, 1>> hot_weights_;
    std::optional<Out<int64_t, 1>> hot_rows_;
    Part device_, warm_, stream_;

    // of the step
    int64_t num_rows_ = 0;
    bool all_decode_ = false;
    std::optional<In<int64_t, 1>> entries_;
    std::optional<In<int32_t, 1>> owners_;
    std::optional<In<uint8_t, 1>> is_decode_;
    std::vector<In<uint8_t, 2>> bits_;        // [R]
    std::vector<std::optional<In<float, 3>>> from_weights_;  // [R]
    std::optional<Out<int64_t, 2>> counts_;   // [R, kinds]

    // of the layer
    int64_t layer_ = 0, num_hot_ = 0, num_columns_ = 1, num_stream_experts_ = 0, num_stream_pairs_ = 0, layer_hot_bytes_ = 0, host_ps_ = 0;
    const int32_t* table_ = nullptr;
    std::vector<int64_t> idle_rows_, moved_, sent_prompts_;
    std::vector<std::pair<int64_t, int64_t>> loads_;

    // scratch
    std::vector<int64_t> place_;              // [E], index into hot_
    std::vector<uint64_t> seen_;              // [E], stamp of the layer that used it last
    std::vector<uint8_t> offloaded_, there_;  // [E]
    std::vector<Expert> hot_;
    std::vector<Cold> cold_;
    std::vector<double> gpu_ps_;
    std::unordered_map<int32_t, int64_t> warm_counts_;
    uint64_t stamp_ = 0;
};

// Rows of x, one after the other.
void gather(uintptr_t x, int64_t row_bytes, In<int64_t, 1> rows, Out<uint8_t, 2> out) {
    want(row_bytes > 0 && row_bytes <= static_cast<int64_t>(out.shape(1)), "rows of x are too long");
    want(rows.shape(0) <= out.shape(0), "more rows than fit");
    for (size_t i = 0; i < rows.shape(0); ++i)
        std::memcpy(out.data() + i * out.shape(1), reinterpret_cast<const uint8_t*>(x) + rows.data()[i] * row_bytes,
                    row_bytes);
}

// Add partial sums f32 [S, H] to these rows [S] of out [T, H], bfloat16 or float32, rounded once.
void add_rows(uintptr_t out, int64_t num_rows, In<float, 2> sums, In<int64_t, 1> rows, bool bfloat16) {
    want(sums.shape(0) == rows.shape(0), "a sum for every row is needed");
    const auto hidden = static_cast<int64_t>(sums.shape(1));
    for (size_t i = 0; i < rows.shape(0); ++i) {
        want(rows.data()[i] >= 0 && rows.data()[i] < num_rows, "a row lies outside");
        const float* sum = sums.data() + i * hidden;
        const int64_t at = rows.data()[i] * hidden;
        if (!bfloat16) {
            float* row = reinterpret_cast<float*>(out) + at;
            for (int64_t j = 0; j < hidden; ++j) row[j] += sum[j];
            continue;
        }
        uint16_t* row = reinterpret_cast<uint16_t*>(out) + at;
        for (int64_t j = 0; j < hidden; ++j)
            row[j] = rounded(widened(row[j]) + sum[j]);
    }
}

}  // namespace

NB_MODULE(_split, m) {
    m.attr("ALIAS_PAIRS") = kAliasPairs;
    m.attr("PLACES") = nb::make_tuple(kDevice, kWarm, kElsewhere, kStream);
    m.attr("NUM_KINDS") = static_cast<int>(kKinds);
    m.def("gather", &gather, nb::arg("x"), nb::arg("row_bytes"), nb::arg("rows"), nb::arg("out"));
    m.def("add_rows", &add_rows, nb::arg("out"), nb::arg("num_rows"), nb::arg("sums"), nb::arg("rows"),
          nb::arg("bfloat16"));
    nb::class_<Splitter>(m, "Splitter")
        .def(nb::init<std::vector<In<int32_t, 1>>, int64_t, bool, bool, bool, bool, uint8_t,
                      std::vector<In<int64_t, 1>>, std::vector<In<uint8_t, 1>>, std::vector<int64_t>>(),
             nb::arg("where"), nb::arg("top_k"), nb::arg("aliases"), nb::arg("weighs_input"),
             nb::arg("gathers_prompts"), nb::arg("prompts_anywhere"), nb::arg("prompt_bits"), nb::arg("owners"),
             nb::arg("hot_bits"), nb::arg("bytes_of_width"))
        .def("note_into", &Splitter::note_into, nb::arg("ids"), nb::arg("weights"))
        .def("price", &Splitter::price, nb::arg("offload_bits"), nb::arg("beside"), nb::arg("gpu_ps"),
             nb::arg("message_ps"), nb::arg("device_ps"), nb::arg("shared_ps"))
        .def("price_host", &Splitter::price_host, nb::arg("rows_ps"), nb::arg("expert_ps"))
        .def("use_hot", &Splitter::use_hot, nb::arg("where"), nb::arg("slots"), nb::arg("weights"), nb::arg("rows"))
        .def("use", &Splitter::use, nb::arg("place"), nb::arg("sent"), nb::arg("local"), nb::arg("experts"),
             nb::arg("bits"), nb::arg("weights"))
        .def("begin_step", &Splitter::begin_step, nb::arg("entries").none(), nb::arg("owners"), nb::arg("is_decode"),
             nb::arg("bits"), nb::arg("from_weights"), nb::arg("counts"))
        .def("split", &Splitter::split, nb::arg("layer"), nb::arg("topk_ids"), nb::arg("topk_weights"),
             nb::arg("offload"), nb::arg("prompts").none())
        .def("finder", &Splitter::finder)
        .def("found", &Splitter::found)
        .def("fall_back", &Splitter::fall_back)
        .def("moved", &Splitter::moved);
}
