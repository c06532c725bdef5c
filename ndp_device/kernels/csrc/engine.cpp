#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "cpu.h"

namespace ndp {
namespace {

// A call below this many multiply-accumulates (weighted: the first token of an expert also reads its weights) is done
// by the caller alone: about 20 us, and waking a sleeping thread takes 5 to 50.
constexpr double kInlineWork = 5e5;

constexpr double kChunkBytes = 256 * 1024;  // what one task streams, at one token
constexpr int kTaskUnits = 2;               // the widest register block of any path
// Floats between rows in full precision. Rows of a multiple of 4 KiB would all lie in the same few lines of the first cache.
constexpr int kBetweenRows = 128;

const KernelTable& require_kernels(const std::string& isa) {
    const KernelTable* found = find_kernels(isa);
    if (found) return *found;
    std::string known;
    for (const std::string& name : supported_isas()) known += (known.empty() ? "" : ", ") + name;
    throw std::invalid_argument("this machine runs the kernels " + known + ", not '" + isa + "'");
}

}  // namespace

QuantizedView PackedMatrix::view() const {
    QuantizedView v{};
    v.units = geometry.units();
    v.groups = geometry.groups();
    v.padded_group = geometry.padded_group();
    v.unit_chunks = geometry.unit_chunks();
    v.num_components = static_cast<int>(components.size());
    v.dropped = dropped;
    v.fp4 = fp4;
    v.is_signed = is_signed;
    for (int c = 0; c < v.num_components; ++c) {
        v.width[c] = components[c].width;
        v.component[c] = components[c].buffer->data();
    }
    v.meta = meta->data();
    return v;
}

size_t PackedMatrix::nbytes() const {
    size_t bytes = meta ? meta->bytes() : 0;
    for (const Component& component : components) bytes += component.buffer->bytes();
    return bytes;
}

void PackedMatrix::check() const {
    std::vector<int> widths;
    for (const Component& component : components) widths.push_back(component.width);
    const bool may_drop = widths == std::vector<int>{2} || widths == std::vector<int>{2, 2};
    const bool is_known = may_drop || widths == std::vector<int>{1} || widths == std::vector<int>{2, 1} ||
                          widths == std::vector<int>{4} || widths == std::vector<int>{8};
    if ((fp4 && widths != std::vector<int>{4}) || !is_known || dropped < 0 || dropped > (may_drop ? 1 : 0))
        throw std::invalid_argument("no kernel streams these components without their " + std::to_string(dropped) +
                                    " lowest bits");
    const size_t chunks = static_cast<size_t>(geometry.units()) * geometry.unit_chunks();
    for (const Component& component : components)
        if (component.buffer->bytes() != chunks * chunk_bytes(component.width))
            throw std::invalid_argument("a component has " + std::to_string(component.buffer->bytes()) +
                                        " bytes, which is another matrix's size");
}

PreparedExpert PreparedExpert::masked(std::vector<Component> w13_components,
                                      std::vector<Component> w2_components) const {
    PreparedExpert expert = *this;
    expert.w13.components = std::move(w13_components);
    expert.w2.components = std::move(w2_components);
    expert.w13.dropped = expert.w2.dropped = 1;
    expert.w13.check();
    expert.w2.check();
    return expert;
}

PreparedExpert PreparedExpert::with_activation(const Activation& own, const float* b1, const float* b3,
                                               const float* b2_rows) const {
    PreparedExpert expert = *this;
    expert.activation = own;
    if (!b1) return expert;
    expert.b13.assign((intermediate + kBlockRows - 1) / kBlockRows * kUnitRows, 0.0f);
    for (int i = 0; i < intermediate; ++i) {
        float* gate = expert.b13.data() + i / kBlockRows * kUnitRows + i % kBlockRows;
        gate[0] = b1[i];
        gate[kBlockRows] = b3[i];
    }
    expert.b2.assign(b2_rows, b2_rows + hidden);
    return expert;
}

double PreparedExpert::unit_bytes(int cols) const {
    if (full) return kUnitRows * 1.0 * bytes_of(full_w2.dtype) * cols;
    int bits = 0;
    for (const Component& component : w2.components) bits += component.width;
    return kUnitRows * bits / 8.0 * cols;
}

void* Arena::take_bytes(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    total_ += bytes;
    if (blocks_.empty() || used_ + bytes > blocks_.back().bytes()) {
        blocks_.emplace_back(std::max(bytes, size_t{1} << 20));
        used_ = 0;
    }
    used_ += bytes;
    return blocks_.back().data() + used_ - bytes;
}

void Arena::reset() {
    if (blocks_.size() > 1) {  // what the last call took in pieces, the next one finds in one
        blocks_.clear();
        blocks_.emplace_back(total_);
    }
    used_ = total_ = 0;
}

struct Engine::Quantized {
    Activations view;
    int8_t* codes;
    float* scale;
    float* sum;
    int32_t* zeros;
    int16_t* words;
    ptrdiff_t group_stride;  // bytes of codes
    int row_bytes;           // codes of one token in one group
};

// The pairs of one expert.
struct Engine::Job {
    const PreparedExpert* expert;
    const int32_t* pairs;  // indices into Pairs
    int tokens;
    QuantizedView w13, w2;
    Quantized x, h;
    float* x_rows;  // full precision: [tokens], x_stride apart, split where the path does that
    float* hidden;  // [tokens], h_stride apart
    float* h_rows;  // full precision: the same, or split
    bool* rests;    // [tokens], whether a split row left anything; its hidden units are then kept as exactly
    int padded;     // intermediate units
    ptrdiff_t x_stride, h_stride;
};

Engine::Engine(const std::string& isa, int threads) : kernels_(require_kernels(isa)), threads_(threads) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1, got " + std::to_string(threads));
}

