#include <cstring>
#include <vector>

#include "host_expert_executor.h"
#include "row_sum.h"
#include "waybill/core/at.h"
#include "waybill/core/error.h"
#include "waybill/runtime/executor.h"

namespace waybill {
namespace {

using detail::at;

/// The tables stay where they are: in the plan.
class NoTables final : public UploadedPlan {};

std::int64_t row_pitch(const ConstTensorView& view) {
  return view.strides[0] * dtype_bytes(view.dtype);
}

std::int32_t rank_of(std::uint64_t place) {
  return static_cast<std::int32_t>(place >> place_rank_shift);
}
std::int64_t offset_of(std::uint64_t place) {
  return static_cast<std::int64_t>(place & place_offset_mask);
}

class HostExecutor final : public Executor {
 public:
  explicit HostExecutor(Transport& transport) : transport_(transport) {}

  std::unique_ptr<UploadedPlan> upload(const SequencePlan& /*plan*/,
                                       std::unique_ptr<UploadedPlan> earlier,
                                       Stream /*stream*/) override {
    return earlier != nullptr ? std::move(earlier) : std::make_unique<NoTables>();
  }

  void dispatch(const SequenceCall& call) override {
    for (const RowChunk& chunk : call.plan->chunks) send(call, chunk);
    meet(call);
  }

  void kv_gradient(const SequenceCall& call) override {
    for (std::size_t r = 0; r < call.plan->wire_bytes.size(); ++r) {
      if (call.plan->wire_bytes[r] == 0 || call.window->peers[r] != nullptr) continue;
      throw Unsupported(concat(call.operation, ": rank ", r,
                               " is on another node; gradients are read through pointers, so all "
                               "ranks must be on one node"));
    }
    stage(call);
    meet(call);
    std::vector<const std::byte*> sources;
    for (const RowChunk& chunk : call.plan->chunks) sum(call, chunk, sources);
  }

  std::unique_ptr<ExpertExecutor> make_expert_executor(const EPConfig& config,
                                                       const EPDispatchOptions& options,
                                                       const ExpertMemory& memory) override {
    return detail::make_host_expert_executor(transport_, config, options, memory);
  }

  void synchronize(Stream /*stream*/) override {}
  void finish() override {}
  [[nodiscard]] bool is_capturing(Stream /*stream*/) const override { return false; }

 private:
  void send(const SequenceCall& call, const RowChunk& chunk) {
    const ConstTensorView& input = call.inputs[at(chunk.tensor)];
    const std::int64_t pitch = row_pitch(input);
    const std::byte* const first = input.data + chunk.row * pitch + chunk.col_bytes;
    const bool one_piece = chunk.rows == 1 || pitch == chunk.part_bytes;
    const std::int64_t pieces = one_piece ? 1 : chunk.rows;
    const std::int64_t piece_bytes =
        one_piece ? std::int64_t{chunk.rows} * chunk.part_bytes : chunk.part_bytes;
    for (std::int32_t p = 0; p < chunk.num_places; ++p) {
      const std::uint64_t place = call.plan->places[at(chunk.first_place + p)];
      for (std::int64_t k = 0; k < pieces; ++k) {
        put(*call.window, rank_of(place), offset_of(place) + k * piece_bytes, first + k * pitch,
            piece_bytes);
      }
    }
  }

  void put(const SymmetricBuffer& window, std::int32_t rank, std::int64_t offset,
           const std::byte* source, std::int64_t size_bytes) {
    if (std::byte* const base = window.peers[at(rank)]; base != nullptr) {
      std::memcpy(base + offset, source, at(size_bytes));
    } else {
      transport_.put(window, {Rank{rank}, offset, source, size_bytes});
    }
  }

  /// Raises this rank's slot everywhere, beginning with rank + 1, and waits for all others'.
  void meet(const SequenceCall& call) {
    const std::int32_t world = transport_.topology().world_size;
    const std::int32_t me = to_int(transport_.rank());
    for (std::int32_t k = 1; k < world; ++k) {
      transport_.signal(Rank{(me + k) % world}, {call.arrivals, me}, call.epoch);
    }
    for (std::int32_t k = 1; k < world; ++k) {
      const std::int32_t peer = (me + k) % world;
      (void)transport_.wait({call.arrivals, peer}, call.epoch, Rank{peer}, call.operation);
    }
  }

  static void stage(const SequenceCall& call) {
    for (std::size_t t = 0; t < call.inputs.size(); ++t) {
      const ConstTensorView& input = call.inputs[t];
      const std::int64_t row_bytes = call.plan->tensors[t].row_bytes();
      std::byte* const base = call.window->local + call.plan->window_offsets[t];
      const std::int64_t pitch = row_pitch(input);
      if (row_bytes == 0 || (input.data == base && pitch == row_bytes)) continue;
      for (std::int64_t row = 0; row < call.plan->window_rows[t]; ++row) {
        std::memcpy(base + row * row_bytes, input.data + row * pitch, at(row_bytes));
      }
    }
  }

  static void sum(const SequenceCall& call, const RowChunk& chunk,
                  std::vector<const std::byte*>& sources) {
    const TensorFormat& format = call.plan->tensors[at(chunk.tensor)];
    const TensorView& output = call.outputs[at(chunk.tensor)];
    const std::int64_t in_bytes = dtype_bytes(format.dtype);
    const std::int64_t out_bytes = dtype_bytes(output.dtype);
    const auto sum_runs = detail::sum_runs_of(format.dtype, output.dtype);
    for (std::int64_t k = 0; k < chunk.rows; ++k) {
      sources.clear();
      for (std::int32_t p = 0; p < chunk.num_places; ++p) {
        const std::uint64_t place = call.plan->places[at(chunk.first_place + p)];
        const std::byte* const base = call.window->peers[at(rank_of(place))];
        sources.push_back(base + offset_of(place) + k * chunk.part_bytes);
      }
      sum_runs(sources,
               output.data + (chunk.row + k) * output.strides[0] * out_bytes +
                   chunk.col_bytes / in_bytes * out_bytes,
               chunk.part_bytes / in_bytes);
    }
  }

  Transport& transport_;
};

}  // namespace

std::unique_ptr<Executor> make_host_executor(Transport& transport) {
  return std::make_unique<HostExecutor>(transport);
}

}  // namespace waybill
