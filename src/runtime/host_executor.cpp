#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "core/copy_bytes.h"
#include "core/number.h"
#include "runtime/executor.h"
#include "runtime/fingerprint.h"
#include "waybill/core/error.h"
#include "waybill/core/wait.h"

namespace waybill {
namespace {

using detail::FingerprintExchange;

// A note: the epoch above, then a count, as notes only grow, and the rank waited for + 1; 0: none.
constexpr int epoch_shift = 32;
constexpr int count_shift = 21;
constexpr std::uint64_t rank_mask = (std::uint64_t{1} << count_shift) - 1;
constexpr std::uint64_t count_mask = (std::uint64_t{1} << (epoch_shift - count_shift)) - 1;

std::uint64_t read(const SignalPad& pad, std::int64_t idx) {
  // Pairs with the release of the signal: the rows before it are visible.
  return std::atomic_ref(pad.local[idx]).load(std::memory_order_acquire);
}

std::int64_t row_pitch(const ConstTensorView& view) {
  return view.strides[0] * dtype_bytes(view.dtype);
}

std::int32_t rank_of(std::uint64_t address) {
  return static_cast<std::int32_t>(address >> address_rank_shift);
}
std::int64_t offset_of(std::uint64_t address) {
  return static_cast<std::int64_t>(address & address_offset_mask);
}

/// A run of elements to be added: rows, or sums of rows as they are made on the way.
struct SumAddend {
  const std::byte* data = nullptr;
  bool is_sum = false;  ///< has the type that sums are made in
};

constexpr std::int64_t block_elements = 512;

/// Reads `count` elements as they are summed.
template <class From, class Sum>
void load(const std::byte* data, std::size_t first, std::size_t count, Sum* values) {
  std::array<typename From::Stored, block_elements> in;
  std::memcpy(in.data(), data + first * sizeof(in[0]), count * sizeof(in[0]));
  for (std::size_t i = 0; i < count; ++i) values[i] = From::load(in[i]);
}

/// The type in which sums of a number travel.
template <class From>
using SumOf = std::conditional_t<std::is_same_v<typename From::Sum, double>, detail::Float64,
                                 detail::Float32>;

template <class From, class To>
void sum_as(std::span<const SumAddend> addends, std::byte* out, std::int64_t num_elements) {
  using Out = typename To::Stored;
  using Sum = typename From::Sum;
  using OnTheWay = SumOf<From>;
  if (addends.size() == 1 && (addends[0].is_sum ? OnTheWay::dtype : From::dtype) == To::dtype) {
    std::memcpy(out, addends[0].data, num_elements * sizeof(Out));
    return;
  }
  std::array<Sum, block_elements> sums{};
  std::array<Sum, block_elements> values;
  std::array<Out, block_elements> rounded;
  for (std::int64_t first = 0; first < num_elements; first += block_elements) {
    const std::size_t count = std::min(block_elements, num_elements - first);
    for (std::size_t k = 0; k < addends.size(); ++k) {
      Sum* const into = k == 0 ? sums.data() : values.data();
      if (addends[k].is_sum) {
        load<OnTheWay>(addends[k].data, first, count, into);
      } else {
        load<From>(addends[k].data, first, count, into);
      }
      for (std::size_t i = 0; k > 0 && i < count; ++i) sums[i] += values[i];
    }
    for (std::size_t i = 0; i < count; ++i) rounded[i] = To::round(sums[i]);
    std::memcpy(out + first * sizeof(Out), rounded.data(), count * sizeof(Out));
  }
}

/// Adds up equal runs of elements: `out[i]` is the sum of `addends[k][i]` in the order of k, in
/// float32 (float64 for float64), rounded once. One addend alone keeps its bits where it has the
/// output's dtype; none gives 0.
using SumAs = void (*)(std::span<const SumAddend>, std::byte*, std::int64_t);

/// @param from dtype of addends that are no sums; `to` of the output. Null: see can_sum
SumAs sum_of(DType from, DType to) {
  SumAs sum = nullptr;
  detail::for_number(from, [&]<class From>(From) {
    if (to == From::dtype) {
      sum = sum_as<From, From>;
    } else if (to == SumOf<From>::dtype) {
      sum = sum_as<From, SumOf<From>>;
    }
  });
  return sum;
}

class HostExecutor final : public Executor {
 public:
  explicit HostExecutor(Transport& transport) : transport_(transport) {}

