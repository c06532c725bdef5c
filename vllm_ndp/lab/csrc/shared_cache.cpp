// A cache of experts in GPU memory beside a host that computes: each layer's missing experts are copied over the link or
// computed there, as many of each as end the layer soonest; an idle link brings what the host has computed, and what it
// carries delays later copies. One cache for all layers, or one each; the least recently used leaves. expert_cache.py is
// the user. Exact doubles, one thread.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;

namespace {

template <class T, size_t N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, size_t N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

constexpr uint8_t kHit = 1, kCopied = 2, kComputed = 3;
constexpr size_t kNobody = std::numeric_limits<size_t>::max();
constexpr size_t kMostWaiting = 64;  // experts that an idle link may still bring, the newest

void want(bool holds, const char* sentence) {
    if (!holds) throw std::invalid_argument(sentence);
}

// Cells (layer, expert) in the order of their use, in pools that hold so many each.
class Recency {
  public:
    Recency(size_t cells, size_t pools) : held_(cells, 0), next_(cells + pools), before_(cells + pools), sizes_(pools, 0) {
        for (size_t pool = 0; pool < pools; ++pool) next_[cells + pool] = before_[cells + pool] = cells + pool;
        cells_ = cells;
    }
    bool holds(size_t cell) const { return held_[cell]; }
    void use(size_t cell, size_t pool) {
        unlink(cell);
        link(cell, cells_ + pool);
    }
    void bring(size_t cell, size_t pool, size_t places) {
        if (!places) return;
        if (sizes_[pool] >= places) {
            const size_t leaves = before_[cells_ + pool];
            unlink(leaves);
            held_[leaves] = 0;
            --sizes_[pool];
        }
        held_[cell] = 1;
        ++sizes_[pool];
        link(cell, cells_ + pool);
    }

  private:
    void unlink(size_t cell) {
        next_[before_[cell]] = next_[cell];
        before_[next_[cell]] = before_[cell];
    }
    void link(size_t cell, size_t head) {
        next_[cell] = next_[head];
        before_[cell] = head;
        before_[next_[head]] = cell;
        next_[head] = cell;
    }
    size_t cells_;
    std::vector<uint8_t> held_;
    std::vector<size_t> next_, before_, sizes_;
};

struct Prices {
    const double *gpu, *host, *hop;  // [rows + 1]: an expert here, an expert there, so many rows there and back
    double opening, copy;            // before the first of some copies, and each of them
    bool copies, computes, fills;    // what may be done with a missing expert
};

// The link, and what waits until it is idle.
struct Link {
    double free_at = 0.0;
    size_t coming = kNobody;
    std::vector<size_t> waiting;  // the newest last

    void ask(size_t cell) {
        waiting.push_back(cell);
        if (waiting.size() > kMostWaiting) waiting.erase(waiting.begin());
    }

