// The Python face of the engine: arrays in, arrays out, errors as ValueError. native.py is its only user.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "cpu.h"
#include "engine.h"

namespace nb = nanobind;
using namespace ndp;

namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Planes = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<Component> pack(Engine& engine, Planes planes, int halves, int group) {
    const Geometry geometry{static_cast<int>(planes.shape(1)), static_cast<int>(planes.shape(2)) * 8, halves, group};
    const int width = static_cast<int>(planes.shape(0));
    const ptrdiff_t stride = static_cast<ptrdiff_t>(planes.shape(1) * planes.shape(2));
    nb::gil_scoped_release release;
    return engine.with_pool([&](ThreadPool& pool) {
        return std::make_shared<Component>(
            Component{pack_component(engine.kernels(), pool, geometry, planes.data(), stride, width), width});
    });
}

using Components = std::vector<std::shared_ptr<Component>>;

std::vector<Component> copied(const Components& components) {
    std::vector<Component> copies;
    for (const auto& component : components) copies.push_back(*component);
    return copies;
}

PackedMatrix assemble(Engine& engine, const Components& components, int rows, int cols, int halves, int group,
                      Matrix<uint16_t> scale, Matrix<uint16_t> offset, int group_size, Vector<int32_t> perm) {
    PackedMatrix matrix;
    matrix.geometry = {rows, cols, halves, group};
    matrix.components = copied(components);
    matrix.check();
    matrix.perm.assign(perm.data(), perm.data() + perm.size());
    nb::gil_scoped_release release;
    matrix.meta = engine.with_pool([&](ThreadPool& pool) {
        return pack_meta(pool, matrix.geometry, scale.data(), offset.data(), group_size);
    });
    return matrix;
}

void require_blocks(size_t rows, size_t cols, const Matrix<float>& scales, int of_rows, int of_cols) {
    if (of_rows < 1 || of_cols < 1 || scales.shape(0) != (rows + of_rows - 1) / of_rows ||
        scales.shape(1) != (cols + of_cols - 1) / of_cols)
        throw std::invalid_argument("wanted one scale for each block of rows and columns");
}

// codes [rows, cols / 2] and scales [rows, groups], of NVFP4 with one more of each row: packing.h.
PackedMatrix fp4_matrix(Engine& engine, Matrix<uint8_t> codes, Matrix<uint8_t> scales, Vector<float> of_rows, int halves) {
    const int rows = static_cast<int>(codes.shape(0)), cols = static_cast<int>(codes.shape(1)) * 2;
    const size_t columns = of_rows.size() ? kNvfp4 : kMxfp4;
    PackedMatrix matrix;
    matrix.geometry = {rows, cols, halves, kChunkCols};
    if (scales.shape(0) != codes.shape(0) || cols % kChunkCols || scales.shape(1) * columns != codes.shape(1) * 2 ||
        (of_rows.size() && of_rows.size() != codes.shape(0)))
        throw std::invalid_argument("wanted codes [N, C / 2] and scales [N, C / 32], or [N, C / 16] and [N]");
    matrix.fp4 = static_cast<int>(columns);
    nb::gil_scoped_release release;
    engine.with_pool([&](ThreadPool& pool) {
        const Packed packed =
            pack_fp4(pool, matrix.geometry, codes.data(), scales.data(), of_rows.size() ? of_rows.data() : nullptr);
        matrix.components = {{packed.codes, 4}};
        matrix.meta = packed.meta;
        return 0;
    });
    matrix.check();
    return matrix;
}

// codes [rows, cols] of int8 or float8, and scales of blocks of `block_rows` x `block_cols`.
PackedMatrix bytes_matrix(Engine& engine, int dtype, Matrix<uint8_t> codes, Matrix<float> scales, int block_rows,
                          int block_cols) {
    const int rows = static_cast<int>(codes.shape(0)), cols = static_cast<int>(codes.shape(1));
    require_blocks(rows, cols, scales, block_rows, block_cols);
    nb::gil_scoped_release release;
    return engine.pack_bytes(FullView{static_cast<DType>(dtype), codes.data(), nullptr, rows, cols,
                                      {scales.data(), nullptr, block_rows, block_cols, static_cast<int>(scales.shape(1))}});
}