  std::unique_ptr<UploadedPlan> upload(const SequencePlan& /*plan*/, Stream /*stream*/) override {
    return std::make_unique<UploadedPlan>();  // the tables stay in the plan
  }

  void refill(UploadedPlan& /*uploaded*/, const SequencePlan& /*plan*/,
              Stream /*stream*/) override {}

  [[nodiscard]] bool runs_batches() const override { return true; }

  void dispatch(const SequenceCall& call) override {
    const FingerprintExchange exchange = exchange_of(call);
    exchange.send();
    num_notes_ = 0;
    streaming_ = is_large(*call.plan);
    run_batches(call, exchange);
    for (const RowChunk& chunk : call.plan->chunks) {
      if (call.plan->batches.empty()) send(call, chunk);
    }
    detail::finish_streaming();
    arrive_and_wait(call, exchange);
    // Rows may still be on their way out of the inputs and the window.
    if (transport_.topology().num_nodes() > 1) transport_.quiet();
  }

  void kv_gradient(const SequenceCall& call) override {
    const FingerprintExchange exchange = exchange_of(call);
    exchange.send();
    num_notes_ = 0;
    streaming_ = false;
    stage(call);
    arrive_and_wait(call, exchange);
    run_batches(call, exchange);
    for (const RowChunk& chunk : call.plan->chunks) {
      if (call.plan->batches.empty()) sum(call, chunk);
    }
    if (transport_.topology().num_nodes() > 1) transport_.quiet();
  }

  void synchronize(Stream /*stream*/) override {}
  void finish() override {}

 private:
  [[nodiscard]] FingerprintExchange exchange_of(const SequenceCall& call) const {
    return {transport_,     *call.arrivals, num_arrival_signals(transport_.topology().world_size),
            call.operation, call.epoch,     call.fingerprint};
  }
  /// Whether what the ranks of this host write, if all have as much, is more than caches keep.
  [[nodiscard]] bool is_large(const SequencePlan& plan) const {
    const std::int64_t bytes =
        std::accumulate(plan.wire_bytes.begin(), plan.wire_bytes.end(), std::int64_t{0});
    return bytes > detail::streaming_bytes / transport_.topology().world_size;
  }

  void run_batches(const SequenceCall& call, const FingerprintExchange& exchange) {
    const SequencePlan& plan = *call.plan;
    const std::int32_t world = plan.world_size;
    for (const WorkBatch& batch : plan.batches) {
      for (std::int32_t w = batch.first_wait; w < batch.first_wait + batch.num_waits; ++w) {
        const BatchSlot& slot = plan.waits[w];
        await(call, exchange, *call.slots, std::int64_t{world} + slot.slot, Rank{slot.rank});
      }
      for (auto c = batch.first_chunk; c < batch.first_chunk + batch.num_chunks; ++c) {
        run_chunk(call, batch.kind, plan.chunks[c]);
      }
      detail::finish_streaming();
      for (std::int32_t s = batch.first_signal; s < batch.first_signal + batch.num_signals; ++s) {
        const BatchSlot& slot = plan.signals[s];
        transport_.signal(Rank{slot.rank}, {call.slots, std::int64_t{world} + slot.slot},
                          call.epoch);
      }
    }
  }

  void run_chunk(const SequenceCall& call, BatchKind kind, const RowChunk& chunk) {
    switch (kind) {
      case BatchKind::send:
        return send(call, chunk);
      case BatchKind::forward: {
        const std::int64_t pitch = call.plan->cuts[chunk.tensor].row_bytes;
        return send_rows(call, chunk, in_window(call, chunk.tensor, chunk), pitch);
      }
      case BatchKind::sum:
        return sum(call, chunk);
      case BatchKind::partial: {
        const auto sums = chunk.tensor + static_cast<std::int32_t>(call.plan->tensors.size());
        const DType from = call.plan->tensors[chunk.tensor].dtype;
        const DType to = from == DType::float64 ? DType::float64 : DType::float32;
        return sum_rows(call, chunk, in_window(call, sums, chunk), call.plan->cuts[sums].row_bytes,
                        to);
      }
    }
  }

