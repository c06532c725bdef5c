// The search of a joint plan (joint.py): prices of limits, descents of layers, the best mixture of their plans. Sums run in
// numpy's order, and nothing is decided by more than + - * / and sqrt, so plans are the same to the bit on every processor.
// Values only: C choices, L layers of E experts, N cells that choose, R limits.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"

namespace nb = nanobind;

namespace {

using Floats = std::vector<double>;
using Plan = std::vector<uint16_t>;  // [N], the choice of each cell

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kTiny = 1e-300;
constexpr double kSlack = 1e-9;  // a limit holds if it is exceeded by no more than this share: sums in another order
constexpr double kFull = 1e-3;   // the share of a limit that may be left over
constexpr double kClose = 2e-3;  // a budget's price is right when its logarithm is off by no more
constexpr double kLeast = 1e-9;  // of chances and widths that are divided by
constexpr int kInnerSteps = 8;   // prices of bytes that are tried at each price of the first limit
constexpr int kSteps = 8, kFirstSteps = 2;  // prices of the first limit: tried, and on all layers after a sample of them
constexpr int kRepairs = 12, kRounds = 2, kFills = 2, kExchanges = 20, kDescents = 12;
constexpr size_t kExchanged = 200, kPolished = 100;  // changes that are paired, of layers and of experts
constexpr size_t kLooked = 40;                       // of their pairs so many are tried
constexpr double kPolishing = 2e8;                   // choices of experts that are looked at in all, about
constexpr std::array<double, 5> kLeans{1, 4, 0.25, 16, 0};     // shares of a limit's price at which changes are looked for
constexpr std::array<double, 4> kWeights{0.03, 0.25, 4, 30};   // of one side where sides take turns, for other first plans
constexpr size_t kStarted = 1 << 14, kFewLayers = 8;           // up to so many choices in so few layers
constexpr size_t kKicks = 40, kKicked = 1 << 10;  // random changes of a few experts, where there are no more choices
constexpr double kSample = 1200;    // experts on which the first prices are searched, about
constexpr size_t kFirstShare = 4;   // of a layer's experts one in so many changes in the first step of a descent

double sum(const double* values, size_t n) {  // in numpy's order, pair by pair
    if (n < 8) return std::accumulate(values, values + n, 0.0);
    if (n > 128) {
        const size_t half = n / 2 - n / 2 % 8;
        return sum(values, half) + sum(values + half, n - half);
    }
    std::array<double, 8> of;
    std::copy_n(values, 8, of.begin());
    size_t i = 8;
    for (; i + 8 <= n; i += 8)
        for (size_t j = 0; j < 8; ++j) of[j] += values[i + j];
    double all = ((of[0] + of[1]) + (of[2] + of[3])) + ((of[4] + of[5]) + (of[6] + of[7]));
    for (; i < n; ++i) all += values[i];
    return all;
}
double sum(const Floats& values) { return sum(values.data(), values.size()); }

double log(double x) {  // alike on every processor, which libm's is not
    if (!std::isfinite(x)) return std::numeric_limits<double>::quiet_NaN();
    int exponent;
    double mantissa = std::frexp(x, &exponent);
    if (mantissa < 0.7071067811865476) mantissa *= 2, --exponent;
    const double ratio = (mantissa - 1) / (mantissa + 1), square = ratio * ratio;
    double series = 0;
    for (int odd = 23; odd > 0; odd -= 2) series = series * square + 1.0 / odd;
    return exponent * 0.6931471805599453 + 2 * ratio * series;
}

double exp(double x) {
    const double whole = std::nearbyint(x / 0.6931471805599453), rest = x - whole * 0.6931471805599453;
    double series = 1;
    for (int factor = 18; factor > 0; --factor) series = 1 + series * rest / factor;
    return std::ldexp(series, static_cast<int>(whole));
}

bool precedes(double a, double b) { return b == b && !(b <= a); }  // for the first of the least, or the first NaN

// What each choice takes: of every cell [C, N], or alike for all [C].
struct Amounts {
    Floats values;
    size_t cells;

    double of(size_t choice, size_t cell) const { return values[cells == 1 ? choice : choice * cells + cell]; }
    double total(const Plan& plan) const {
        if (cells > 1) {
            Floats each(cells);
            for (size_t i = 0; i < cells; ++i) each[i] = values[plan[i] * cells + i];
            return sum(each);
        }
        Floats each(values.size());
        for (const uint16_t choice : plan) ++each[choice];
        for (size_t c = 0; c < each.size(); ++c) each[c] *= values[c];
        return sum(each);
    }
    double spread() const {  // mean over cells of the most less the least
        Floats each(cells);
        const size_t choices = values.size() / cells;
        for (size_t i = 0; i < cells; ++i) {
            double most = values[i], least = most;
            for (size_t c = 1; c < choices; ++c) {
                most = std::max(most, values[c * cells + i]);
                least = std::min(least, values[c * cells + i]);
            }
            each[i] = most - least;
        }
        return sum(each) / static_cast<double>(cells);
    }
    Amounts layers(size_t experts, size_t first, size_t stride) const {
        if (cells == 1) return *this;
        Amounts some{{}, 0};
        for (size_t start = 0; start < values.size(); start += cells)
            for (size_t at = first * experts; at < cells; at += stride * experts)
                some.values.insert(some.values.end(), values.begin() + start + at, values.begin() + start + at + experts);
        some.cells = some.values.size() / (values.size() / cells);
        return some;
    }
};

// An objective under limits, of which the first is that of loss, the others are bytes. A cell is an expert that
// chooses, or a layer among its plans.
struct Limited {
    size_t choices, cells;
    Amounts objective;
    std::vector<Amounts> takes;
    Floats most;

