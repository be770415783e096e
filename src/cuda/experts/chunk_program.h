#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../rank/gpu_rank.h"
#include "nodes/params.h"
#include "transport/transport.h"
#include "waybill/moe/ep_config.h"

namespace waybill::cuda {

/// A stretch of the tokens whose sums a rank makes for other nodes, as the network path waits for
/// it.
struct SumPiece {
  std::int64_t first;  ///< token of [nodes, M]
  std::int64_t count;
  std::int32_t ready;  ///< counter that is raised behind it
};

/// Room for the network program of a call, which the device writes, chunk of tokens by chunk; and
/// the slots that others raise when chunks have come.
class ChunkProgram {
 public:
  /// Collective. @param most_row_bytes of what is sent of a token
  ChunkProgram(Transport& transport, std::shared_ptr<GpuRank> gpu, const EPConfig& config,
               std::int64_t most_row_bytes);
  ChunkProgram(const ChunkProgram&) = delete;
  ChunkProgram& operator=(const ChunkProgram&) = delete;
  ~ChunkProgram();

  /// What the kernel that writes it is to know of it.
  void add_to(ListPutsParams& params) const;
  /// Of what the parameters list.
  [[nodiscard]] PathTables tables(const ListPutsParams& params) const;
  [[nodiscard]] PathState* state() const { return program_.state; }

  [[nodiscard]] const SignalPad& pad() const { return pad_; }
  [[nodiscard]] const std::uint64_t* whole_slots() const { return pad_.local; }
  [[nodiscard]] ChunkSlots chunk_slots() const {
    return {pad_.local + config_.num_nodes(), num_chunks_, chunk_shift_};
  }

  /// What is to be summed for other nodes, in the order in which it is sent.
  [[nodiscard]] std::vector<SumPiece> pieces() const;
  [[nodiscard]] std::uint64_t* ready(const SumPiece& piece) const { return ready_ + piece.ready; }

 private:
  [[nodiscard]] std::int64_t others() const { return config_.num_nodes() - 1; }

  Transport& transport_;
  std::shared_ptr<GpuRank> gpu_;
  EPConfig config_;
  std::int32_t chunk_shift_;
  std::int32_t num_chunks_;        ///< of a node
  std::int32_t ready_pieces_ = 0;  ///< of a node; 0: see ListPutsParams
  std::int64_t piece_tokens_ = 0;
  SignalPad pad_;  ///< [nodes] of what goes whole, then [nodes, num_chunks]
  std::shared_ptr<void> memory_;
  PathProgram program_{};
  unsigned* done_ = nullptr;        ///< of the network path: puts of a step that have arrived
  std::uint64_t* ready_ = nullptr;  ///< partial sums that are made
};

}  // namespace waybill::cuda
