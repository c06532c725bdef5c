// Caches of every size at once: at what depth of a stack each choice of a trace is found, so that a cache of C experts hits
// where the depth is below C; and how many tokens lie between two uses. A lane is one layer of one request. Whole numbers
// only, no randomness but a hash. locality.py is the user, tests/vllm_ndp/lab/test_locality.py has the slow way.
// Source of the stack: Mattson, Gecsei, Slutz and Traiger, Evaluation techniques for storage hierarchies, 1970.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.h"

namespace nb = nanobind;

namespace {

constexpr uint64_t kInUse = uint64_t{1} << 63;  // above every priority: experts of the token that runs stay
constexpr uint32_t kNever = 0xffffffffu;

// Choices of a trace [N, L, k], and which rows in which order are the requests: rows[ends[r]..ends[r + 1]).
struct Choices {
    In<uint16_t, 3> ids;
    In<int64_t, 1> rows, ends;
    size_t num_experts;

    void check() const {
        want(ends.size() > 0 && ends.data()[0] == 0, "ends must begin with 0");
        for (size_t r = 1; r < ends.size(); ++r) want(ends.data()[r - 1] <= ends.data()[r], "ends must not fall");
        want(ends.data()[ends.size() - 1] == static_cast<int64_t>(rows.size()), "ends must end with the number of rows");
        for (size_t i = 0; i < rows.size(); ++i)
            want(rows.data()[i] >= 0 && rows.data()[i] < static_cast<int64_t>(ids.shape(0)), "rows must lie in 0..N-1");
        for (size_t i = 0; i < ids.size(); ++i) want(ids.data()[i] < num_experts, "expert ids must lie in 0..E-1");
    }
    size_t requests() const { return ends.size() - 1; }
    size_t layers() const { return ids.shape(1); }
    size_t top_k() const { return ids.shape(2); }
    const uint16_t* at(size_t token, size_t layer) const {
        return ids.data() + (static_cast<size_t>(rows.data()[token]) * layers() + layer) * top_k();
    }
};

enum class Policy { kLru, kLfu, kRandom, kOracle };

Policy policy_named(const std::string& name) {
    if (name == "lru") return Policy::kLru;
    if (name == "lfu") return Policy::kLfu;
    if (name == "random") return Policy::kRandom;
    if (name == "oracle") return Policy::kOracle;
    throw std::invalid_argument("policy must be lru, lfu, random or oracle");
}

struct Stack {
    std::vector<uint16_t> held;      // from the top
    std::vector<uint64_t> priority;  // of each expert; the lower one sinks
    uint64_t random = 0;

    size_t depth_of(uint16_t expert) const {
        return static_cast<size_t>(std::find(held.begin(), held.end(), expert) - held.begin());
    }