    Floats over(const Plan& plan) const {  // by how much each limit is exceeded; 0 where it holds
        Floats over(most.size());
        for (size_t r = 0; r < most.size(); ++r)
            if (const double used = takes[r].total(plan); used > most[r] * (1 + kSlack)) over[r] = used - most[r];
        return over;
    }
    // In what order plans are preferred: bytes exceeded, the first limit exceeded, the objective.
    std::tuple<double, double, double> demerits(const Plan& plan) const {
        Floats over = this->over(plan);
        double bytes = 0;
        for (size_t r = 0; r < over.size(); ++r) over[r] /= std::max(most[r], kTiny);
        for (size_t r = 1; r < over.size(); ++r) bytes += over[r];
        return {bytes, over[0], objective.total(plan)};
    }
    void values(const Floats& prices, size_t choice, size_t first, size_t last, double* out) const {  // [last - first]
        for (size_t i = first; i < last; ++i) out[i - first] = objective.of(choice, i);
        for (size_t r = 0; r < prices.size(); ++r) {
            if (prices[r] == 0) continue;
            if (takes[r].cells == 1) {
                const double cost = prices[r] * takes[r].values[choice];
                for (size_t i = first; i < last; ++i) out[i - first] += cost;
            } else {
                const double* each = takes[r].values.data() + choice * cells;
                for (size_t i = first; i < last; ++i) out[i - first] += prices[r] * each[i];
            }
        }
    }
    Plan cheapest(const Floats& prices) const {  // everyone's choice at these prices [R] of the limits
        Plan best(cells);
        Floats least(cells), value(cells);
        values(prices, 0, 0, cells, least.data());
        for (size_t c = 1; c < choices; ++c) {
            values(prices, c, 0, cells, value.data());
            for (size_t i = 0; i < cells; ++i)
                if (precedes(value[i], least[i])) least[i] = value[i], best[i] = static_cast<uint16_t>(c);
        }
        return best;
    }
    // How much more each other choice of some cells costs, [C, last - first].
    Floats changes(const Floats& prices, const Plan& plan, size_t first, size_t last) const {
        const size_t n = last - first;
        Floats all(choices * n), now(n);
        for (size_t c = 0; c < choices; ++c) values(prices, c, first, last, all.data() + c * n);
        for (size_t i = 0; i < n; ++i) now[i] = all[plan[first + i] * n + i];
        for (size_t c = 0; c < choices; ++c)
            for (size_t i = 0; i < n; ++i) all[c * n + i] -= now[i];
        return all;
    }
    // The same, at least 0, and infinite where a change would take more of a limit that is used up; but not of `but`.
    Floats costs(const Floats& prices, const Plan& plan, size_t but, bool but_first) const {
        Floats cost = changes(prices, plan, 0, cells);
        for (double& each : cost) each = each < 0 ? 0 : each;
        for (size_t r = 0; r < most.size(); ++r) {
            if (r == but || (r == 0 && but_first) || !(takes[r].total(plan) >= most[r] * (1 - kFull))) continue;
            for (size_t c = 0; c < choices; ++c)
                for (size_t i = 0; i < cells; ++i)
                    if (takes[r].of(c, i) > takes[r].of(plan[i], i)) cost[c * cells + i] = kInf;
        }
        return cost;
    }
    Limited freed() const {  // as little as possible of what the first limit is about, within the others
        Limited free{choices, cells, takes[0], takes, most};
        free.most[0] = kInf;
        return free;
    }
    Limited layers(size_t experts, size_t first, size_t stride) const {  // some, with their share of every limit
        Limited some{choices, 0, objective.layers(experts, first, stride), {}, most};
        some.cells = some.objective.cells;
        const double share = static_cast<double>(some.cells) / static_cast<double>(cells);
        for (const Amounts& each : takes) some.takes.push_back(each.layers(experts, first, stride));
        for (double& each : some.most) each *= share;
        return some;
    }
};

// Where a falling function of a price crosses 0: a bracket that widens, then secants in logs, kept inside it.
struct Root {
    double price, width, nearest = price, least = kInf;
    bool is_found = false;
    std::optional<std::pair<double, double>> low, high;  // (log price, value > 0), (log price, value <= 0)

    void learn(double value) {  // the function at `price`; sets the next price
        if (std::abs(value) < least) least = std::abs(value), nearest = price;
        is_found = least < kClose;
        (value > 0 ? low : high) = std::pair{log(std::max(price, kTiny)), value};
        if (!low || !high) {
            price *= value > 0 ? width : 1 / width;
            width *= width;
            return;
        }
        const auto [a, fa] = *low;
        const auto [b, fb] = *high;
        const double share = fa - fb < 50 ? std::min(std::max(fa / (fa - fb), 0.1), 0.9) : 0.5;
        price = exp(a + share * (b - a));
    }
};

// Prices at which every limit just holds: that of loss or time outside, those of bytes inside.
struct PriceSearch {
    const Limited& limited;
    bool is_near;
    Floats prices, scales, most;
    std::vector<Plan> plans;  // at each price of the first limit

    PriceSearch(const Limited& given, const Floats* known)
        : limited(given), is_near(known), prices(known ? *known : Floats(given.most.size())) {
        const double spread = limited.objective.spread();
        for (const Amounts& each : limited.takes) scales.push_back(spread / std::max(each.spread(), kTiny));
        for (const double each : limited.most) most.push_back(log(std::max(each, kTiny)));
    }
    void run(int steps) {  // try so many prices of the first limit, each nearer to that at which it just holds
        if (!is_near || prices[0] == 0) {
            prices[0] = 0;
            plans.push_back(settled());
            if (over(0, plans.back()) <= 0) return;
        }
        Root root{prices[0] != 0 ? prices[0] : scales[0], is_near ? 1.05 : 16.0};
        for (int step = 0; step < steps && !root.is_found; ++step) {
            prices[0] = root.price;
            plans.push_back(settled());
            root.learn(over(0, plans.back()));
        }
        prices[0] = root.nearest;
        if (!root.is_found) plans.push_back(settled());
    }

  private:
    Plan settled() {  // the plan at prices of bytes at which every budget just holds
        Plan plan = limited.cheapest(prices);
        for (size_t r = 1; r < prices.size(); ++r) {
            const double exceeded = over(r, plan);
            bool known = prices[r] != 0;
            if (exceeded <= 0 && !known) continue;
            Root root{known ? prices[r] : scales[r], known ? 1.2 : 16.0};
            if (known) root.learn(exceeded);
            for (int left = known ? kInnerSteps : 2 * kInnerSteps; left > 0 && !(known && root.is_found); --left) {
                prices[r] = root.price;
                known = true;
                plan = limited.cheapest(prices);
                root.learn(over(r, plan));
            }
            if (root.nearest < 1e-6 * scales[r]) prices[r] = 0;
        }
        return plan;
    }
    double over(size_t r, const Plan& plan) const {  // log of what is used over what there is
        return log(std::max(limited.takes[r].total(plan), kTiny)) - most[r];
    }
};

// Changes of cells to their best other choices, from the least cost per gain up; those that gain nothing are not in it.
struct Changes {
    std::vector<size_t> cells;
    Plan best;
    Floats gains;