std::shared_ptr<PreparedExpert> quantized_expert(const PackedMatrix& w13, const PackedMatrix& w2, int limbs) {
    if (limbs != 1 && limbs != 2) throw std::invalid_argument("limbs must be 1 or 2, got " + std::to_string(limbs));
    auto expert = std::make_shared<PreparedExpert>();
    expert->hidden = w2.geometry.rows;
    expert->intermediate = w2.geometry.cols;
    expert->w13 = w13;
    expert->w2 = w2;
    expert->limbs = limbs;
    return expert;
}

using Weights = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu, nb::ro>;

// Scales of blocks of `rows` x `cols`: of weights of 8 bits, which an engine has to pack; else empty.
std::shared_ptr<PreparedExpert> full_expert(int dtype, Weights w1, Weights w3, Weights w2, Matrix<float> s1, Matrix<float> s3,
                                            Matrix<float> s2, int rows, int cols) {
    const auto scales = [&](const Weights& w, const Matrix<float>& s, const Matrix<float>* other) -> BlockScales {
        if (bytes_of(static_cast<DType>(dtype)) > 1) return {};
        for (const Matrix<float>* one : {&s, other})
            if (one) require_blocks(w.shape(0), w.shape(1), *one, rows, cols);
        return {s.data(), other ? other->data() : nullptr, rows, cols, static_cast<int>(s.shape(1))};
    };
    auto expert = std::make_shared<PreparedExpert>();
    expert->full = true;
    expert->intermediate = static_cast<int>(w1.shape(0));
    expert->hidden = static_cast<int>(w1.shape(1));
    expert->full_w13 = {static_cast<DType>(dtype), w1.data(), w3.data(), expert->intermediate, expert->hidden,
                        scales(w1, s1, &s3)};
    expert->full_w2 = {static_cast<DType>(dtype), w2.data(), nullptr, expert->hidden, expert->intermediate,
                       scales(w2, s2, nullptr)};
    struct Arrays {
        Weights w1, w3, w2;
        Matrix<float> s1, s3, s2;
    };
    expert->owner = std::make_shared<Arrays>(Arrays{w1, w3, w2, s1, s3, s2});
    return expert;
}

std::shared_ptr<PreparedExpert> with_activation(const PreparedExpert& expert, float linear, float cubic,
                                                float up_bias, float limit, Vector<float> b1, Vector<float> b3,
                                                Vector<float> b2) {
    const size_t inner = expert.intermediate, outer = expert.hidden;
    const bool none = b1.size() == 0 && b3.size() == 0 && b2.size() == 0;
    if (!none && (b1.size() != inner || b3.size() != inner || b2.size() != outer))
        throw std::invalid_argument("biases must have the lengths of gate, up and down, or all be empty");
    return std::make_shared<PreparedExpert>(
        expert.with_activation({linear, cubic, up_bias, limit}, none ? nullptr : b1.data(), b3.data(), b2.data()));
}

void execute(Engine& engine, Matrix<float> x, const std::vector<const PreparedExpert*>& experts, Vector<int32_t> rows,
             Vector<int32_t> pair_experts, Vector<float> gates,
             nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
    if (rows.size() != pair_experts.size() || rows.size() != gates.size())
        throw std::invalid_argument("pair_rows, pair_experts and gates must have one length");
    if (out.shape(0) != x.shape(0) || out.shape(1) != x.shape(1))
        throw std::invalid_argument("out must have the shape of x");
    nb::gil_scoped_release release;
    engine.execute(x.data(), static_cast<int>(x.shape(0)), static_cast<int>(x.shape(1)), experts,
                   {static_cast<int>(rows.size()), rows.data(), pair_experts.data(), gates.data()}, out.data());
}