    // The expert was at `depth` (the stack's size: nowhere) and comes to the top, or sinks to where its priority holds it.
    template <class Sinks>
    void use(uint16_t expert, size_t depth, bool comes_to_top, const Sinks& sinks) {
        if (depth == held.size()) held.push_back(expert);
        uint16_t carried = expert;
        size_t place = 0;
        if (comes_to_top) {
            std::swap(carried, held[0]);
            if (depth == 0) return;
            place = 1;
        }
        for (; place < depth; ++place)
            if (!sinks(carried, held[place], place)) std::swap(carried, held[place]);
        held[depth] = carried;
    }
};

// For every row and slot of one lane the token of the next use, kNever where there is none.
void next_uses(const Choices& choices, size_t layer, size_t first, size_t last, std::vector<uint32_t>& next) {
    const size_t k = choices.top_k();
    std::vector<uint32_t> coming(choices.num_experts, kNever);
    next.resize((last - first) * k);
    for (size_t t = last; t-- > first;) {
        const uint16_t* chosen = choices.at(t, layer);
        for (size_t s = 0; s < k; ++s) next[(t - first) * k + s] = coming[chosen[s]];
        for (size_t s = 0; s < k; ++s) coming[chosen[s]] = static_cast<uint32_t>(t - first);
    }
}

void run_lane(const Choices& choices, size_t layer, size_t request, Policy policy, Stack& stack, int64_t* counts,
              int64_t* early, int64_t early_tokens) {
    const size_t k = choices.top_k(), nowhere = choices.num_experts;
    const size_t first = choices.ends.data()[request], last = choices.ends.data()[request + 1];
    std::vector<uint32_t> next;
    std::vector<uint32_t> frequency(nowhere, 0);
    std::vector<size_t> depth(k);
    if (policy == Policy::kOracle) next_uses(choices, layer, first, last, next);
    stack.random = scrambled(layer * 0x10001 + request);
    const auto lower = [&](uint16_t carried, uint16_t held, size_t) {
        return stack.priority[carried] <= stack.priority[held];
    };
    const auto by_chance = [&](uint16_t, uint16_t, size_t place) {
        stack.random = scrambled(stack.random);
        return (stack.random >> 32) * (place + 1) < (uint64_t{place} << 32);
    };
    const auto always = [](uint16_t, uint16_t, size_t) { return false; };
    for (size_t t = first; t < last; ++t) {
        const uint16_t* chosen = choices.at(t, layer);
        const size_t size = stack.held.size();
        for (size_t s = 0; s < k; ++s) {
            depth[s] = stack.depth_of(chosen[s]);
            const size_t found = depth[s] == size ? nowhere : depth[s];
            ++counts[found];
            if (static_cast<int64_t>(t - first) < early_tokens) ++early[found];
            ++frequency[chosen[s]];
            stack.priority[chosen[s]] = policy == Policy::kOracle ? ~uint64_t{next[(t - first) * k + s]} : kInUse;
        }
        for (size_t s = 0; s < k; ++s) {
            const size_t from = s ? stack.depth_of(chosen[s]) : depth[0];
            if (policy == Policy::kLru) stack.use(chosen[s], from, true, always);
            if (policy == Policy::kLfu) stack.use(chosen[s], from, true, lower);
            if (policy == Policy::kRandom) stack.use(chosen[s], from, true, by_chance);
            if (policy == Policy::kOracle) stack.use(chosen[s], from, false, lower);
        }
        if (policy == Policy::kLfu)
            for (size_t s = 0; s < k; ++s)
                stack.priority[chosen[s]] = (uint64_t{frequency[chosen[s]]} << 32) + (t - first);
    }
}

// Adds to counts [L, E + 1], how many choices were found at each depth, and to early, the same of the first tokens of a
// request; the last entry: nowhere. Stacks are empty at first.
void depths(In<uint16_t, 3> ids, In<int64_t, 1> rows, In<int64_t, 1> ends, int64_t num_experts, const std::string& policy,
            int64_t early_tokens, Out<int64_t, 2> counts, Out<int64_t, 2> early) {
    const Choices choices{ids, rows, ends, static_cast<size_t>(num_experts)};
    choices.check();
    const Policy kind = policy_named(policy);
    const size_t layers = choices.layers(), experts = choices.num_experts;
    want(counts.shape(0) == layers && counts.shape(1) == experts + 1 && early.shape(0) == layers &&
             early.shape(1) == experts + 1,
         "counts and early must be [L, E + 1]");
    nb::gil_scoped_release release;
    Stack stack;
    for (size_t layer = 0; layer < layers; ++layer) {
        for (size_t request = 0; request < choices.requests(); ++request) {
            stack.held.clear();
            stack.priority.assign(experts, 0);
            run_lane(choices, layer, request, kind, stack, counts.data() + layer * (experts + 1),
                     early.data() + layer * (experts + 1), early_tokens);
        }
    }
}

}  // namespace

NB_MODULE(_stacks, module) {
    module.def("stack_depths", &depths, nb::arg("ids"), nb::arg("rows"), nb::arg("ends"), nb::arg("num_experts"),
               nb::arg("policy"), nb::arg("early_tokens"), nb::arg("counts"), nb::arg("early"));
}