    Changes(const Limited& limited, const Floats& cost, const Floats& gain) {
        const size_t n = limited.cells;
        Floats least(n);
        Plan to(n);
        for (size_t c = 0; c < limited.choices; ++c)
            for (size_t i = 0; i < n; ++i) {
                const double gained = gain[c * n + i];
                const double ratio = gained <= 0 ? kInf : cost[c * n + i] / std::max(gained, kTiny);
                if (!c || precedes(ratio, least[i])) least[i] = ratio, to[i] = static_cast<uint16_t>(c);
            }
        for (size_t i = 0; i < n; ++i)
            if (std::isfinite(least[i])) cells.push_back(i);
        std::stable_sort(cells.begin(), cells.end(), [&](size_t a, size_t b) { return least[a] < least[b]; });
        for (const size_t i : cells) best.push_back(to[i]), gains.push_back(gain[to[i] * n + i]);
    }
    Plan first(const Plan& plan, size_t count) const {
        Plan after = plan;
        for (size_t i = 0; i < std::min(count, cells.size()); ++i) after[cells[i]] = best[i];
        return after;
    }
};

// How much less of it each change takes, [C, N].
Floats saved(const Limited& limited, const Amounts& amounts, const Plan& plan) {
    Floats saved(limited.choices * limited.cells);
    for (size_t c = 0; c < limited.choices; ++c)
        for (size_t i = 0; i < limited.cells; ++i)
            saved[c * limited.cells + i] = amounts.of(plan[i], i) - amounts.of(c, i);
    return saved;
}

// Two plans on both sides of the first limit: as many experts as possible from the bolder one.
Plan mixed(const Limited& limited, const std::vector<Plan>& plans) {
    const Amounts& takes = limited.takes[0];
    const Plan *careful = nullptr, *bold = nullptr;
    double most = 0, least = 0;
    for (const Plan& plan : plans) {
        const double used = takes.total(plan);
        if (used <= limited.most[0]) {
            if (!careful || used > most) careful = &plan, most = used;
        } else if (!bold || used < least) {
            bold = &plan, least = used;
        }
    }
    if (!careful || !bold) return plans.back();
    Plan mixed = *careful;
    double steps = 0;
    size_t end = 0;
    for (size_t i = 0; i < limited.cells; ++i) {
        if ((*careful)[i] == (*bold)[i]) continue;
        steps += takes.of((*bold)[i], i) - takes.of((*careful)[i], i);
        if (steps <= limited.most[0] - most) end = i + 1;
    }
    std::copy_n(bold->begin(), end, mixed.begin());
    return mixed;
}

// The plan with as few changes as it needs to keep within every limit, as far as that succeeds.
Plan within(const Limited& limited, Floats prices, Plan plan) {
    for (int repair = 0; repair < kRepairs; ++repair) {
        const Floats over = limited.over(plan);
        size_t r = 0;
        double worst = 0;
        for (size_t each = 1; each < over.size(); ++each)
            if (const double share = over[each] / std::max(limited.most[each], 1.0); share > worst) worst = share, r = each;
        if (!r && !(over[0] > 0)) return plan;
        const Changes changes(limited, limited.costs(prices, plan, r, true), saved(limited, limited.takes[r], plan));
        if (changes.cells.empty()) break;
        double gained = 0;
        size_t count = 0;
        while (count < changes.gains.size() && (gained += changes.gains[count], gained < over[r] * (1 - 1e-12))) ++count;
        plan = changes.first(plan, count + 1);
        prices[r] = prices[r] * 1.5 + 1e-12;  // the next change should not undo this one
    }
    return plan;
}

// The plan with what the limits leave over spent: the changes that gain most for what they use, as many as fit.
Plan filled(const Limited& limited, const Floats& prices, const Plan& plan) {
    const size_t no_limit = limited.most.size();
    const Changes changes(limited, limited.costs(prices, plan, no_limit, false), saved(limited, limited.objective, plan));
    std::vector<bool> fits(changes.cells.size(), true);
    for (size_t r = 0; r < limited.most.size(); ++r) {
        const double room = limited.most[r] * (1 + kSlack) - limited.takes[r].total(plan);
        double more = 0;
        for (size_t i = 0; i < fits.size(); ++i) {
            const size_t cell = changes.cells[i];
            more += limited.takes[r].of(changes.best[i], cell) - limited.takes[r].of(plan[cell], cell);
            if (!(more <= room)) fits[i] = false;
        }
    }
    size_t count = fits.size();
    while (count && !fits[count - 1]) --count;
    return changes.first(plan, count);
}

using Costs = std::vector<std::pair<double, size_t>>;  // what a change costs, and which it is: choice * N + cell

struct CostsLess {
    bool operator()(const Costs::value_type& a, const Costs::value_type& b) const {
        return precedes(a.first, b.first) || (a.first == b.first && a.second < b.second);
    }
};

// The least of some that are in order each, in order.
Costs merged(const std::vector<Costs>& each, size_t count) {
    using Next = std::pair<Costs::const_iterator, Costs::const_iterator>;
    const auto later = [](const Next& a, const Next& b) { return CostsLess()(*b.first, *a.first); };
    std::vector<Next> heap;  // of what is left of each, the least in front
    for (const Costs& costs : each)
        if (!costs.empty()) heap.emplace_back(costs.begin(), costs.end());
    std::make_heap(heap.begin(), heap.end(), later);
    Costs all;
    while (all.size() < count && !heap.empty()) {
        std::pop_heap(heap.begin(), heap.end(), later);
        Next& least = heap.back();
        all.push_back(*least.first++);
        if (least.first == least.second) heap.pop_back();
        else std::push_heap(heap.begin(), heap.end(), later);
    }
    return all;
}

// So many changes of cells, from the first on and before the last, that cost least at the prices, and at most a bound.
Costs nearest(const Limited& limited, const Floats& prices, const Plan& plan, size_t first, size_t last, size_t count,
              double bound = kInf) {
    const size_t n = last - first;
    Floats change = limited.changes(prices, plan, first, last);
    for (size_t i = 0; i < n; ++i) change[plan[first + i] * n + i] = kInf;
    Costs costs;
    for (size_t c = 0, at = 0; c < limited.choices; ++c)
        for (size_t i = first; i < last; ++i, ++at)
            if (!(change[at] > bound)) costs.emplace_back(change[at], c * limited.cells + i);
    if (count < costs.size()) {
        std::nth_element(costs.begin(), costs.begin() + count, costs.end(), CostsLess());
        costs.resize(count);
    }
    std::sort(costs.begin(), costs.end(), CostsLess());
    return costs;
}

// One or two cells changed so that the objective falls most, by `least` or more, within every limit; whether any does. Only
// these changes are paired. is_better: whether a changed plan is to be kept.
template <class Better>
bool exchange(const Limited& limited, const Costs& near, Plan& plan, double least, Better is_better) {
    const size_t n = limited.cells, count = near.size();
    std::vector<size_t> cell, choice;
    for (const auto& [_, at] : near) cell.push_back(at % n), choice.push_back(at / n);
    cell.push_back(n);  // of no change
    const auto more = [&](const Amounts& amounts) {  // what each change adds; 0 for no change, last
        Floats adds;
        for (size_t i = 0; i < count; ++i) adds.push_back(amounts.of(choice[i], cell[i]) - amounts.of(plan[cell[i]], cell[i]));
        adds.push_back(0);
        return adds;
    };
    const Floats gain = more(limited.objective);
    std::vector<Floats> adds;
    Floats room, least_added;
    for (size_t r = 0; r < limited.most.size(); ++r) {
        adds.push_back(more(limited.takes[r]));
        room.push_back(limited.most[r] * (1 + kSlack) - limited.takes[r].total(plan));
        least_added.push_back(*std::min_element(adds[r].begin(), adds[r].end()));
    }
    std::vector<size_t> order;  // of changes that fit with any other one, from the most gained
    for (size_t i = 0; i <= count; ++i) {
        bool fits = true;
        for (size_t r = 0; r < room.size() && fits; ++r) fits = !(adds[r][i] + least_added[r] > room[r]);
        if (fits) order.push_back(i);
    }
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return gain[a] < gain[b]; });
    std::vector<std::tuple<double, size_t, size_t>> pairs;  // a heap of the best, its worst in front
    double bound = -least;
    for (size_t first = 0; first < order.size() && !(gain[order[first]] + gain[order[0]] > bound); ++first)
        for (size_t second = first + 1; second < order.size(); ++second) {
            const auto [i, j] = std::minmax(order[first], order[second]);
            const double both = gain[i] + gain[j];
            if (both > bound) break;
            const std::tuple pair{both, i, j};
            if (!(both < -least) || cell[i] == cell[j] || (pairs.size() == kLooked && pair > pairs.front())) continue;
            bool fits = true;
            for (size_t r = 0; r < room.size() && fits; ++r) fits = !(adds[r][i] + adds[r][j] > room[r]);
            if (!fits) continue;
            if (pairs.size() == kLooked) {
                std::pop_heap(pairs.begin(), pairs.end());
                pairs.pop_back();
            }
            pairs.push_back(pair);
            std::push_heap(pairs.begin(), pairs.end());
            if (pairs.size() == kLooked) bound = std::get<0>(pairs.front());
        }
    std::sort_heap(pairs.begin(), pairs.end());
    for (const auto& [_, i, j] : pairs) {
        Plan after = plan;
        after[cell[i]] = static_cast<uint16_t>(choice[i]);
        if (j < count) after[cell[j]] = static_cast<uint16_t>(choice[j]);
        if (!is_better(after)) continue;
        plan = std::move(after);
        return true;
    }
    return false;
}