void multiply(Engine& engine, Matrix<float> x, const PackedMatrix& matrix, int limbs,
              nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> y) {
    const Geometry& g = matrix.geometry;
    if (x.shape(1) != static_cast<size_t>(g.cols) || y.shape(1) != static_cast<size_t>(g.rows))
        throw std::invalid_argument("x must have the columns of the matrix, and y its rows");
    if (x.shape(0) != y.shape(0)) throw std::invalid_argument("x and y must have as many rows");
    nb::gil_scoped_release release;
    engine.multiply_matrix(x.data(), static_cast<int>(x.shape(0)), matrix, limbs, y.data());
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("supported_isas", supported_isas);
    m.def("kernel_group", kernel_group, nb::arg("group_size"), nb::arg("cols"));
    m.attr("MAX_PADDED_GROUP") = kMaxPaddedGroup;

    nb::class_<Component>(m, "Component", nb::is_weak_referenceable())
        .def_prop_ro("nbytes", [](const Component& c) { return c.buffer->bytes(); })
        .def("tobytes", [](const Component& c) { return nb::bytes(c.buffer->data(), c.buffer->bytes()); });
    nb::class_<PackedMatrix>(m, "PackedMatrix")
        .def_prop_ro("nbytes", &PackedMatrix::nbytes)
        .def_prop_ro("meta_nbytes", [](const PackedMatrix& w) { return w.meta->bytes(); });
    nb::class_<PreparedExpert>(m, "PreparedExpert")
        .def_prop_ro("nbytes", [](const PreparedExpert& e) {
            return e.w13.nbytes() + e.w2.nbytes() + (e.b13.size() + e.b2.size()) * sizeof(float);
        })
        .def("masked", [](const PreparedExpert& narrow, const Components& w13, const Components& w2) {
            return std::make_shared<PreparedExpert>(narrow.masked(copied(w13), copied(w2)));
        })
        .def("with_activation", with_activation, nb::arg("linear"), nb::arg("cubic"), nb::arg("up_bias"),
             nb::arg("limit"), nb::arg("b1"), nb::arg("b3"), nb::arg("b2"));
    m.def("quantized_expert", quantized_expert, nb::arg("w13"), nb::arg("w2"), nb::arg("limbs"));
    m.def("full_expert", full_expert);

    nb::class_<Engine>(m, "Engine")
        .def(nb::init<const std::string&, int>(), nb::arg("isa"), nb::arg("threads"))
        .def(
            "stay_awake",
            [](Engine& engine, bool awake) { engine.with_pool([&](ThreadPool& pool) { pool.stay_awake(awake); }); },
            nb::arg("awake"))
        .def("pack", pack, nb::arg("planes"), nb::arg("halves"), nb::arg("group"))
        .def("assemble", assemble, nb::arg("components"), nb::arg("rows"), nb::arg("cols"), nb::arg("halves"),
             nb::arg("group"), nb::arg("scale"), nb::arg("offset"), nb::arg("group_size"), nb::arg("perm"))
        .def("fp4_matrix", fp4_matrix, nb::arg("codes"), nb::arg("scales"), nb::arg("of_rows"),
             nb::arg("halves"))
        .def("bytes_matrix", bytes_matrix, nb::arg("dtype"), nb::arg("codes"), nb::arg("scales"), nb::arg("block_rows"),
             nb::arg("block_cols"))
        .def(
            "pack_bytes",
            [](Engine& e, const PreparedExpert& source, int limbs) {
                nb::gil_scoped_release release;
                return std::make_shared<PreparedExpert>(e.pack_bytes(source, limbs));
            },
            nb::arg("source"), nb::arg("limbs"))
        .def("execute", execute, nb::arg("x"), nb::arg("experts"), nb::arg("pair_rows"), nb::arg("pair_experts"),
             nb::arg("gates"), nb::arg("out"))
        .def("multiply", multiply, nb::arg("x"), nb::arg("matrix"), nb::arg("limbs"), nb::arg("y"))
        .def(
            "read_stream",
            [](Engine& e, Vector<uint8_t> data, int streams, int prefetch_bytes) {
                nb::gil_scoped_release release;
                return e.kernels().read_stream(data.data(), data.size(), streams, prefetch_bytes);
            },
            nb::arg("data"), nb::arg("streams"), nb::arg("prefetch_bytes"));
}
