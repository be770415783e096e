#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <vector>

#include "core/to_size.h"
#include "schedule/sequence_plan.h"
#include "support/sequence_case.h"

namespace waybill::test {

/// Carries out the plans of all ranks, of float32 tensors and with chunks, one thing at a time: the
/// batches of each rank in their order, and beside them the puts of its network program in theirs,
/// or its phases. Sums are in float32, in the order of the addresses.
class PlanReplay {
 public:
  enum class Network { steps, phases };

  PlanReplay(std::span<const SequencePlan> plans,
             const std::vector<std::vector<HostTensor>>& tensors, Network network = Network::steps)
      : plans_(plans),
        tensors_(tensors),
        network_(network),
        world_(plans.size()),
        workers_(2 * plans.size()) {
    for (const SequencePlan& plan : plans) {
      windows.emplace_back(plan.window_bytes);
      slots_.emplace_back(to_size(plan.num_slots) * world_);
      ready_.emplace_back(plan.network.num_ready);
      auto& sums = outputs.emplace_back();
      for (std::size_t t = 0; t < plan.tensors.size(); ++t)
        sums.emplace_back(DType::float32, Shape{plan.own_rows[t], plan.tensors[t].hidden});
    }
    if (plans.front().operation == SequenceOperation::kv_gradient) stage();
  }

  /// @return whether all ranks came to the end
  bool run() {
    for (bool moves = true; moves;) {
      moves = false;
      for (std::size_t r = 0; r < world_; ++r) {
        while (run_batch(r)) moves = true;
        while (network_ == Network::steps ? run_step(r) : run_phase(r)) moves = true;
      }
    }
    for (std::size_t r = 0; r < world_; ++r) copy_local(r);
    for (std::size_t r = 0; r < world_; ++r) {
      if (workers_[r] < plans_[r].batches.size()) return false;
      const std::size_t rest =
          network_ == Network::steps ? plans_[r].network.steps.size() : plans_[r].phases.size();
      if (workers_[world_ + r] < rest) return false;
    }
    return true;
  }

  std::vector<std::vector<std::byte>> windows;   ///< [W]
  std::vector<std::vector<HostTensor>> outputs;  ///< [W][tensors] sums

 private:
  void stage() {
    for (std::size_t r = 0; r < world_; ++r) {
      for (std::size_t t = 0; t < plans_[r].tensors.size(); ++t) {
        const auto bytes = tensors_[r][t].bytes();
        std::ranges::copy(bytes, windows[r].begin() + plans_[r].window_offsets[t]);
      }
    }
  }

  void copy_local(std::size_t r) {
    const SequencePlan& plan = plans_[r];
    for (const RowSegment& segment : plan.local_segments) {
      const std::int64_t row_bytes = plan.cuts[segment.tensor].row_bytes;
      const std::byte* const from =
          tensors_[r][segment.tensor].bytes().data() + segment.row * row_bytes;
      for (std::int32_t c = 0; c < segment.num_destinations; ++c) {
        std::memcpy(at_address(plan.segment_addresses[segment.first_destination + c]), from,
                    segment.rows * row_bytes);
      }
    }
  }

  bool is_raised(std::size_t rank, const BatchSlot& slot) const {
    if (to_size(slot.rank) == world_) return ready_[rank][slot.slot] != 0;
    return slots_[rank][slot.slot] != 0;
  }
  void raise(std::size_t from, const BatchSlot& slot) {
    if (to_size(slot.rank) == world_) {
      ready_[from][slot.slot] = 1;
    } else {
      slots_[slot.rank][slot.slot] = 1;
    }
  }

  bool run_batch(std::size_t r) {
    const SequencePlan& plan = plans_[r];
    if (workers_[r] == plan.batches.size()) return false;
    const WorkBatch& batch = plan.batches[workers_[r]];
    for (std::int32_t w = 0; w < batch.num_waits; ++w) {
      if (!is_raised(r, plan.waits[batch.first_wait + w])) return false;
    }
    for (std::int64_t c = 0; c < batch.num_chunks; ++c)
      run_chunk(r, batch.kind, plan.chunks[batch.first_chunk + c]);
    for (std::int32_t s = 0; s < batch.num_signals; ++s)
      raise(r, plan.signals[batch.first_signal + s]);
    ++workers_[r];
    return true;
  }

  bool run_step(std::size_t r) {
    const NetworkProgram& network = plans_[r].network;
    if (workers_[world_ + r] == network.steps.size()) return false;
    const NetworkStep& step = network.steps[workers_[world_ + r]];
    for (std::int32_t w = 0; w < step.num_waits; ++w) {
      if (!is_raised(r, network.waits[step.first_wait + w])) return false;
    }
    for (std::int32_t i = 0; i < step.num_puts; ++i) {
      const NetworkPut& put = network.puts[step.first_put + i];
      std::memcpy(windows[put.peer].data() + put.to_bytes, windows[r].data() + put.from_bytes,
                  put.size_bytes);
    }
    for (std::int32_t s = 0; s < step.num_signals; ++s)
      raise(r, network.signals[step.first_signal + s]);
    ++workers_[world_ + r];
    return true;
  }