constexpr size_t kLanes = 8;  // experts that are looked at together
using Lanes = double __attribute__((vector_size(kLanes * sizeof(double))));
#define INLINED inline __attribute__((always_inline))  // into its caller, for the processor that this one is made for
#ifdef __x86_64__
#define IN_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))  // the same operations, so the same bits
#else
#define IN_VECTORS
#endif

template <class V>
INLINED V larger(const V& a, const V& b) { return a < b ? b : a; }
template <class V>
INLINED V smaller(const V& a, const V& b) { return b < a ? b : a; }
INLINED double root(double square) { return std::sqrt(square); }
INLINED Lanes root(Lanes square) {
    for (size_t i = 0; i < kLanes; ++i) square[i] = std::sqrt(square[i]);
    return square;
}

constexpr size_t kLevels = 6;  // openings of one side that differ

// Sums over the experts on one side of a layer, as joint.py explains them; V: of one layer, or of Lanes of it.
template <class V>
struct Sums {
    V ps{}, spread{}, lean{};
    std::array<V, kLevels> unused;  // the chance that a step opens nothing of a level or of a higher one

    INLINED Sums opened(const Floats& openings) const {  // rising; the highest of those that a step opens is paid
        V mean{}, square{};
        double below = 0;
        for (size_t k = 0; k < openings.size(); below = openings[k++]) {
            mean += (openings[k] - below) * (1 - unused[k]);
            square += (openings[k] * openings[k] - below * below) * (1 - unused[k]);
        }
        return {ps + mean, spread + larger(square - mean * mean, V{}), lean, unused};
    }
};
using Side = Sums<double>;

// Expected time of the slower of two, of this variance of their difference at most.
template <class V>
INLINED V slower(const V& a, const V& b, const V& variance) {
    const V apart = a - b, both = a + b;
    return (both + smaller(root(apart * apart + larger(variance, V{})), both)) / 2;
}

// Of two sides, their covariance counted; picks: sum of d.
template <class V>
INLINED V slower(const Sums<V>& a, const Sums<V>& b, double picks) {
    const V leans = a.lean - b.lean;
    return slower(a.ps, b.ps, a.spread + b.spread - leans * leans / picks);
}

// Expected time of the slowest of one to three sides. Of three the covariance of two is counted, of those two that give
// the least bound: so the time grows with that of each side, and a side without experts adds nothing.
template <class V>
INLINED V slowest(const std::array<Sums<V>, 3>& sides, size_t count, double picks) {
    const auto& [a, b, c] = sides;
    if (count == 1) return a.ps;
    if (count == 2) return slower(a, b, picks);
    const V spread = a.spread + b.spread + c.spread;
    const V first = slower(slower(a, b, picks), c.ps, spread), second = slower(slower(a, c, picks), b.ps, spread);
    return smaller(smaller(first, second), slower(slower(b, c, picks), a.ps, spread));
}

// Plans that layers choose among, each layer for itself: what a layer takes under each plan, [K, L] as Limited has them.
struct Columns {
    std::vector<Plan> plans;  // [L * E]
    Limited layers;
};