ThreadPool& Engine::pool() {
    if (pool_process_ != getpid()) {  // first use, or a forked child, in which the parent's threads do not exist
        if (pool_process_ != 0) pool_.release();
        pool_ = std::make_unique<ThreadPool>(threads_);
        pool_process_ = getpid();
    }
    return *pool_;
}

template <class Work>
void Engine::run(int tasks, const Work& work) {
    if (inline_) {
        for (int task = 0; task < tasks; ++task) work(task, 0);
    } else {
        pool().run(tasks, work);
    }
}

PackedMatrix Engine::pack_bytes(const FullView& source) {
    PackedMatrix matrix;
    const int halves = source.second ? 2 : 1;
    matrix.geometry = {source.num_rows * halves, source.cols, halves, source.cols};
    matrix.is_signed = true;
    const Packed packed = with_pool([&](ThreadPool& pool) { return ndp::pack_bytes(pool, matrix.geometry, source); });
    matrix.components = {{packed.codes, 8}};
    matrix.meta = packed.meta;
    if (source.dtype == DType::int8) return matrix;
    matrix.full = source;
    matrix.full.first = packed.codes->data();
    matrix.full.scales = {reinterpret_cast<const float*>(packed.meta->data()), nullptr, 1, matrix.geometry.group,
                          matrix.geometry.groups()};
    return matrix;
}

PreparedExpert Engine::pack_bytes(const PreparedExpert& source, int limbs) {
    PreparedExpert expert = source;
    expert.w13 = pack_bytes(source.full_w13);
    expert.w2 = pack_bytes(source.full_w2);
    expert.full = source.full_w13.dtype == DType::float8;
    expert.limbs = limbs;
    expert.owner.reset();
    expert.full_w13 = expert.w13.full;
    expert.full_w2 = expert.w2.full;
    return expert;
}

void Engine::check(int tokens, int hidden, const std::vector<const PreparedExpert*>& experts,
                   const Pairs& pairs) const {
    for (const PreparedExpert* expert : experts) {
        if (expert->hidden != hidden) {
            throw std::invalid_argument("x has " + std::to_string(hidden) + " columns but an expert takes " +
                                        std::to_string(expert->hidden));
        }
    }
    for (int p = 0; p < pairs.count; ++p) {
        if (pairs.rows[p] < 0 || pairs.rows[p] >= tokens)
            throw std::invalid_argument("pair " + std::to_string(p) + " names row " + std::to_string(pairs.rows[p]) +
                                        " of " + std::to_string(tokens));
        if (pairs.experts[p] < 0 || pairs.experts[p] >= static_cast<int>(experts.size()))
            throw std::invalid_argument("pair " + std::to_string(p) + " names expert " +
                                        std::to_string(pairs.experts[p]) + " of " + std::to_string(experts.size()));
    }
}

