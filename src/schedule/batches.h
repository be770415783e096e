#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan_checks.h"
#include "schedule/sequence_plan.h"

namespace waybill::detail {

/// Rows on their way to one address of a window.
struct RowMove {
  std::int32_t tensor = 0;       ///< first of the part
  std::int32_t num_tensors = 0;  ///< of the part: all go the same way
  std::int64_t row = 0;          ///< of this rank's tensor, or of its window's
  std::int64_t rows = 0;
  std::int32_t dst_rank = 0;
  std::int64_t dst_row = 0;
};

/// The batches of a plan and their segments, appended one after another.
class BatchAppender {
 public:
  explicit BatchAppender(SequencePlan& plan) : plan_(plan) {}

  void begin(BatchKind kind);

  /// A segment with these addresses; all but its row, rows and tensor is set here.
  void add(RowSegment segment, std::span<const std::uint64_t> addresses);

  /// Of the batch that has begun.
  [[nodiscard]] bool has_chunks() const { return plan_.num_chunks > batch_.first_chunk; }
  /// It has neither segments nor signals.
  [[nodiscard]] bool is_empty() const;

  /// Ends the batch, with the waits and signals that the plan has got since; an empty one leaves
  /// nothing.
  void end();

 private:
  SequencePlan& plan_;
  WorkBatch batch_;
};

/// Writes the batches of a rank, one after another.
class BatchWriter {
 public:
  BatchWriter(SequencePlan& plan, const WindowMap& windows);

  void begin(BatchKind kind) { appender_.begin(kind); }
  void wait(BatchSlot slot) { plan_.waits.push_back(slot); }
  void signal(BatchSlot slot) { plan_.signals.push_back(slot); }

  /// Rows of one tensor and the addresses of its copies or addends.
  void add(std::int32_t tensor, std::int64_t row, std::int64_t rows,
           std::span<const std::uint64_t> addresses);

  /// Moves as `group` made them: `count` with the same rows.
  void add(std::span<const RowMove> moves);

  /// Ends the batch; one without segments and signals leaves nothing.
  void end() { appender_.end(); }

  /// @throws InvalidArgument for 2^31 chunks or addresses
  void finish() const;

  [[nodiscard]] std::uint64_t address(std::int32_t tensor, std::int32_t rank,
                                      std::int64_t row) const;

 private:
  SequencePlan& plan_;
  const WindowMap& windows_;
  BatchAppender appender_;
  std::vector<std::uint64_t> addresses_;
};

/// Brings moves of the same rows together, up to max_addresses_sent, the others in the order in
/// which they came. Nearest destinations from rank + 1 on come first.
/// @return where groups begin, and the end
[[nodiscard]] std::vector<std::size_t> group_moves(std::vector<RowMove>& moves, std::int32_t rank,
                                                   std::int32_t world_size);

/// Cuts rows into pieces of at most `piece_bytes` and lets those to different ranks alternate, in
/// proportion to their number, beginning with rank + 1.
void alternate_moves(std::vector<RowMove>& moves, std::vector<std::size_t>& groups,
                     const SequencePlan& plan, std::int64_t piece_bytes);

}  // namespace waybill::detail