// The least time at a loss of at most `most`, or the least loss in a time of at most that.
class Problem {
  public:
    Problem(In<int64_t, 1> side_of, std::vector<double> openings, In<double, 3> ps, In<double, 3> loss,
            In<double, 3> moving, In<double, 3> turns, In<double, 2> used, std::vector<In<double, 1>> takes,
            std::vector<double> budgets)
        : choices_(ps.shape(0)), num_layers_(ps.shape(1)), experts_(ps.shape(2)), ps_(of(ps)),
          loss_(of(loss)), moving_(of(moving)), turns_(of(turns)), budgets_(budgets) {
        const size_t n = cells();
        for (const auto& each : {ps, loss, moving, turns})
            want(each.shape(0) == choices_ && each.shape(1) == num_layers_ && each.shape(2) == experts_,
                 "times, losses and moves must be [C, L, E]");
        want(side_of.size() == choices_ && choices_ > 0 && choices_ <= UINT16_MAX && n > 0, "choices must be [C], cells some");
        want(used.shape(0) == num_layers_ && used.shape(1) == experts_, "chances must be [L, E]");
        want(openings.size() == choices_, "every choice needs its opening");
        want(takes.size() == budgets.size(), "every budget needs what is taken of it");
        for (size_t c = 0; c < choices_; ++c) {
            want(side_of.data()[c] >= 0 && side_of.data()[c] < 3, "a plan has one to three sides");
            side_of_.push_back(static_cast<size_t>(side_of.data()[c]));
        }
        openings_.resize(*std::max_element(side_of_.begin(), side_of_.end()) + 1);
        for (size_t s = 0; s < openings_.size(); ++s) {
            std::set<double> levels;
            for (size_t c = 0; c < choices_; ++c)
                if (side_of_[c] == s) levels.insert(openings[c]);
            want(levels.size() <= kLevels, "a side has up to six openings");
            openings_[s].assign(levels.begin(), levels.end());
        }
        for (size_t c = 0; c < choices_; ++c) {
            const Floats& levels = openings_[side_of_[c]];
            level_.push_back(static_cast<size_t>(std::find(levels.begin(), levels.end(), openings[c]) - levels.begin()));
        }
        for (const auto& each : takes) {
            want(each.size() == choices_ || each.size() == choices_ * n, "bytes must be [C] or [C * L * E]");
            takes_.push_back({Floats(each.data(), each.data() + each.size()), each.size() == choices_ ? 1 : n});
        }
        idle_.resize(n), busy_.resize(n), picks_.resize(num_layers_);
        Floats picked(experts_);
        for (size_t l = 0; l < num_layers_; ++l) {
            for (size_t e = 0; e < experts_; ++e) {
                const double chance = used.data()[l * experts_ + e];
                idle_[l * experts_ + e] = std::max(1 - chance, kLeast);
                busy_[l * experts_ + e] = std::max(chance, kLeast);
                picked[e] = chance * (1 - chance);
            }
            picks_[l] = std::max(sum(picked), kLeast);
        }
    }

    // Time of each layer [K, L] under plans [K, L * E], without what moves.
    void times(In<int64_t, 2> plans, Out<double, 2> out) const {
        want(out.shape(0) == plans.shape(0) && out.shape(1) == num_layers_, "times must be [K, L]");
        for (size_t k = 0; k < plans.shape(0); ++k) {
            const Plan plan = plan_of(plans.data() + k * cells(), plans.shape(1));
            for (size_t l = 0; l < num_layers_; ++l) out.data()[k * num_layers_ + l] = time(plan, l);
        }
    }
    // How much more a layer takes when one expert changes alone, [C, L, E].
    void changes(In<int64_t, 1> chosen, Out<double, 3> out) const {
        want(out.size() == choices_ * cells(), "changes must be [C, L, E]");
        const Plan plan = plan_of(chosen.data(), chosen.size());
        Floats more(choices_ * experts_);
        for (size_t l = 0; l < num_layers_; ++l) {
            changes(plan, l, more.data());
            for (size_t c = 0; c < choices_; ++c)
                std::copy_n(more.data() + c * experts_, experts_, out.data() + c * cells() + l * experts_);
        }
    }
    // The best of all plans; of those that keep no limit the one that exceeds them least. A layer's plans are timed once.
    void tried(double most, Out<int64_t, 1> out) const {
        std::vector<Plan> plans;
        Plan plan(experts_);
        for (bool is_done = false; !is_done;) {
            plans.emplace_back();
            for (size_t l = 0; l < num_layers_; ++l) plans.back().insert(plans.back().end(), plan.begin(), plan.end());
            is_done = true;
            for (size_t e = experts_; is_done && e-- > 0;) {  // the next one, the last expert fastest
                is_done = ++plan[e] == choices_;
                if (is_done) plan[e] = 0;
            }
        }
        const Columns all = columns(most, plans);
        const Limited& layers = all.layers;
        std::vector<size_t> which(num_layers_), best;
        std::tuple<double, double, double> least;
        const auto add = [&](auto&& self, size_t layer, double ps, const Floats& before) -> void {
            if (layer == num_layers_) {
                double bytes = 0, loss = 0;
                for (size_t r = 0; r < before.size(); ++r)
                    if (before[r] > layers.most[r] * (1 + kSlack))
                        (r ? bytes : loss) += (before[r] - layers.most[r]) / std::max(layers.most[r], kTiny);
                const std::tuple demerits{bytes, loss, ps};
                if (best.empty() || demerits < least) best = which, least = demerits;
                return;
            }
            Floats used(before.size());
            for (size_t k = 0; k < plans.size(); ++k) {
                for (size_t r = 0; r < used.size(); ++r) used[r] = before[r] + layers.takes[r].of(k, layer);
                which[layer] = k;
                self(self, layer + 1, ps + layers.objective.of(k, layer), used);
            }
        };
        add(add, 0, 0.0, Floats(layers.most.size()));
        give(assembled(all, best), out);
    }
    // A plan that is no worse than the known ones.
    void searched(double most, std::vector<In<int64_t, 1>> known, Out<int64_t, 1> out) const {
        const bool is_one_side = openings_.size() == 1;
        auto [first, prices] = added_up(most);
        std::vector<Plan> plans;
        for (size_t c = 0; c < choices_; ++c) plans.emplace_back(cells(), static_cast<uint16_t>(c));
        plans.push_back(first);
        for (const auto& each : known) plans.push_back(plan_of(each.data(), each.size()));
        if (!is_one_side && choices_ * cells() <= kStarted && num_layers_ <= kFewLayers)
            for (size_t side = 0; side < openings_.size(); ++side)
                for (const double weight : kWeights) {
                    const auto [start, at] = added_up(most, side, weight);
                    plans.push_back(polished(most, at, start));
                }
        Columns found = columns(most, plans);
        Plan plan = best(found);
        for (int round = 0; round < (is_one_side ? 1 : kRounds); ++round) {
            if (!is_one_side) add(found, descended(most, prices, plan));
            Columns with_last = found;
            add(with_last, columns(most, {plan}));
            std::tie(plan, prices) = mixture(with_last, round == kRounds - 1);
        }
        plans.push_back(polished(most, prices, plan));
        plan = best(columns(most, plans));
        uint64_t random = 1;
        const auto draw = [&random](size_t below) {  // Knuth's MMIX
            random = random * 6364136223846793005u + 1442695040888963407u;
            return static_cast<size_t>(random >> 33) % below;
        };
        const Limited turns = limited(most, choices_, cells(), {turns_, cells()}, {loss_, cells()}, takes_);
        for (size_t kick = choices_ * cells() > kKicked ? kKicks : 0; kick < kKicks; ++kick) {
            Plan other = plan;
            for (size_t left = 2 + draw(4); left > 0; --left)
                other[draw(cells())] = static_cast<uint16_t>(draw(choices_));
            plan = best(columns(most, {plan, polished(most, prices, within(turns, prices, other))}));
        }
        give(plan, out);
    }