Engine::Quantized Engine::take_quantized(const QuantizedView& w, int tokens, int limbs) {
    Quantized q{};
    q.row_bytes = limbs * w.padded_group;
    q.group_stride = static_cast<ptrdiff_t>(tokens) * q.row_bytes;
    const size_t bytes = w.groups * q.group_stride, slack = static_cast<size_t>(kRowSlack) * w.padded_group;
    q.codes = arena_.take<int8_t>(bytes + slack);
    std::memset(q.codes + bytes, 0, slack);
    q.scale = arena_.take<float>(static_cast<size_t>(w.groups) * tokens);
    q.sum = arena_.take<float>(static_cast<size_t>(w.groups) * tokens);
    if (w.fp4 && tokens <= kMostInRegisters) q.zeros = arena_.take<int32_t>(static_cast<size_t>(w.groups) * tokens * q.row_bytes / w.fp4);
    if (w.fp4) q.words = arena_.take<int16_t>(static_cast<size_t>(w.groups) * tokens * w.padded_group);
    q.view = {tokens, limbs, q.codes, q.scale, q.sum, q.zeros, q.words};
    return q;
}

QuantizeJob Engine::quantize_job(const float* row, const PackedMatrix& matrix, const Quantized& to, int token) const {
    const Geometry& g = matrix.geometry;
    return {row,
            matrix.perm.empty() ? nullptr : matrix.perm.data(),
            g.cols,
            g.group,
            g.padded_group(),
            to.view.limbs,
            to.codes + static_cast<ptrdiff_t>(token) * to.row_bytes,
            to.group_stride,
            to.scale + token,
            to.sum + token,
            to.view.tokens,
            to.zeros ? to.zeros + token * to.row_bytes / matrix.fp4 : nullptr,
            to.words ? to.words + static_cast<ptrdiff_t>(token) * g.padded_group() : nullptr,
            matrix.fp4};
}

auto Engine::split_of(const FullView& weights) const -> decltype(KernelTable::split_row) {
    return weights.dtype == DType::bfloat16 ? kernels_.split_row : weights.dtype == DType::float8 ? kernels_.split_row_float8 : nullptr;
}

int Engine::split_rows(const FullView& weights, int tokens) const {
    const int together = split_of(weights) ? kernels_.split_together : 1;
    return (tokens + together - 1) / together * together;
}

bool Engine::put_row(const FullView& weights, const float* row, float* rows, ptrdiff_t stride, int at) const {
    if (const auto split = split_of(weights)) return split(row, weights.cols, true, rows, stride, at);
    std::memcpy(rows + at * stride, row, sizeof(float) * weights.cols);
    rows[at * stride + weights.cols] = 0.0f;  // float8 meets pairs of columns
    return false;
}