  /// The first row of a chunk in this rank's window.
  static std::byte* in_window(const SequenceCall& call, std::int32_t tensor,
                              const RowChunk& chunk) {
    return call.window->local + call.plan->window_offsets[tensor] +
           chunk.row * call.plan->cuts[tensor].row_bytes;
  }

  void send(const SequenceCall& call, const RowChunk& chunk) {
    const ConstTensorView& input = call.inputs[chunk.tensor];
    const std::int64_t pitch = row_pitch(input);
    send_rows(call, chunk, input.data + chunk.row * pitch, pitch);
  }

  void send_rows(const SequenceCall& call, const RowChunk& chunk, const std::byte* row,
                 std::int64_t pitch) {
    const std::byte* const first = row + chunk.col_bytes;
    const bool one_piece = chunk.rows == 1 || pitch == chunk.part_bytes;
    const std::int64_t pieces = one_piece ? 1 : chunk.rows;
    const std::int64_t piece_bytes =
        one_piece ? std::int64_t{chunk.rows} * chunk.part_bytes : chunk.part_bytes;
    for (std::int32_t p = 0; p < chunk.num_addresses; ++p) {
      const std::uint64_t address = call.plan->addresses[chunk.first_address + p];
      for (std::int64_t k = 0; k < pieces; ++k) {
        put(*call.window, rank_of(address), offset_of(address) + k * piece_bytes, first + k * pitch,
            piece_bytes);
      }
    }
  }

  void put(const SymmetricBuffer& window, std::int32_t rank, std::int64_t offset,
           const std::byte* source, std::int64_t size_bytes) {
    if (std::byte* const base = window.peers[rank]; base != nullptr) {
      detail::copy_bytes(base + offset, source, size_bytes, streaming_);
    } else {
      transport_.put(window, {Rank{rank}, offset, source, size_bytes});
    }
  }

  /// Raises this rank's slot everywhere, beginning with rank + 1, and waits for all others', who
  /// must mean the same call.
  void arrive_and_wait(const SequenceCall& call, const FingerprintExchange& exchange) {
    const std::int32_t world = transport_.topology().world_size;
    const std::int32_t me = to_int(transport_.rank());
    for (std::int32_t k = 1; k < world; ++k) {
      transport_.signal(Rank{(me + k) % world}, {call.arrivals, me}, call.epoch);
    }
    for (std::int32_t k = 1; k < world; ++k) {
      const std::int32_t peer = (me + k) % world;
      await(call, exchange, *call.arrivals, peer, Rank{peer});
      exchange.compare(Rank{peer});
    }
  }

  /// Until the own counter `idx` of the pad is at least the call's epoch; `peer` raises it. A rank
  /// that has waited for half of the deadline notes for whom at all ranks, so that a rank that
  /// waits for one that only waits itself names the silent one.
  /// @throws Disagreement when a rank has told that it means another call; Timeout naming the rank
  ///   at the end of the notes that begin with `peer`
  void await(const SequenceCall& call, const FingerprintExchange& exchange, const SignalPad& pad,
             std::int64_t idx, Rank peer) {
    std::uint64_t seen = read(pad, idx);
    if (seen >= call.epoch) return;
    const auto check = [&] {
      exchange.compare_all(peer);
      transport_.check_peers(call.operation, peer);
    };
    PollingWait wait(
        transport_.timeout_s(),
        {.check = check, .gives_turn = true, .num_waiters = transport_.topology().world_size});
    bool noted = false;
    while ((seen = read(pad, idx)) < call.epoch) {
      if (!wait.pause()) {
        exchange.compare_all(peer);
        throw_timeout(call, peer, seen, wait.waited_s());
      }
      if (!noted && wait.waited_s() > transport_.timeout_s() / 2) {
        note(call, to_int(peer));
        noted = true;
      }
    }
    if (noted) note(call, -1);
  }

  void note(const SequenceCall& call, std::int32_t peer) {
    if (num_notes_ == count_mask) return;
    const std::uint64_t value = call.epoch << epoch_shift | ++num_notes_ << count_shift |
                                static_cast<std::uint64_t>(peer + 1);
    const std::int32_t me = to_int(transport_.rank());
    for (std::int32_t r = 0; r < transport_.topology().world_size; ++r)
      transport_.signal(Rank{r}, {call.slots, me}, value);
  }