    // What has arrived by now, one call after the other; kNobody: nothing more. Starts what an idle link can.
    template <class Holds>
    size_t arrived(double now, const Prices& prices, const Holds& holds) {
        while (coming == kNobody || free_at <= now) {
            if (coming != kNobody) {
                const size_t cell = coming;
                coming = kNobody;
                return cell;
            }
            if (free_at >= now) return kNobody;
            while (!waiting.empty() && holds(waiting.back())) waiting.pop_back();
            if (waiting.empty()) {
                free_at = now;
                return kNobody;
            }
            coming = waiting.back();
            waiting.pop_back();
            free_at += prices.opening + prices.copy;
        }
        return kNobody;
    }
};

struct Division {
    double ends;
    size_t copied;
};

// How many of the missing, heaviest first, are copied so that the layer ends soonest; fewer where equal.
Division divided(const std::vector<int64_t>& missing, double here, double rows_hop, double link_busy, const Prices& prices) {
    const size_t count = missing.size();
    double rest = 0.0, moved = 0.0;
    for (int64_t rows : missing) rest += prices.host[rows];
    Division best{std::numeric_limits<double>::infinity(), 0};
    for (size_t f = 0; f <= count; ++f) {
        if (f) {
            rest -= prices.host[missing[f - 1]];
            moved += prices.gpu[missing[f - 1]];
        }
        if ((f && !prices.copies) || (f < count && !prices.computes)) continue;
        double ends = here + moved;
        if (f) {
            const double begins = link_busy + prices.opening;
            ends = std::max(ends, std::max(begins + prices.copy + moved,
                                           begins + static_cast<double>(f) * prices.copy + prices.gpu[missing[f - 1]]));
        }
        if (f < count) ends = std::max(ends, rows_hop + std::max(rest, 0.0));
        if (ends < best.ends) best = {ends, f};
    }
    return best;
}

// experts and rows [G, D, L, S]; start [G, P]: cells that the caches hold at first, the least recent first, -1 nothing;
// before [G, D]: what runs before each layer's experts, beside [G, D]: what runs with them on the GPU; places per pool.
// Writes done [G, D, L, S]: kHit, kCopied, kComputed; ends [G, D, L]; fills [G]: copies by an idle link.
void run(In<int64_t, 4> experts, In<int64_t, 4> rows, In<int64_t, 2> start, int64_t num_experts, int64_t places,
         bool one_pool, In<double, 2> before, In<double, 2> beside, In<int64_t, 2> active, In<double, 1> gpu,
         In<double, 1> host, In<double, 1> hop, double opening, double copy, bool copies, bool computes, bool fills,
         Out<uint8_t, 4> done, Out<double, 3> ends, Out<int64_t, 1> filled) {
    const size_t groups = experts.shape(0), steps = experts.shape(1), layers = experts.shape(2), slots = experts.shape(3);
    want(rows.size() == experts.size() && done.size() == experts.size() && ends.size() == groups * steps * layers &&
             before.size() == groups * steps && beside.size() == groups * steps && active.size() == groups * steps &&
             start.shape(0) == groups && filled.size() == groups && num_experts > 0 && places >= 0,
         "arrays of the same groups, steps, layers and slots are needed");
    want(host.size() == gpu.size() && hop.size() == gpu.size(), "prices must have an entry for every number of rows");
    for (size_t i = 0; i < experts.size(); ++i) {
        want(experts.data()[i] >= 0 && experts.data()[i] < num_experts, "expert ids must lie in 0..E-1");
        want(rows.data()[i] >= 0 && rows.data()[i] < static_cast<int64_t>(gpu.size()), "rows must have a price");
    }
    for (size_t i = 0; i < active.size(); ++i)
        want(active.data()[i] >= 0 && active.data()[i] < static_cast<int64_t>(gpu.size()), "rows must have a price");
    for (size_t i = 0; i < start.size(); ++i)
        want(start.data()[i] < num_experts * static_cast<int64_t>(layers), "cells must lie in 0..L*E-1");
    const Prices prices{gpu.data(), host.data(), hop.data(), opening, copy, copies, computes, fills};
    const size_t cells = layers * static_cast<size_t>(num_experts), pools = one_pool ? 1 : layers;
    const auto pool_of = [&](size_t cell) { return one_pool ? 0 : cell / static_cast<size_t>(num_experts); };
    nb::gil_scoped_release release;
    std::vector<size_t> order;
    std::vector<int64_t> missing;
    for (size_t g = 0; g < groups; ++g) {
        Recency cache(cells, pools);
        Link link;
        for (size_t i = 0; i < start.shape(1); ++i) {
            const int64_t cell = start.data()[g * start.shape(1) + i];
            if (cell >= 0 && !cache.holds(cell)) cache.bring(cell, pool_of(cell), places);
        }
        const auto holds = [&](size_t cell) { return cache.holds(cell); };
        double now = 0.0;
        filled.data()[g] = 0;
        for (size_t d = 0; d < steps; ++d) {
            const int64_t running = active.data()[g * steps + d];
            for (size_t l = 0; l < layers; ++l) {
                const size_t at = ((g * steps + d) * layers + l);
                now += before.data()[g * steps + d];
                for (size_t cell; (cell = link.arrived(now, prices, holds)) != kNobody;) {
                    if (!cache.holds(cell)) cache.bring(cell, pool_of(cell), places);
                    ++filled.data()[g];
                }
                const int64_t *ids = experts.data() + at * slots, *count = rows.data() + at * slots;
                uint8_t* flag = done.data() + at * slots;
                double here = beside.data()[g * steps + d];
                order.clear();
                for (size_t s = 0; s < slots; ++s) {
                    flag[s] = 0;
                    if (!count[s]) continue;
                    const size_t cell = l * num_experts + ids[s];
                    if (cache.holds(cell)) {
                        flag[s] = kHit;
                        here += prices.gpu[count[s]];
                        cache.use(cell, pool_of(cell));
                    } else {
                        order.push_back(s);
                    }
                }
                std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return count[a] > count[b]; });
                missing.clear();
                for (size_t s : order) missing.push_back(count[s]);
                Division best{here, 0};
                if (!missing.empty())
                    best = divided(missing, here, prices.hop[running], std::max(link.free_at - now, 0.0), prices);
                if (best.copied)
                    link.free_at = std::max(link.free_at, now) + opening + static_cast<double>(best.copied) * copy;
                for (size_t n = 0; n < order.size(); ++n) {
                    const size_t cell = l * num_experts + ids[order[n]];
                    flag[order[n]] = n < best.copied ? kCopied : kComputed;
                    if (n < best.copied)
                        cache.bring(cell, pool_of(cell), places);
                    else if (fills && places && cell != link.coming)
                        link.ask(cell);
                }
                if (running) now += best.ends;
                ends.data()[at] = running ? best.ends : 0.0;
            }
        }
    }
}

}  // namespace

NB_MODULE(_shared_cache, module) {
    module.def("run", &run, nb::arg("experts"), nb::arg("rows"), nb::arg("start"), nb::arg("num_experts"),
               nb::arg("places"), nb::arg("one_pool"), nb::arg("before"), nb::arg("beside"), nb::arg("active"),
               nb::arg("gpu"), nb::arg("host"), nb::arg("hop"), nb::arg("opening"), nb::arg("copy"), nb::arg("copies"),
               nb::arg("computes"), nb::arg("fills"), nb::arg("done"), nb::arg("ends"), nb::arg("filled"));
}