  private:
    static Floats of(In<double, 3> values) { return Floats(values.data(), values.data() + values.size()); }
    size_t cells() const { return num_layers_ * experts_; }
    Plan plan_of(const int64_t* chosen, size_t size) const {
        want(size == cells(), "a plan must be [L * E]");
        for (size_t i = 0; i < size; ++i)
            want(chosen[i] >= 0 && chosen[i] < static_cast<int64_t>(choices_), "a plan has choices 0..C-1");
        return Plan(chosen, chosen + size);
    }
    void give(const Plan& plan, Out<int64_t, 1> out) const {
        want(out.size() == plan.size(), "a plan must be [L * E]");
        std::copy(plan.begin(), plan.end(), out.data());
    }

    Limited limited(double most, size_t choices, size_t cells, Amounts time, Amounts loss,
                    std::vector<Amounts> takes) const {
        Limited whole{choices, cells, std::move(time), {}, {most}};
        whole.takes.push_back(std::move(loss));
        for (Amounts& each : takes) whole.takes.push_back(std::move(each));
        whole.most.insert(whole.most.end(), budgets_.begin(), budgets_.end());
        return whole;
    }

    // What one expert adds to its side.
    Side one(size_t choice, size_t cell) const {
        const double ps = ps_[choice * cells() + cell], lean = ps * idle_[cell];
        return {ps, lean * ps / busy_[cell], lean, {}};
    }
    // The sums of each side of a layer.
    std::array<Side, 3> sides(const Plan& plan, size_t layer) const {
        std::array<Side, 3> sides;
        std::array<Floats, 3> each;
        for (size_t s = 0; s < openings_.size(); ++s) {
            for (Floats& values : each) values.assign(experts_, 0.0);
            sides[s].unused.fill(1);
            for (size_t e = 0; e < experts_; ++e) {
                const size_t cell = layer * experts_ + e;
                if (side_of_[plan[cell]] != s) continue;
                const Side expert = one(plan[cell], cell);
                each[0][e] = expert.ps, each[1][e] = expert.spread, each[2][e] = expert.lean;
                for (size_t k = 0; k <= level_[plan[cell]]; ++k) sides[s].unused[k] *= idle_[cell];
            }
            sides[s].ps = sum(each[0]), sides[s].spread = sum(each[1]), sides[s].lean = sum(each[2]);
        }
        return sides;
    }
    double time_of(std::array<Side, 3> sides, size_t layer) const {
        for (size_t s = 0; s < openings_.size(); ++s) sides[s] = sides[s].opened(openings_[s]);
        return slowest(sides, openings_.size(), picks_[layer]);
    }
    double time(const Plan& plan, size_t layer) const { return time_of(sides(plan, layer), layer); }

    IN_VECTORS void changes(const Plan& plan, size_t layer, double* more) const {  // [C, E]
        const std::array<Side, 3> whole = sides(plan, layer);
        const double now = time_of(whole, layer);
        const size_t count = openings_.size(), n = cells();
        for (size_t first = 0; first < experts_; first += kLanes) {
            const size_t lanes = std::min(kLanes, experts_ - first);
            std::array<size_t, kLanes> cell;  // the last one again where there are no more
            for (size_t i = 0; i < kLanes; ++i) cell[i] = layer * experts_ + first + std::min(i, lanes - 1);
            Lanes idle, busy;
            for (size_t i = 0; i < kLanes; ++i) idle[i] = idle_[cell[i]], busy[i] = busy_[cell[i]];
            std::array<Sums<Lanes>, 3> gone{}, without, opened;
            for (Sums<Lanes>& each : gone) each.unused.fill(Lanes{} + 1);
            for (size_t i = 0; i < kLanes; ++i) {
                const size_t choice = plan[cell[i]];
                const Side expert = one(choice, cell[i]);
                Sums<Lanes>& own = gone[side_of_[choice]];
                own.ps[i] = expert.ps, own.spread[i] = expert.spread, own.lean[i] = expert.lean;
                for (size_t k = 0; k <= level_[choice]; ++k) own.unused[k][i] = idle[i];
            }
            for (size_t s = 0; s < count; ++s) {
                without[s].ps = whole[s].ps - gone[s].ps;
                without[s].spread = larger(whole[s].spread - gone[s].spread, Lanes{});
                without[s].lean = whole[s].lean - gone[s].lean;
                for (size_t k = 0; k < openings_[s].size(); ++k) without[s].unused[k] = whole[s].unused[k] / gone[s].unused[k];
                opened[s] = without[s].opened(openings_[s]);
            }
            for (size_t c = 0; c < choices_; ++c) {
                const size_t s = side_of_[c];
                const Sums<Lanes> kept = opened[s];
                Lanes ps;
                for (size_t i = 0; i < kLanes; ++i) ps[i] = ps_[c * n + cell[i]];
                const Lanes lean = ps * idle;
                Sums<Lanes> with = without[s];
                with.ps += ps, with.spread += lean * ps / busy, with.lean += lean;
                for (size_t k = 0; k <= level_[c]; ++k) with.unused[k] *= idle;
                opened[s] = with.opened(openings_[s]);
                const Lanes change = slowest(opened, count, picks_[layer]) - now;
                for (size_t i = 0; i < lanes; ++i) more[c * experts_ + first + i] = change[i];
                opened[s] = kept;
            }
        }
    }