  /// The phase in which a rank is; null: in none, as it waits or has come to its end.
  const NetworkPhase* begun(std::size_t r) const {
    if (workers_[world_ + r] == plans_[r].phases.size()) return nullptr;
    const NetworkPhase& phase = plans_[r].phases[workers_[world_ + r]];
    for (const BatchSlot& slot : phase.waits) {
      if (!is_raised(r, slot)) return nullptr;
    }
    return &phase;
  }

  /// Whether a rank has begun a phase of this number, or is past it.
  bool has_come_to(std::size_t r, std::int64_t number) const {
    if (workers_[world_ + r] == plans_[r].phases.size()) return true;
    const NetworkPhase* const phase = begun(r);
    return plans_[r].phases[workers_[world_ + r]].number > number ||
           (phase != nullptr && phase->number == number);
  }

  /// Ends when all to whom it sends, or from whom it receives, have come to it.
  bool run_phase(std::size_t r) {
    const NetworkPhase* const phase = begun(r);
    if (phase == nullptr) return false;
    for (const auto* pieces : {&phase->sent, &phase->received}) {
      for (const NetworkPiece& piece : *pieces)
        if (!has_come_to(to_size(piece.peer), phase->number)) return false;
    }
    std::vector<std::size_t> taken(world_);
    for (const NetworkPiece& piece : phase->received) {
      const NetworkPiece& from = sent_in(to_size(piece.peer), phase->number,
                                         static_cast<std::int32_t>(r), taken[piece.peer]++);
      if (from.size_bytes != piece.size_bytes) throw std::logic_error("pieces of other sizes");
      std::copy_n(windows[piece.peer].begin() + from.offset_bytes, piece.size_bytes,
                  windows[r].begin() + piece.offset_bytes);
    }
    for (const std::int32_t slot : phase->slots) slots_[r][slot] = 1;
    ++workers_[world_ + r];
    return true;
  }

  const NetworkPiece& sent_in(std::size_t from, std::int64_t number, std::int32_t to,
                              std::size_t idx) const {
    for (const NetworkPhase& phase : plans_[from].phases) {
      if (phase.number != number) continue;
      for (const NetworkPiece& piece : phase.sent) {
        if (piece.peer == to && idx-- == 0) return piece;
      }
    }
    throw std::logic_error("a piece that nobody sends");
  }

  std::byte* in_window(std::size_t r, std::size_t tensor, const RowChunk& chunk) {
    return windows[r].data() + plans_[r].window_offsets[tensor] +
           chunk.row * plans_[r].cuts[tensor].row_bytes + chunk.col_bytes;
  }

  void run_chunk(std::size_t r, BatchKind kind, const RowChunk& chunk) {
    const SequencePlan& plan = plans_[r];
    const std::size_t t = chunk.tensor;
    const std::size_t bytes = to_size(chunk.rows) * to_size(chunk.part_bytes);
    const std::size_t in_tensor = chunk.row * plan.cuts[t].row_bytes + chunk.col_bytes;
    if (kind == BatchKind::send || kind == BatchKind::forward) {
      const std::byte* const from = kind == BatchKind::send
                                        ? tensors_[r][t].bytes().data() + in_tensor
                                        : in_window(r, t, chunk);
      for (std::int32_t p = 0; p < chunk.num_addresses; ++p)
        std::memcpy(at_address(plan.addresses[chunk.first_address + p]), from, bytes);
      return;
    }
    std::byte* const to = kind == BatchKind::partial ? in_window(r, t + plan.tensors.size(), chunk)
                                                     : outputs[r][t].bytes().data() + in_tensor;
    for (std::size_t i = 0; i < bytes; i += sizeof(float)) {
      float sum = 0;
      for (std::int32_t p = 0; p < chunk.num_addresses; ++p) {
        float addend = 0;
        std::memcpy(&addend, at_address(plan.addresses[chunk.first_address + p]) + i,
                    sizeof(float));
        sum = p == 0 ? addend : sum + addend;
      }
      std::memcpy(to + i, &sum, sizeof(float));
    }
  }

  std::byte* at_address(std::uint64_t address) {
    return windows[address >> address_rank_shift].data() +
           (address & address_offset_mask & ~address_sum_bit);
  }

  std::span<const SequencePlan> plans_;
  const std::vector<std::vector<HostTensor>>& tensors_;  ///< [W][tensors]
  Network network_;
  std::size_t world_;
  std::vector<std::size_t> workers_;              ///< [2 W] next batch, next step or phase
  std::vector<std::vector<std::uint8_t>> slots_;  ///< [W] pads
  std::vector<std::vector<std::uint8_t>> ready_;  ///< [W]
};

}  // namespace waybill::test