  [[noreturn]] void throw_timeout(const SequenceCall& call, Rank peer, std::uint64_t seen,
                                  double waited_s) {
    const Topology& topology = transport_.topology();
    std::int32_t silent = to_int(peer);
    for (std::int32_t steps = 0; steps < topology.world_size; ++steps) {
      // Perhaps of the call before: it stands until that wait is over.
      const std::uint64_t note = read(*call.slots, silent);
      const auto next = static_cast<std::int32_t>(note & rank_mask) - 1;
      if (next < 0 || next == to_int(transport_.rank())) break;
      silent = next;
    }
    transport_.note_timeout();
    throw Timeout({.operation = std::string(call.operation),
                   .rank = to_int(transport_.rank()),
                   .peer = silent,
                   .wanted = call.epoch,
                   .seen = seen,
                   .seconds = waited_s,
                   .peer_node = to_int(topology.node(Rank{silent})),
                   .peer_local = to_int(topology.local_rank(Rank{silent}))});
  }

  static void stage(const SequenceCall& call) {
    for (std::size_t t = 0; t < call.inputs.size(); ++t) {
      const ConstTensorView& input = call.inputs[t];
      const std::int64_t row_bytes = call.plan->tensors[t].row_bytes();
      std::byte* const base = call.window->local + call.plan->window_offsets[t];
      const std::int64_t pitch = row_pitch(input);
      if (row_bytes == 0 || (input.data == base && pitch == row_bytes)) continue;
      if (pitch == row_bytes) {
        std::memcpy(base, input.data, call.plan->window_rows[t] * row_bytes);
        continue;
      }
      for (std::int64_t row = 0; row < call.plan->window_rows[t]; ++row) {
        std::memcpy(base + row * row_bytes, input.data + row * pitch, row_bytes);
      }
    }
  }

  void sum(const SequenceCall& call, const RowChunk& chunk) {
    const TensorView& output = call.outputs[chunk.tensor];
    const std::int64_t pitch = output.strides[0] * dtype_bytes(output.dtype);
    sum_rows(call, chunk, output.data + chunk.row * pitch, pitch, output.dtype);
  }

  /// @param row where the sum of the chunk's first row goes, as `to`
  void sum_rows(const SequenceCall& call, const RowChunk& chunk, std::byte* row, std::int64_t pitch,
                DType to) {
    const DType from = call.plan->tensors[chunk.tensor].dtype;
    const SumAs add_up = sum_of(from, to);
    const std::int64_t in_bytes = dtype_bytes(from);
    const bool batches = !call.plan->batches.empty();
    const std::int64_t num_elements = chunk.part_bytes / in_bytes;
    addends_.resize(chunk.num_addresses);
    // Rows whose sums lie one after another, as their addends do, are summed as one.
    const bool one_piece = pitch == num_elements * dtype_bytes(to);
    const std::int64_t pieces = one_piece ? 1 : chunk.rows;
    for (std::int64_t k = 0; k < pieces; ++k) {
      for (std::int32_t p = 0; p < chunk.num_addresses; ++p) {
        const std::uint64_t address = call.plan->addresses[chunk.first_address + p];
        const bool is_sum = batches && (address & address_sum_bit) != 0;
        const std::int64_t row_bytes =
            is_sum ? call.plan->cuts[chunk.tensor + call.plan->tensors.size()].row_bytes
                   : chunk.part_bytes;
        const std::byte* const base = call.window->peers[rank_of(address)];
        addends_[p] = {
            base + offset_of(is_sum ? address & ~address_sum_bit : address) + k * row_bytes,
            is_sum};
      }
      add_up(addends_, row + k * pitch + chunk.col_bytes / in_bytes * dtype_bytes(to),
             one_piece ? chunk.rows * num_elements : num_elements);
    }
  }

  std::uint64_t num_notes_ = 0;  ///< in this call
  std::vector<SumAddend> addends_;
  bool streaming_ = false;  ///< rows that are sent by this call
  Transport& transport_;
};

}  // namespace

bool can_sum(DType from, DType to) { return sum_of(from, to) != nullptr; }

std::unique_ptr<Executor> make_host_executor(Transport& transport) {
  return std::make_unique<HostExecutor>(transport);
}

}  // namespace waybill
