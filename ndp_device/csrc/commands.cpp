// What the device does for one Execute beside its kernel, where Python took most of the time: pairs grouped by expert
// (ndp_device/protocol/session.py says what that is) and the DRAM and arrays of one command (ndp_device/timing/model.py).
//
// Whole numbers only, rounded up; tests/ndp_device/timing/test_timing_model.py has the same in Python, to the picosecond.
// Products of a time and a size need 128 bits.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace nb = nanobind;

namespace {

using Wide = __int128;

constexpr int64_t kPsPerSecond = 1'000'000'000'000;
constexpr int64_t kFsPerPs = 1000;

int64_t CeilDiv(Wide numerator, Wide denominator) {
  // a division of 128 bits takes ten times as long as one of 64, and most numbers are small
  if (numerator >= 0 && numerator <= INT64_MAX && denominator > 0 && denominator <= INT64_MAX) {
    const auto small = static_cast<uint64_t>(numerator), by = static_cast<uint64_t>(denominator);
    return static_cast<int64_t>(small / by + (small % by != 0));
  }
  const Wide quotient = numerator / denominator;
  const bool below = numerator % denominator != 0 && (numerator < 0) == (denominator < 0);
  return static_cast<int64_t>(quotient + (below ? 1 : 0));
}

// -- pairs grouped by expert ---------------------------------------------------------------------------------------

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::object NewArray(const std::vector<int32_t>& values) {
  auto owned = std::make_unique<std::vector<int32_t>>(values);
  int32_t* data = owned->data();
  const size_t size = owned->size();
  nb::capsule owner(owned.release(), [](void* p) noexcept { delete static_cast<std::vector<int32_t>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>(data, {size}, owner));
}

// None unless every pair points at a row and at an expert that `flags` [E] allows at its bits. Reads each value of the
// request once, because its sender can change it meanwhile.
nb::object Distinct(Column<int32_t> rows, Column<int32_t> experts, Column<uint8_t> bits, Column<uint8_t> flags,
                    Column<uint8_t> flag_of_bits, int64_t num_rows) {
  const size_t num_pairs = rows.size();
  const size_t num_experts = flags.size();
  if (experts.size() != num_pairs || bits.size() != num_pairs || flag_of_bits.size() != 256) return nb::none();
  constexpr int kWidths = 8;  // a flag is one bit of a byte
  std::vector<int32_t> place(num_experts * kWidths, -1);
  std::vector<int32_t> row_of(num_pairs), index(num_pairs), expert_of, bits_of, counts;
  for (size_t pair = 0; pair < num_pairs; ++pair) {
    const int32_t row = rows.data()[pair], expert = experts.data()[pair];
    const uint8_t width = bits.data()[pair];
    const uint8_t flag = flag_of_bits.data()[width];
    if (row < 0 || row >= num_rows || expert < 0 || static_cast<size_t>(expert) >= num_experts) return nb::none();
    if (flag == 0 || (flags.data()[expert] & flag) == 0) return nb::none();
    int32_t& at = place[static_cast<size_t>(expert) * kWidths + static_cast<size_t>(__builtin_ctz(flag))];
    if (at < 0) {
      at = static_cast<int32_t>(expert_of.size());
      expert_of.push_back(expert);
      bits_of.push_back(width);
      counts.push_back(0);
    }
    row_of[pair] = row;
    index[pair] = at;
    ++counts[static_cast<size_t>(at)];
  }
  return nb::make_tuple(NewArray(row_of), NewArray(index), expert_of, bits_of, counts);
}

// -- DRAM and arrays of one command --------------------------------------------------------------------------------

// The part of the duration of of_bytes that num_bytes of them take.
int64_t SharePs(int64_t whole_ps, int64_t num_bytes, int64_t of_bytes) {
  return of_bytes ? CeilDiv(Wide(whole_ps) * num_bytes, of_bytes) : 0;
}

using PhaseSizes = std::array<int64_t, 6>;  // as DeviceModel._phases says in model.py

// One weight stream. Weights are handed over to the arrays a tile at a time; no more than a buffer lies ahead of them.
struct Phase {
  int64_t num_bytes, lines, compute_ps, dequant_ps, vector_ps, fp16_macs;
  int64_t array_ps;  // the unpacking unit feeds the arrays: the slower one counts
  int64_t tile_bytes, beyond_bytes, tile_ps, buffer_ps;

  Phase() = default;
  Phase(const PhaseSizes& of, int64_t tile, int64_t buffer)
      : num_bytes(of[0]), lines(of[1]), compute_ps(of[2]), dequant_ps(of[3]), vector_ps(of[4]), fp16_macs(of[5]),
        array_ps(std::max(compute_ps, dequant_ps)),
        tile_bytes(std::min(tile, num_bytes)),
        beyond_bytes(std::max<int64_t>(num_bytes - buffer, 0)),
        tile_ps(SharePs(array_ps, tile_bytes, num_bytes)),
        buffer_ps(SharePs(array_ps, num_bytes - beyond_bytes, num_bytes)) {}
};

struct Stream {  // as dram.Stream
  int64_t total_ps = 0, refresh_stall_ps = 0, activations = 0;
};

// Sequential reads on the most loaded channel of a device in closed form; dram.py says what the constants are.
struct Dram {
  int64_t channels, line_bytes, lines_per_row, tck_fs;
  int64_t ideal_bytes_per_s;  // 0: the banks below
  std::vector<int64_t> ramp;
  int64_t pace_cycles, pace_lines, first_pass, later_cycles, later_lines, loss_cycles, loss_refreshes, data_cycles,
      refresh_interval, blocked, rows_reopened;

  int64_t CyclesToPs(int64_t cycles) const { return CeilDiv(Wide(cycles) * tck_fs, kFsPerPs); }

  int64_t Undisturbed(int64_t lines) const {
    const auto ramp_lines = static_cast<int64_t>(ramp.size());
    if (lines < ramp_lines) return ramp[static_cast<size_t>(lines)];
    const int64_t first = std::min(lines, first_pass);
    return ramp.back() + CeilDiv(Wide(pace_cycles) * (first - ramp_lines + 1), pace_lines) +
           CeilDiv(Wide(later_cycles) * (lines - first), later_lines);
  }

  Stream Read(int64_t lines, int64_t start_ps) const {
    if (lines == 0) return {};
    if (ideal_bytes_per_s) {
      return {CeilDiv(Wide(lines) * line_bytes * channels * kPsPerSecond, ideal_bytes_per_s), 0, 0};
    }
    const int64_t undisturbed = Undisturbed(lines);
    int64_t cycles = undisturbed, met = 0;
    if (refresh_interval) {  // a refresh under way is waited for; one is met if it falls due before the last command
      const int64_t since = start_ps < INT64_MAX / kFsPerPs
                                ? start_ps * kFsPerPs / tck_fs % refresh_interval
                                : static_cast<int64_t>(Wide(start_ps) * kFsPerPs / tck_fs % refresh_interval);
      const int64_t wait = std::max<int64_t>(blocked - since, 0);
      const int64_t beyond = wait + undisturbed - data_cycles - (refresh_interval - since);
      cycles = wait + undisturbed;
      if (beyond > 0) {
        met = CeilDiv(Wide(beyond) * loss_refreshes, Wide(refresh_interval) * loss_refreshes - loss_cycles);
        cycles += CeilDiv(Wide(met) * loss_cycles, loss_refreshes);
      }
    }
    const int64_t rows = channels * (CeilDiv(lines, lines_per_row) + met * rows_reopened);
    return {CyclesToPs(cycles), CyclesToPs(cycles - undisturbed), rows};
  }
};

struct Bulk {  // a migration under way, as model._Bulk
  int64_t until_ps, dram_ps, total_ps;

  int64_t DelayPs(int64_t start_ps, int64_t read_ps) const {
    const int64_t beside = std::min(std::max<int64_t>(until_ps - start_ps, 0), read_ps);
    return beside ? CeilDiv(Wide(beside) * dram_ps, total_ps - dram_ps) : 0;
  }
};

class Pipeline {  // DRAM and arrays as they advance
 public:
  Pipeline(const Dram& dram, bool double_buffered, Bulk bulk, int64_t start_ps)
      : dram_(dram),
        double_buffered_(double_buffered),
        bulk_(bulk),
        stream_start_ps_(start_ps),
        dram_free_ps_(start_ps),
        array_free_ps_(start_ps) {}

  void Run(const Phase& phase) {
    const int64_t end = ReadEndPs(phase.lines);
    const int64_t dram_free = dram_free_ps_, array_free = array_free_ps_, read_ps = end - dram_free;
    dram_ps += read_ps;
    if (!double_buffered_) {
      array_free_ps_ = end + phase.array_ps + phase.vector_ps;
      RestartDram(array_free_ps_);
      return;
    }
    // a buffer full of weights at most may lie ahead of the arrays
    const int64_t first_tile = dram_free + SharePs(read_ps, phase.tile_bytes, phase.num_bytes);
    const int64_t beyond = array_free + SharePs(read_ps, phase.beyond_bytes, phase.num_bytes);
    const int64_t read = std::max(end, beyond), begin = std::max(array_free, first_tile);
    const int64_t array_end = std::max(begin + phase.array_ps, read + phase.tile_ps);
    const int64_t free = std::max(read, array_end - phase.buffer_ps);
    if (free > end) {
      RestartDram(free);
    } else {
      dram_free_ps_ = free;
    }
    array_free_ps_ = array_end + phase.vector_ps;
  }

  int64_t Finish() {
    Account();
    return std::max(array_free_ps_, dram_free_ps_);
  }

  int64_t dram_ps = 0, refresh_stall_ps = 0, row_activations = 0;

 private:
  int64_t ReadEndPs(int64_t lines) {
    stream_lines_ += lines;
    running_ = dram_.Read(stream_lines_, stream_start_ps_);
    const int64_t delay = bulk_.until_ps > stream_start_ps_ ? bulk_.DelayPs(stream_start_ps_, running_.total_ps) : 0;
    return stream_start_ps_ + running_.total_ps + delay;
  }

  void RestartDram(int64_t at_ps) {
    Account();
    stream_start_ps_ = dram_free_ps_ = at_ps;
    stream_lines_ = 0;
  }

  void Account() {
    refresh_stall_ps += running_.refresh_stall_ps;
    row_activations += running_.activations;
    running_ = {};
  }

  const Dram& dram_;
  const bool double_buffered_;
  const Bulk bulk_;
  int64_t stream_start_ps_, stream_lines_ = 0, dram_free_ps_, array_free_ps_;
  Stream running_;
};

using Size = std::array<int64_t, 5>;  // hidden, intermediate, bits, tokens, DRAM bytes of one expert

struct HashOfSize {
  size_t operator()(const Size& size) const {
    uint64_t hash = 0;
    for (int64_t value : size) hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
    return hash;
  }
};

class Commands {
 public:
  Commands(Dram dram, bool double_buffered, int64_t tile_bytes, int64_t buffer_bytes)
      : dram_(std::move(dram)), double_buffered_(double_buffered), tile_bytes_(tile_bytes), buffer_bytes_(buffer_bytes) {}

  void Add(const Size& expert, const PhaseSizes& gate_up, const PhaseSizes& down) {
    if (known_.size() >= kMostKnown) known_.clear();
    known_[expert] = {Phase(gate_up, tile_bytes_, buffer_bytes_), Phase(down, tile_bytes_, buffer_bytes_)};
  }

  // The place of the first expert whose phases are not known, or (end, DRAM time, refresh stall, rows opened, compute,
  // dequant, vector, weight bytes, fp16 multiply-accumulates) of the command that begins at start_ps.
  nb::object Run(int64_t hidden, int64_t intermediate, const std::vector<int64_t>& bits,
                 const std::vector<int64_t>& tokens, const std::vector<int64_t>& dram_bytes, int64_t start_ps,
                 int64_t bulk_until_ps, int64_t bulk_dram_ps, int64_t bulk_total_ps) const {
    if (tokens.size() != bits.size() || dram_bytes.size() != bits.size()) {
      throw std::invalid_argument("bits, tokens and dram_bytes must have one length");
    }
    Pipeline pipeline(dram_, double_buffered_, {bulk_until_ps, bulk_dram_ps, bulk_total_ps}, start_ps);
    int64_t compute = 0, dequant = 0, vector = 0, weight_bytes = 0, macs = 0;
    for (size_t i = 0; i < bits.size(); ++i) {
      const auto found = known_.find({hidden, intermediate, bits[i], tokens[i], dram_bytes[i]});
      if (found == known_.end()) return nb::cast(i);
      for (const Phase& phase : found->second) {
        pipeline.Run(phase);
        compute += phase.compute_ps;
        dequant += phase.dequant_ps;
        vector += phase.vector_ps;
        weight_bytes += phase.num_bytes;
        macs += phase.fp16_macs;
      }
    }
    const int64_t end = pipeline.Finish();
    return nb::make_tuple(end, pipeline.dram_ps, pipeline.refresh_stall_ps, pipeline.row_activations, compute, dequant,
                          vector, weight_bytes, macs);
  }

 private:
  static constexpr size_t kMostKnown = 1 << 16;  // a model has a few widths and as many token counts as rows

  const Dram dram_;
  const bool double_buffered_;
  const int64_t tile_bytes_, buffer_bytes_;
  std::unordered_map<Size, std::array<Phase, 2>, HashOfSize> known_;
};

}  // namespace

NB_MODULE(_commands, m) {
  m.def("distinct", &Distinct, nb::arg("rows"), nb::arg("experts"), nb::arg("bits"), nb::arg("flags"),
        nb::arg("flag_of_bits"), nb::arg("num_rows"));
  nb::class_<Dram>(m, "Dram")
      .def(
          "__init__",
          [](Dram* self, int64_t channels, int64_t line_bytes, int64_t lines_per_row, int64_t tck_fs,
             int64_t ideal_bytes_per_s, std::vector<int64_t> ramp, std::array<int64_t, 2> pace, int64_t first_pass,
             std::array<int64_t, 2> later_pace, std::array<int64_t, 2> loss, int64_t data_cycles,
             int64_t refresh_interval, int64_t blocked, int64_t rows_reopened) {
            new (self) Dram{channels, line_bytes, lines_per_row, tck_fs, ideal_bytes_per_s, std::move(ramp), pace[0],
                            pace[1], first_pass, later_pace[0], later_pace[1], loss[0], loss[1], data_cycles,
                            refresh_interval, blocked, rows_reopened};
          },
          nb::kw_only(), nb::arg("channels"), nb::arg("line_bytes"), nb::arg("lines_per_row"), nb::arg("tck_fs"),
          nb::arg("ideal_bytes_per_s"), nb::arg("ramp"), nb::arg("pace"), nb::arg("first_pass"), nb::arg("later_pace"),
          nb::arg("loss"), nb::arg("data_cycles"), nb::arg("refresh_interval"), nb::arg("blocked"),
          nb::arg("rows_reopened"))
      .def_ro("refresh_interval", &Dram::refresh_interval)
      .def("read", [](const Dram& dram, int64_t lines, int64_t start_ps) {
        const Stream read = dram.Read(lines, start_ps);
        return std::make_tuple(read.total_ps, read.refresh_stall_ps, read.activations);
      });
  nb::class_<Commands>(m, "Commands")
      .def(nb::init<Dram, bool, int64_t, int64_t>(), nb::arg("dram"), nb::arg("double_buffered"), nb::arg("tile_bytes"),
           nb::arg("buffer_bytes"))
      .def("add", &Commands::Add, nb::arg("expert"), nb::arg("gate_up"), nb::arg("down"))
      .def("run", &Commands::Run);
}