// Every row is quantized once for all experts that read it in one order, grouping and number of limbs, then copied to each.
void Engine::quantize_inputs(const float* x, int hidden, const Pairs& pairs, std::vector<Job>& jobs) {
    struct Destination {
        Job* job;
        int token;
    };
    // (perm, group, FP4, limbs, row)
    std::map<std::tuple<const int32_t*, int, int, int, int>, std::vector<Destination>> wanted;
    for (Job& job : jobs) {
        const PackedMatrix& w = job.expert->w13;
        const int32_t* perm = job.expert->full || w.perm.empty() ? nullptr : w.perm.data();
        const int group = job.expert->full ? 0 : w.geometry.group;
        for (int t = 0; t < job.tokens; ++t) {
            std::vector<Destination>& to = wanted[{perm, group, w.fp4, job.expert->limbs, pairs.rows[job.pairs[t]]}];
            to.push_back({&job, t});
            if (job.x.zeros) std::swap(to.front(), to.back());  // the first has what any needs
        }
    }
    std::vector<std::pair<const float*, const std::vector<Destination>*>> tasks;
    for (const auto& [key, destinations] : wanted)
        tasks.emplace_back(x + static_cast<ptrdiff_t>(std::get<4>(key)) * hidden, &destinations);
    run(static_cast<int>(tasks.size()), [&](int task, int) {
        const auto& [row, destinations] = tasks[task];
        const Job& first = *destinations->front().job;
        const int first_token = destinations->front().token;
        if (first.expert->full) {
            for (const Destination& to : *destinations) {
                Job& job = *to.job;
                job.rests[to.token] = put_row(job.expert->full_w13, row, job.x_rows, job.x_stride, to.token);
            }
            return;
        }
        const QuantizeJob done = quantize_job(row, first.expert->w13, first.x, first_token);
        kernels_.quantize(done);
        for (size_t d = 1; d < destinations->size(); ++d) {
            const Quantized& to = (*destinations)[d].job->x;
            const ptrdiff_t token = (*destinations)[d].token;
            for (int g = 0; g < first.w13.groups; ++g) {
                std::memcpy(to.codes + g * to.group_stride + token * to.row_bytes,
                            done.codes + g * done.group_stride, to.row_bytes);
                to.scale[g * to.view.tokens + token] = done.scale[g * done.token_stride];
                to.sum[g * to.view.tokens + token] = done.sum[g * done.token_stride];
                const ptrdiff_t scales = done.fp4 ? to.row_bytes / done.fp4 : 0;  // of all limbs
                if (to.zeros)
                    std::memcpy(to.zeros + (g * to.view.tokens + token) * scales, done.zeros + g * done.token_stride * scales,
                                scales * sizeof(int32_t));
                if (!to.words) continue;
                std::memcpy(to.words + (g * to.view.tokens + token) * done.padded_group,
                            done.words + g * done.token_stride * done.padded_group, done.padded_group * sizeof(int16_t));
            }
        }
    });
}

// Units per task: what streams kChunkBytes, fewer where threads would go without, a register block's worth at least.
int Engine::units_per_task(int units, double unit_bytes, int tokens) const {
    const int by_bytes = tokens > 1 ? kTaskUnits : static_cast<int>(kChunkBytes / std::max(unit_bytes, 1.0));
    const int by_threads = units / (4 * threads_) / kTaskUnits * kTaskUnits;
    return std::max(kTaskUnits, std::min(by_bytes / kTaskUnits * kTaskUnits, by_threads));
}

void Engine::gate_and_up(std::vector<Job>& jobs) {
    struct Task {
        Job* job;
        int first, last;
    };
    std::vector<Task> tasks;
    size_t rows_floats = 0;
    for (Job& job : jobs) {
        const int units = job.padded / kBlockRows;
        const int step = units_per_task(units, job.expert->unit_bytes(job.expert->hidden), job.tokens);
        rows_floats = std::max(rows_floats, static_cast<size_t>(job.tokens) * step * kUnitRows);
        for (int first = 0; first < units; first += step) tasks.push_back({&job, first, std::min(first + step, units)});
    }
    std::vector<float*> rows(threads_);
    for (float*& r : rows) r = arena_.take<float>(rows_floats);
    run(static_cast<int>(tasks.size()), [&](int task, int thread) {
        const auto [job, first, last] = tasks[task];
        const int width = (last - first) * kUnitRows;
        multiply(*job, /*down=*/false, first, last, rows[thread], width, thread);
        const PreparedExpert& expert = *job->expert;
        for (int t = 0; t < job->tokens; ++t) {
            float* y = rows[thread] + static_cast<ptrdiff_t>(t) * width;
            if (!expert.b13.empty()) kernels_.add_scaled(y, expert.b13.data() + first * kUnitRows, 1.0f, width);
            kernels_.activate(y, last - first, expert.activation,
                              job->hidden + t * job->h_stride + first * kBlockRows);
        }
    });
}