    // What layers take under plans; times [K][L] of layers, if they are known.
    Columns columns(double most, const std::vector<Plan>& plans,
                    const std::vector<Floats>* known = nullptr) const {
        const size_t k = plans.size(), l = num_layers_;
        const auto whole = [&](const Amounts& amounts) {
            Amounts sums{Floats(k * l), l};
            Floats each(experts_);
            for (size_t p = 0; p < k; ++p)
                for (size_t at = 0; at < l; ++at) {
                    for (size_t e = 0; e < experts_; ++e)
                        each[e] = amounts.of(plans[p][at * experts_ + e], at * experts_ + e);
                    sums.values[p * l + at] = sum(each);
                }
            return sums;
        };
        Amounts times = whole({moving_, cells()});
        for (size_t p = 0; p < k; ++p)
            for (size_t at = 0; at < l; ++at)
                times.values[p * l + at] = (known ? (*known)[p][at] : time(plans[p], at)) + times.values[p * l + at];
        std::vector<Amounts> takes;
        for (const Amounts& each : takes_) takes.push_back(whole(each));
        return {plans, limited(most, k, l, std::move(times), whole({loss_, cells()}), std::move(takes))};
    }
    static void add(Columns& columns, const Columns& more) {
        const auto append = [](Amounts& to, const Amounts& from) {
            to.values.insert(to.values.end(), from.values.begin(), from.values.end());
        };
        columns.plans.insert(columns.plans.end(), more.plans.begin(), more.plans.end());
        append(columns.layers.objective, more.layers.objective);
        for (size_t r = 0; r < columns.layers.takes.size(); ++r) append(columns.layers.takes[r], more.layers.takes[r]);
        columns.layers.choices += more.layers.choices;
    }
    Plan best(const Columns& columns) const {
        size_t best = 0;
        for (size_t k = 1; k < columns.plans.size(); ++k) {
            const Plan layers(num_layers_, static_cast<uint16_t>(k)), so_far(num_layers_, static_cast<uint16_t>(best));
            if (columns.layers.demerits(layers) < columns.layers.demerits(so_far)) best = k;
        }
        return columns.plans[best];
    }
    Plan assembled(const Columns& columns, const std::vector<size_t>& which) const {  // each layer of one plan
        Plan plan(cells());
        for (size_t l = 0; l < num_layers_; ++l)
            std::copy_n(columns.plans[which[l]].begin() + l * experts_, experts_, plan.begin() + l * experts_);
        return plan;
    }
    // The plan whose layers are each one plan's, and no worse than the last; and prices of the limits.
    std::pair<Plan, Floats> mixture(const Columns& columns, bool is_last) const {
        const Limited& layers = columns.layers;
        PriceSearch search(layers, nullptr);
        search.run(kSteps);
        Plan which(num_layers_, static_cast<uint16_t>(columns.plans.size() - 1));
        const Plan other = within(layers, search.prices, mixed(layers, search.plans));
        if (layers.demerits(other) < layers.demerits(which)) which = other;
        for (int fill = 0; fill < kFills; ++fill) which = filled(layers, search.prices, which);
        const double least = 1e-9 * std::abs(layers.objective.total(which));
        for (int left = is_last ? kExchanges : 0; left > 0; --left)
            if (!exchange(layers, nearest(layers, search.prices, which, 0, num_layers_, kExchanged), which, least,
                          [](const Plan&) { return true; }))
                break;
        return {assembled(columns, std::vector<size_t>(which.begin(), which.end())), search.prices};
    }

    // (A plan, prices of the limits), for sides that take turns, of which one counts so much.
    std::pair<Plan, Floats> added_up(double most, size_t side = 0, double weight = 1) const {
        const size_t n = cells();
        Limited first = limited(most, choices_, n, {turns_, n}, {loss_, n}, takes_);
        for (size_t c = 0; c < choices_; ++c)
            for (size_t i = 0; side_of_[c] == side && i < n; ++i) first.objective.values[c * n + i] *= weight;
        auto found = at_prices(first);
        const Floats over = first.over(found.first);
        if (std::any_of(over.begin(), over.end(), [](double each) { return each > 0; })) found = at_prices(first.freed());
        return found;
    }
    // Prices are found on a sample of the layers, then on all.
    std::pair<Plan, Floats> at_prices(const Limited& limited) const {
        const double about = std::max(std::nearbyint(static_cast<double>(cells()) / kSample), 1.0);
        const size_t stride = std::min(static_cast<size_t>(about), std::max<size_t>(num_layers_ / 4, 1));
        const Limited some = limited.layers(experts_, stride / 2, stride);
        PriceSearch sample(some, nullptr);
        sample.run(kSteps);
        if (stride == 1) return {within(limited, sample.prices, mixed(limited, sample.plans)), sample.prices};
        PriceSearch search(limited, &sample.prices);
        search.run(kFirstSteps);
        return {within(limited, search.prices, mixed(limited, search.plans)), search.prices};
    }

    // Plans of ever less cost at these prices, from one on; each layer by itself, at first many experts at a time.
    Columns descended(double most, const Floats& prices, Plan plan) const {
        const size_t n = cells(), l = num_layers_, e = experts_;
        const double loss_price = prices[0];
        Amounts apart{Floats(choices_ * n), n};  // all else that an expert costs
        for (size_t c = 0; c < choices_; ++c)
            for (size_t i = 0; i < n; ++i) {
                double cost = loss_price * loss_[c * n + i] + moving_[c * n + i];
                for (size_t r = 0; r < takes_.size(); ++r) cost += prices[r + 1] * takes_[r].of(c, i);
                apart.values[c * n + i] = cost;
            }
        std::vector<Plan> found;
        std::vector<Floats> times;
        Floats now_ps(l), now(l), least(n), changed(choices_ * e), each(e);
        const auto cost_of = [&](const Plan& some, size_t layer, double ps) {
            for (size_t i = 0; i < e; ++i) each[i] = apart.of(some[layer * e + i], layer * e + i);
            return ps + sum(each);
        };
        for (size_t at = 0; at < l; ++at) now_ps[at] = time(plan, at), now[at] = cost_of(plan, at, now_ps[at]);
        std::vector<size_t> many(l, std::max<size_t>(e / kFirstShare, 1)), order(e);
        std::vector<bool> is_stale(l, true);  // no layer is looked at again before it has changed
        Plan to(n);
        for (int step = 0; step < kDescents; ++step) {
            bool is_better = false, is_done = true;
            Plan after = plan;
            for (size_t at = 0; at < l; ++at) {
                if (is_stale[at]) {
                    changes(plan, at, changed.data());
                    for (size_t i = 0; i < e; ++i) {
                        const size_t cell = at * e + i;
                        const double here = apart.of(plan[cell], cell);
                        for (size_t c = 0; c < choices_; ++c) {
                            const double change = changed[c * e + i] + (apart.of(c, cell) - here);
                            if (!c || precedes(change, least[cell])) least[cell] = change, to[cell] = static_cast<uint16_t>(c);
                        }
                    }
                }
                const double* gain = least.data() + at * e;
                std::iota(order.begin(), order.end(), size_t{0});
                const auto earlier = [gain](size_t a, size_t b) { return gain[a] < gain[b] || (gain[a] == gain[b] && a < b); };
                if (many[at] < e) std::nth_element(order.begin(), order.begin() + many[at], order.end(), earlier);
                for (size_t i = 0; i < many[at]; ++i)
                    if (gain[order[i]] < 0) after[at * e + order[i]] = to[at * e + order[i]];
                const auto begin = after.begin() + at * e;
                double ps = now_ps[at];
                if (!std::equal(begin, begin + e, plan.begin() + at * e)) ps = time(after, at);
                const double then = cost_of(after, at, ps);
                is_stale[at] = then < now[at] - 1e-12 * std::abs(now[at]);
                if (is_stale[at]) {
                    now[at] = then, now_ps[at] = ps, is_better = true;
                } else {
                    std::copy_n(plan.begin() + at * e, e, begin);
                    many[at] /= 2;
                }
                is_done = is_done && !many[at];
            }
            if (is_better) plan = after, found.push_back(plan), times.push_back(now_ps);
            if (is_done) break;
        }
        return columns(most, found, &times);
    }

