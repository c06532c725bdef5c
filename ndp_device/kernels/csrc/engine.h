// One layer's pairs in, gate-weighted partial sum out: gate and up projection, SwiGLU, requantization and down
// projection of all experts of a call, spread over the pool. Knows no Python and no instruction set.
#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernel_table.h"
#include "packing.h"
#include "thread_pool.h"

namespace ndp {

struct Component {
    std::shared_ptr<Buffer> buffer;
    int width;
};

struct PackedMatrix {
    Geometry geometry;
    std::vector<Component> components;
    std::shared_ptr<Buffer> meta;
    std::vector<int32_t> perm;  // empty: identity
    int dropped = 0;            // lowest bits of the components that are not this matrix's
    int fp4 = 0;                // see QuantizedView
    bool is_signed = false;
    FullView full{};            // of float8: what its components and scales are to kernels

    size_t nbytes() const;
    void check() const;  // throws std::invalid_argument for components that no kernel streams
    QuantizedView view() const;
};

// An expert as this engine streams it. Full-precision weights stay where they are; `owner` keeps them alive.
struct PreparedExpert {
    int hidden = 0;
    int intermediate = 0;
    bool full = false;
    int limbs = 2;  // of its inputs and hidden units: 2 hold 15 bits of each, 1 holds 8
    PackedMatrix w13, w2;
    FullView full_w13{}, full_w2{};
    std::shared_ptr<void> owner;
    Activation activation;
    std::vector<float> b13;  // empty: no biases; in units of 16 gates and 16 ups, like the rows of w13
    std::vector<float> b2;   // [hidden]

    double unit_bytes(int cols) const;  // what 32 rows of this many columns stream

    // The same weights with another activation, and biases [intermediate], [intermediate], [hidden] or none.
    PreparedExpert with_activation(const Activation& own, const float* b1, const float* b3, const float* b2_rows) const;

    // The same codes, scales and offsets out of components that hold one more bit, which does not count.
    PreparedExpert masked(std::vector<Component> w13_components, std::vector<Component> w2_components) const;
};

struct Pairs {
    int count;
    const int32_t* rows;
    const int32_t* experts;
    const float* gates;
};

// Memory of one call, kept for the next one.
class Arena {
   public:
    template <class T>
    T* take(size_t count) {
        return static_cast<T*>(take_bytes(count * sizeof(T)));
    }
    void reset();

   private:
    void* take_bytes(size_t bytes);
    std::vector<Buffer> blocks_;
    size_t used_ = 0, total_ = 0;
};

class Engine {
   public:
    Engine(const std::string& isa, int threads);  // throws std::invalid_argument for a path not run here

    const KernelTable& kernels() const { return kernels_; }

    // The pool, for packing; calls that use it take turns.
    template <class Work>
    auto with_pool(const Work& work) {
        const std::lock_guard<std::mutex> lock(one_call_);
        return work(pool());
    }

    // A matrix of int8 or float8 out of weights as they lie in a checkpoint; `second`: of a gate and an up.
    PackedMatrix pack_bytes(const FullView& source);

    // An expert of such matrices; int8 with so many limbs.
    PreparedExpert pack_bytes(const PreparedExpert& source, int limbs);

    // out [tokens, hidden] is overwritten. Calls from several threads take turns.
    void execute(const float* x, int tokens, int hidden, const std::vector<const PreparedExpert*>& experts,
                 const Pairs& pairs, float* out);

    // y [tokens, rows] = the matrix, which has no halves, times each row of x [tokens, cols].
    void multiply_matrix(const float* x, int tokens, const PackedMatrix& matrix, int limbs, float* y);

   private:
    struct Job;
    struct Quantized;
    void check(int tokens, int hidden, const std::vector<const PreparedExpert*>& experts, const Pairs& pairs) const;
    Quantized take_quantized(const QuantizedView& w, int tokens, int limbs);
    QuantizeJob quantize_job(const float* row, const PackedMatrix& matrix, const Quantized& to, int token) const;
    int units_per_task(int units, double unit_bytes, int tokens) const;
    void multiply(const Job& job, bool down, int first, int last, float* y, int stride, int thread) const;
    auto split_of(const FullView& weights) const -> decltype(KernelTable::split_row);  // null: rows stay as they are
    int split_rows(const FullView& weights, int tokens) const;                         // how many there must be room for
    bool put_row(const FullView& weights, const float* row, float* rows, ptrdiff_t stride, int at) const;  // see split_row
    void quantize_inputs(const float* x, int hidden, const Pairs& pairs, std::vector<Job>& jobs);
    void gate_and_up(std::vector<Job>& jobs);
    void quantize_hidden(std::vector<Job>& jobs);
    void down(const std::vector<Job>& jobs, const Pairs& pairs, int tokens, int hidden, float* out);
    ThreadPool& pool();
    template <class Work>
    void run(int tasks, const Work& work);

    const KernelTable& kernels_;
    int threads_;
    std::mutex one_call_;
    std::unique_ptr<ThreadPool> pool_;
    pid_t pool_process_ = 0;
    bool inline_ = false;  // this call is too small to be worth waking anyone
    Arena arena_;
    std::vector<uint8_t*> thread_scratch_;
};

}  // namespace ndp