void Engine::quantize_hidden(std::vector<Job>& jobs) {
    std::vector<std::pair<const Job*, int>> tasks;
    for (const Job& job : jobs)
        for (int t = 0; t < job.tokens && (!job.expert->full || job.h_rows != job.hidden); ++t) tasks.emplace_back(&job, t);
    run(static_cast<int>(tasks.size()), [&](int task, int) {
        const auto [job, token] = tasks[task];
        const ptrdiff_t at = token * job->h_stride;
        if (job->expert->full) {
            bool& rest = job->rests[token];
            rest = split_of(job->expert->full_w13)(job->hidden + at, job->expert->intermediate, rest, job->h_rows, job->h_stride, token);
        } else {
            kernels_.quantize(quantize_job(job->hidden + at, job->expert->w2, job->h, token));
        }
    });
}

// A task owns columns of the output and adds the experts in their order, so the sum does not depend on threads.
void Engine::down(const std::vector<Job>& jobs, const Pairs& pairs, int tokens, int hidden, float* out) {
    const int units = (hidden + kUnitRows - 1) / kUnitRows;
    int step = units, most = 1;
    for (const Job& job : jobs) {
        step = std::min(step, units_per_task(units, job.expert->unit_bytes(job.expert->intermediate), job.tokens));
        most = std::max(most, job.tokens);
    }
    std::vector<float*> rows(threads_);
    for (float*& r : rows) r = arena_.take<float>(static_cast<size_t>(most) * step * kUnitRows);
    run((units + step - 1) / step, [&](int task, int thread) {
        const int first = task * step, last = std::min(first + step, units);
        const int width = (last - first) * kUnitRows, count = std::min(width, hidden - first * kUnitRows);
        for (int row = 0; row < tokens; ++row)
            std::memset(out + static_cast<ptrdiff_t>(row) * hidden + first * kUnitRows, 0, sizeof(float) * count);
        for (const Job& job : jobs) {
            multiply(job, /*down=*/true, first, last, rows[thread], width, thread);
            for (int t = 0; t < job.tokens; ++t) {
                const int pair = job.pairs[t];
                float* y = rows[thread] + static_cast<ptrdiff_t>(t) * width;
                if (!job.expert->b2.empty())
                    kernels_.add_scaled(y, job.expert->b2.data() + first * kUnitRows, 1.0f, count);
                kernels_.add_scaled(out + static_cast<ptrdiff_t>(pairs.rows[pair]) * hidden + first * kUnitRows, y,
                                    pairs.gates[pair], count);
            }
        }
    });
}

void Engine::multiply(const Job& job, bool down, int first, int last, float* y, int stride, int thread) const {
    if (!job.expert->full) {
        kernels_.multiply(down ? job.w2 : job.w13, down ? job.h.view : job.x.view, first, last, y, stride,
                          thread_scratch_[thread]);
        return;
    }
    const bool rests = std::any_of(job.rests, job.rests + job.tokens, [](bool rest) { return rest; });
    if (down)
        kernels_.multiply_full(job.expert->full_w2, job.h_rows, job.h_stride, job.tokens, rests, first, last, y, stride);
    else
        kernels_.multiply_full(job.expert->full_w13, job.x_rows, job.x_stride, job.tokens, rests, first, last, y, stride);
}