    // One or two experts after the other changed so that the time falls within every limit, until none does.
    Plan polished(double most, const Floats& prices, Plan plan) const {
        const size_t n = cells(), e = experts_;
        Limited whole = limited(most, choices_, n, {Floats(choices_ * n), n}, {loss_, n}, takes_);
        Floats& more = whole.objective.values;  // time, than with the plan's own choice
        Floats changed(choices_ * e), ps(num_layers_);
        const auto moved = [&](const Plan& some, size_t at) {
            double moving = 0;
            for (size_t i = at * e; i < (at + 1) * e; ++i) moving += moving_[some[i] * n + i];
            return moving;
        };
        const auto look = [&](size_t at) {
            changes(plan, at, changed.data());
            ps[at] = time(plan, at) + moved(plan, at);
            for (size_t c = 0; c < choices_; ++c)
                for (size_t i = at * e; i < (at + 1) * e; ++i)
                    more[c * n + i] = changed[c * e + i - at * e] + moving_[c * n + i] - moving_[plan[i] * n + i];
        };
        for (size_t at = 0; at < num_layers_; ++at) look(at);
        const double least = 1e-9 * sum(ps);
        const auto is_better = [&](const Plan& after) {
            double now = 0, next = 0;
            for (size_t at = 0; at < num_layers_; ++at) {
                if (std::equal(plan.begin() + at * e, plan.begin() + (at + 1) * e, after.begin() + at * e)) continue;
                now += ps[at], next += time(after, at) + moved(after, at);
            }
            return next < now - least;
        };
        const size_t others = kLeans.size() - 1, leans = 1 + prices.size() * others;
        struct Near {
            std::vector<Costs> of_layer;
            Floats known;  // up to which cost a layer's changes are
            double enough = kInf;
        };
        constexpr double kNone = std::numeric_limits<double>::lowest();
        std::vector<Near> near(leans, {std::vector<Costs>(num_layers_), Floats(num_layers_, -kInf)});
        const auto nearest_of = [&](size_t lean) {
            Floats leant = prices;
            if (lean) leant[(lean - 1) / others] *= kLeans[1 + (lean - 1) % others];
            auto& [of_layer, known, enough] = near[lean];
            const auto look_up_to = [&](double cost, double bound) {
                bool is_new = false;
                for (size_t at = 0; at < num_layers_; ++at) {
                    if (!(known[at] < cost)) continue;
                    of_layer[at] = nearest(whole, leant, plan, at * e, (at + 1) * e, kPolished, bound);
                    known[at] = bound, is_new = true;
                    if (of_layer[at].size() == kPolished) bound = std::min(bound, of_layer[at].back().first);
                }
                return is_new;
            };
            look_up_to(kNone, enough);
            Costs all = merged(of_layer, kPolished);
            if (look_up_to(all.size() < kPolished ? kInf : all.back().first, kInf)) all = merged(of_layer, kPolished);
            enough = all.size() < kPolished ? kInf : all.back().first + std::abs(all.back().first);
            return all;
        };
        auto left = static_cast<int64_t>(kPolishing / static_cast<double>(choices_ * n));
        for (size_t lean = 0, failed = 0; failed < leans && left > 0; lean = (lean + 1) % leans, ++failed)
            for (Plan before = plan; left-- > 0 && exchange(whole, nearest_of(lean), plan, least, is_better); before = plan) {
                failed = 0;
                for (size_t at = 0; at < num_layers_; ++at) {
                    if (std::equal(plan.begin() + at * e, plan.begin() + (at + 1) * e, before.begin() + at * e)) continue;
                    look(at);
                    for (Near& of_lean : near) of_lean.known[at] = -kInf;
                }
            }
        return plan;
    }

    size_t choices_, num_layers_, experts_;
    std::vector<size_t> side_of_;  // [C]
    std::vector<size_t> level_;    // [C], of its opening among those of its side
    std::vector<Floats> openings_;  // of each side, rising: picoseconds of its message or launch
    Floats ps_, loss_, moving_, turns_;  // [C, L, E]
    Floats idle_, busy_;                 // [L, E], the chance that a step does not use an expert, or does
    Floats picks_;                       // [L]
    std::vector<Amounts> takes_;
    Floats budgets_;
};

}  // namespace

NB_MODULE(_joint, m) {
    nb::class_<Problem>(m, "Problem")
        .def(nb::init<In<int64_t, 1>, std::vector<double>, In<double, 3>, In<double, 3>, In<double, 3>, In<double, 3>,
                      In<double, 2>, std::vector<In<double, 1>>, std::vector<double>>(),
             nb::arg("side_of"), nb::arg("openings"), nb::arg("ps"), nb::arg("loss"), nb::arg("moving"),
             nb::arg("turns"), nb::arg("used"), nb::arg("takes"), nb::arg("budgets"))
        .def("times", &Problem::times, nb::arg("plans"), nb::arg("out"))
        .def("changes", nb::overload_cast<In<int64_t, 1>, Out<double, 3>>(&Problem::changes, nb::const_),
             nb::arg("chosen"), nb::arg("out"))
        .def("tried", &Problem::tried, nb::arg("most"), nb::arg("out"))
        .def("searched", &Problem::searched, nb::arg("most"), nb::arg("known"), nb::arg("out"));
}