void Engine::multiply_matrix(const float* x, int tokens, const PackedMatrix& matrix, int limbs, float* y) {
    if (limbs != 1 && limbs != 2) throw std::invalid_argument("limbs must be 1 or 2, got " + std::to_string(limbs));
    const Geometry& g = matrix.geometry;
    if (g.halves != 1) throw std::invalid_argument("a linear layer is one matrix, not a gate and an up");
    const std::lock_guard<std::mutex> lock(one_call_);
    arena_.reset();
    const QuantizedView view = matrix.view();
    double unit_bytes = 0;
    for (const Component& c : matrix.components) unit_bytes += kUnitRows * c.width / 8.0 * g.cols;
    const FullView* full = matrix.full.first ? &matrix.full : nullptr;
    const ptrdiff_t stride = g.cols + kBetweenRows;
    float* x_rows = full ? arena_.take<float>(split_rows(*full, tokens) * stride) : nullptr;
    bool* rests = arena_.take<bool>(tokens);
    const Quantized q = full ? Quantized{} : take_quantized(view, tokens, limbs);
    const int step = units_per_task(g.units(), unit_bytes, tokens);
    inline_ = 1.0 * g.rows * g.cols * (1 + tokens / 4.0) < kInlineWork;
    thread_scratch_.assign(threads_, nullptr);
    for (uint8_t*& scratch : thread_scratch_) scratch = arena_.take<uint8_t>(scratch_bytes(g.padded_group()));
    std::vector<float*> rows(threads_);
    for (float*& r : rows) r = arena_.take<float>(static_cast<size_t>(tokens) * step * kUnitRows);

    run(tokens, [&](int t, int) {
        const float* row = x + static_cast<ptrdiff_t>(t) * g.cols;
        if (full) rests[t] = put_row(*full, row, x_rows, stride, t);
        else kernels_.quantize(quantize_job(row, matrix, q, t));
    });
    const bool rest = full && std::any_of(rests, rests + tokens, [](bool left) { return left; });
    run((g.units() + step - 1) / step, [&](int task, int thread) {
        const int from = task * step, to = std::min(from + step, g.units());
        const int width = (to - from) * kUnitRows, count = std::min(width, g.rows - from * kUnitRows);
        if (full) kernels_.multiply_full(*full, x_rows, stride, tokens, rest, from, to, rows[thread], width);
        else kernels_.multiply(view, q.view, from, to, rows[thread], width, thread_scratch_[thread]);
        for (int t = 0; t < tokens; ++t)
            std::memcpy(y + static_cast<ptrdiff_t>(t) * g.rows + from * kUnitRows,
                        rows[thread] + static_cast<ptrdiff_t>(t) * width, sizeof(float) * count);
    });
}

void Engine::execute(const float* x, int tokens, int hidden, const std::vector<const PreparedExpert*>& experts,
                     const Pairs& pairs, float* out) {
    check(tokens, hidden, experts, pairs);
    const std::lock_guard<std::mutex> lock(one_call_);
    arena_.reset();

    std::vector<int32_t> order(pairs.count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return pairs.experts[a] < pairs.experts[b]; });
    std::vector<Job> jobs;
    double work = 0;
    int widest_group = kChunkCols;
    for (int begin = 0, end = 0; begin < pairs.count; begin = end) {
        const int index = pairs.experts[order[begin]];
        while (end < pairs.count && pairs.experts[order[end]] == index) ++end;
        Job job{};
        job.expert = experts[index];
        job.pairs = order.data() + begin;
        job.tokens = end - begin;
        job.padded = (job.expert->intermediate + kBlockRows - 1) / kBlockRows * kBlockRows;
        job.x_stride = hidden + kBetweenRows;
        job.h_stride = job.padded + kBetweenRows;
        job.hidden = arena_.take<float>(job.tokens * job.h_stride);
        if (job.expert->full) {
            const int rows = split_rows(job.expert->full_w13, job.tokens);
            job.x_rows = arena_.take<float>(rows * job.x_stride);
            job.h_rows = split_of(job.expert->full_w13) ? arena_.take<float>(rows * job.h_stride) : job.hidden;
            job.rests = arena_.take<bool>(job.tokens);
        } else {
            job.w13 = job.expert->w13.view();
            job.w2 = job.expert->w2.view();
            job.x = take_quantized(job.w13, job.tokens, job.expert->limbs);
            job.h = take_quantized(job.w2, job.tokens, job.expert->limbs);
            widest_group = std::max({widest_group, job.w13.padded_group, job.w2.padded_group});
        }
        work += 3.0 * hidden * job.expert->intermediate * (1 + job.tokens / 4.0);
        jobs.push_back(job);
    }
    inline_ = work < kInlineWork;
    thread_scratch_.assign(threads_, nullptr);
    for (uint8_t*& scratch : thread_scratch_) scratch = arena_.take<uint8_t>(scratch_bytes(widest_group));

    quantize_inputs(x, hidden, pairs, jobs);
    gate_and_up(jobs);
    quantize_hidden(jobs);
    down(jobs, pairs, tokens, hidden, out);
}

}  // namespace ndp
