#include "schedule/check_sequence_plans.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "core/to_size.h"
#include "waybill/core/error.h"

namespace waybill::test {
namespace {

using detail::to_size;

/// A row by its name: whose tensor (or window, of gradients) it is in, and which row there.
using RowName = std::pair<std::int32_t, std::int64_t>;

/// A batch of a rank; -1: it is there when the call begins.
using BatchName = std::pair<std::int32_t, std::int32_t>;

struct Cell {
  BatchName writer{-1, -1};
  std::vector<RowName> rows;  ///< what it is, or what was added up
};

class PlanChecker {
 public:
  PlanChecker(std::span<const SequencePlan> plans, std::span<const SequencePart> parts,
              std::int32_t ranks_per_node, std::size_t max_findings)
      : plans_(plans),
        parts_(parts),
        ranks_per_node_(ranks_per_node == 0 ? std::ssize(plans) : ranks_per_node),
        max_findings_(max_findings),
        sends_(plans.front().operation == SequenceOperation::dispatch),
        windows_(plans.size()),
        outputs_(plans.size()),
        next_(plans.size()) {}

  std::vector<std::string> check() {
    for (std::size_t r = 0; r < plans_.size(); ++r) {
      check_plan(static_cast<std::int32_t>(r));
      note_signals(static_cast<std::int32_t>(r));
    }
    if (!findings_.empty()) return std::move(findings_);
    if (!sends_) stage_gradients();
    carry_out();
    compare();
    return std::move(findings_);
  }

 private:
  using Region = std::unordered_map<std::int64_t, Cell>;  ///< by row

  template <class... Parts>
  void find(const Parts&... parts) {
    if (findings_.size() < max_findings_) findings_.push_back(concat(parts...));
  }

  [[nodiscard]] const SequencePlan& plan(std::int32_t rank) const { return plans_[rank]; }
  [[nodiscard]] std::int64_t row_bytes(std::int32_t tensor) const {
    const std::size_t count = plans_.front().tensors.size();
    const TensorFormat& format = plans_.front().tensors[to_size(tensor) % count];
    if (to_size(tensor) < count) return format.row_bytes();
    return format.hidden * (format.dtype == DType::float64 ? 8 : 4);
  }

  void check_plan(std::int32_t rank) {
    const SequencePlan& rank_plan = plan(rank);
    if (rank_plan.rank != Rank{rank} || rank_plan.world_size != std::ssize(plans_) ||
        rank_plan.operation != plans_.front().operation ||
        rank_plan.tensors != plans_.front().tensors ||
        rank_plan.window_bytes != plans_.front().window_bytes ||
        rank_plan.num_slots != plans_.front().num_slots) {
      find("plan ", rank, ": not the plan of rank ", rank, " of ", plans_.size(),
           " with the operation, tensors, window_bytes and num_slots of plan 0");
    }
    std::int32_t next = 0;
    for (const WorkBatch& batch : rank_plan.batches) {
      if (batch.first_segment != next) find("plan ", rank, ": batches leave segments out");
      next = batch.first_segment + batch.num_segments;
    }
    if (!rank_plan.batches.empty() && next != std::ssize(rank_plan.segments))
      find("plan ", rank, ": batches leave segments out");
  }

  void note_signals(std::int32_t rank) {
    const SequencePlan& rank_plan = plan(rank);
    for (std::int32_t b = 0; b < std::ssize(rank_plan.batches); ++b) {
      const WorkBatch& batch = rank_plan.batches[b];
      for (std::int32_t s = batch.first_signal; s < batch.first_signal + batch.num_signals; ++s) {
        const BatchSlot& slot = rank_plan.signals[s];
        if (slot.slot % rank_plan.world_size != rank ||
            slot.slot / rank_plan.world_size >= rank_plan.num_slots)
          find("rank ", rank, ", batch ", b, ": slot ", slot.slot, " is not one of its ",
               rank_plan.num_slots);
        const auto [found, made] = raised_by_.try_emplace({slot.rank, slot.slot}, rank, b);
        if (!made)
          find("slot ", slot.slot, " of rank ", slot.rank, ": raised by batches ",
               found->second.second, " and ", b, " of rank ", rank);
      }
    }
  }

  void stage_gradients() {
    for (std::int32_t r = 0; r < std::ssize(plans_); ++r) {
      for (const RowSegment& staged : plan(r).staged) {
        for (std::int64_t row = staged.row; row < staged.row + staged.rows; ++row)
          windows_[r][staged.tensor][row] = {{-1, -1}, {{r, row}}};
      }
    }
  }

  /// Every rank does its batches in order, as far as it can; until nothing moves.
  void carry_out() {
    for (bool moves = true; moves;) {
      moves = false;
      for (std::int32_t r = 0; r < std::ssize(plans_); ++r) {
        while (can_go_on(r)) {
          run(r, next_[r]++);
          moves = true;
        }
      }
    }
    for (std::int32_t r = 0; r < std::ssize(plans_); ++r) {
      if (next_[r] < num_batches(r)) find("rank ", r, ": batch ", next_[r], " waits for ever");
      for (const RowSegment& segment : plan(r).local_segments)
        sends_ ? copy(r, {-1, -1}, segment, false) : return_rows(r, segment);
    }
  }

  /// A plan without batches is one.
  [[nodiscard]] std::int32_t num_batches(std::int32_t rank) const {
    return plan(rank).batches.empty() ? 1 : static_cast<std::int32_t>(plan(rank).batches.size());
  }

  bool can_go_on(std::int32_t rank) {
    const SequencePlan& rank_plan = plan(rank);
    const std::int32_t b = next_[rank];
    if (b >= num_batches(rank)) return false;
    waited_for_.clear();
    if (rank_plan.batches.empty()) return true;
    const WorkBatch& batch = rank_plan.batches[b];
    for (std::int32_t w = batch.first_wait; w < batch.first_wait + batch.num_waits; ++w) {
      const BatchSlot& slot = rank_plan.waits[w];
      const auto raised = raised_by_.find({rank, slot.slot});
      if (raised == raised_by_.end() || raised->second.first != slot.rank) return false;
      if (raised->second.second >= next_[slot.rank]) return false;
      waited_for_.push_back(raised->second);
    }
    return true;
  }

  void run(std::int32_t rank, std::int32_t b) {
    const SequencePlan& rank_plan = plan(rank);
    WorkBatch batch;
    if (rank_plan.batches.empty()) {
      batch.kind = sends_ ? BatchKind::send : BatchKind::sum;
      batch.num_segments = static_cast<std::int32_t>(rank_plan.segments.size());
    } else {
      batch = rank_plan.batches[b];
    }
    for (std::int32_t s = 0; s < batch.num_segments; ++s) {
      const RowSegment& segment = rank_plan.segments[batch.first_segment + s];
      if (batch.kind == BatchKind::send || batch.kind == BatchKind::forward) {
        copy(rank, {rank, b}, segment, batch.kind == BatchKind::forward);
      } else {
        add_up(rank, {rank, b}, segment, batch.kind == BatchKind::partial);
      }
    }
  }

  /// The row of a region of a rank's window at an address; -1: there is none.
  std::int64_t row_at(std::uint64_t address, std::int32_t tensor) {
    const auto rank = static_cast<std::int32_t>(address >> address_rank_shift);
    const auto offset = static_cast<std::int64_t>(address & address_offset_mask);
    const SequencePlan& rank_plan = plan(rank);
    if (to_size(tensor) >= rank_plan.window_offsets.size()) return -1;
    const std::int64_t begin = rank_plan.window_offsets[tensor];
    const std::int64_t end = to_size(tensor) + 1 < rank_plan.window_offsets.size()
                                 ? rank_plan.window_offsets[tensor + 1]
                                 : rank_plan.window_bytes;
    const std::int64_t bytes = row_bytes(tensor);
    if (offset < begin || offset + bytes > end || (offset - begin) % bytes != 0) return -1;
    return (offset - begin) / bytes;
  }

  /// What a batch may read: what was there, or has been waited for.
  const Cell* read(const BatchName& reader, std::int32_t rank, std::int32_t tensor,
                   std::int64_t row) {
    const Region& region = windows_[rank][tensor];
    const auto cell = region.find(row);
    if (cell == region.end()) {
      find("rank ", reader.first, ", batch ", reader.second, ": reads row ", row, " of tensor ",
           tensor, " in the window of rank ", rank, ", which is not written yet");
      return nullptr;
    }
    const BatchName writer = cell->second.writer;
    if (writer.first >= 0 && !std::ranges::count(waited_for_, writer)) {
      find("rank ", reader.first, ", batch ", reader.second, ": reads row ", row, " of tensor ",
           tensor, " in the window of rank ", rank, " without waiting for batch ", writer.second,
           " of rank ", writer.first);
    }
    return &cell->second;
  }

  void write(Region& region, const char* what, std::int32_t rank, std::int32_t tensor,
             std::int64_t row, Cell cell) {
    const BatchName writer = cell.writer;
    if (!region.try_emplace(row, std::move(cell)).second)
      find("rank ", writer.first, ", batch ", writer.second, ": writes row ", row, " of tensor ",
           tensor, " in the ", what, " of rank ", rank, " a second time");
  }

  void copy(std::int32_t rank, const BatchName& batch, const RowSegment& segment, bool forwards) {
    const SequencePlan& rank_plan = plan(rank);
    for (std::int32_t c = 0; c < segment.num_destinations; ++c) {
      const std::uint64_t address = rank_plan.segment_addresses[segment.first_destination + c];
      const auto to = static_cast<std::int32_t>(address >> address_rank_shift);
      const std::int64_t first = to < rank_plan.world_size ? row_at(address, segment.tensor) : -1;
      if (first < 0) {
        find("rank ", rank, ", batch ", batch.second, ": a place is no row of tensor ",
             segment.tensor);
        continue;
      }
      for (std::int64_t k = 0; k < segment.rows; ++k) {
        Cell cell{batch, {{rank, segment.row + k}}};
        if (forwards) {
          const Cell* const from = read(batch, rank, segment.tensor, segment.row + k);
          if (from == nullptr) continue;
          cell.rows = from->rows;
        }
        write(windows_[to][segment.tensor], "window", to, segment.tensor, first + k,
              std::move(cell));
      }
    }
  }

  /// Gradients that are their sums.
  void return_rows(std::int32_t rank, const RowSegment& segment) {
    const std::uint64_t address = plan(rank).segment_addresses[segment.first_destination];
    const std::int64_t first = row_at(address, segment.tensor);
    if (first < 0 || address >> address_rank_shift != to_size(rank) ||
        segment.num_destinations != 1) {
      find("rank ", rank, ": a local segment is no run of rows of its own tensor ", segment.tensor);
      return;
    }
    for (std::int64_t k = 0; k < segment.rows; ++k) {
      write(outputs_[rank][segment.tensor], "output", rank, segment.tensor, segment.row + k,
            {{rank, -1}, {{rank, first + k}}});
    }
  }

  void add_up(std::int32_t rank, const BatchName& batch, const RowSegment& segment, bool partial) {
    const SequencePlan& rank_plan = plan(rank);
    const auto tensors = static_cast<std::int32_t>(rank_plan.tensors.size());
    for (std::int64_t k = 0; k < segment.rows; ++k) {
      Cell cell{batch, {}};
      for (std::int32_t c = 0; c < segment.num_destinations; ++c) {
        std::uint64_t address = rank_plan.segment_addresses[segment.first_destination + c];
        const bool is_sum = !rank_plan.batches.empty() && (address & address_sum_bit) != 0;
        if (is_sum) address &= ~address_sum_bit;
        const std::int32_t tensor = segment.tensor + (is_sum ? tensors : 0);
        const auto from = static_cast<std::int32_t>(address >> address_rank_shift);
        const std::int64_t first = from < rank_plan.world_size ? row_at(address, tensor) : -1;
        if (first < 0 || from / ranks_per_node_ != rank / ranks_per_node_) {
          find("rank ", rank, ", batch ", batch.second, ": an addend is no row of tensor ", tensor,
               " of a rank of its node");
          return;
        }
        const Cell* const addend = read(batch, from, tensor, first + k);
        if (addend == nullptr) continue;
        cell.rows.insert(cell.rows.end(), addend->rows.begin(), addend->rows.end());
      }
      Region& to =
          partial ? windows_[rank][segment.tensor + tensors] : outputs_[rank][segment.tensor];
      write(to, partial ? "window" : "output", rank, segment.tensor, segment.row + k,
            std::move(cell));
    }
  }

  void compare() {
    std::int32_t tensor = 0;
    for (const SequencePart& part : parts_) {
      for (std::size_t i = 0; i < part.tensors.size(); ++i, ++tensor) {
        if (row_bytes(tensor) > 0) compare(*part.metadata, tensor);
      }
    }
  }

  void compare(const SparseMetadata& metadata, std::int32_t tensor) {
    std::vector<std::map<std::int64_t, std::vector<RowName>>> expected(plans_.size());
    for (std::int32_t home = 0; home < metadata.world_size; ++home) {
      std::int64_t row = 0;
      for (auto j = metadata.rank_offsets[home]; j < metadata.rank_offsets[home + 1]; ++j) {
        for (std::int64_t k = 0; k < metadata.seq_len[j]; ++k, ++row) {
          if (!sends_) expected[home][row] = {};
          for (auto c = metadata.destination_begin(j); c < metadata.destination_end(j); ++c) {
            const RowName copy{metadata.dst_rank[c], metadata.dst_offset[c] + k};
            if (sends_) {
              expected[copy.first][copy.second] = {{home, row}};
            } else {
              expected[home][row].push_back(copy);
            }
          }
        }
      }
    }
    for (std::int32_t r = 0; r < std::ssize(plans_); ++r) compare(expected[r], tensor, r);
  }

  void compare(const std::map<std::int64_t, std::vector<RowName>>& expected, std::int32_t tensor,
               std::int32_t rank) {
    Region& got = (sends_ ? windows_ : outputs_)[rank][tensor];
    for (const auto& [row, rows] : expected) {
      const auto cell = got.find(row);
      std::vector<RowName> sorted = cell == got.end() ? std::vector<RowName>{} : cell->second.rows;
      std::ranges::sort(sorted);
      std::vector<RowName> wanted = rows;
      std::ranges::sort(wanted);
      if (cell == got.end() || sorted != wanted)
        find("rank ", rank, ", tensor ", tensor, ": row ", row, " is made of ", sorted.size(),
             " rows, expected ", wanted.size(), cell == got.end() ? " (it is not written)" : "");
    }
    const std::int64_t rows = sends_ ? plan(rank).window_rows[tensor] : plan(rank).own_rows[tensor];
    for (const auto& [row, cell] : got) {
      if (row < rows && !expected.contains(row))
        find("rank ", rank, ", tensor ", tensor, ": row ", row, " is written, expected nothing");
    }
  }

  std::span<const SequencePlan> plans_;
  std::span<const SequencePart> parts_;
  const std::int64_t ranks_per_node_;
  const std::size_t max_findings_;
  const bool sends_;
  std::vector<std::string> findings_;
  std::vector<std::map<std::int32_t, Region>> windows_;                   ///< [W] by tensor
  std::vector<std::map<std::int32_t, Region>> outputs_;                   ///< [W]
  std::vector<std::int32_t> next_;                                        ///< [W] batch
  std::map<std::pair<std::int32_t, std::int32_t>, BatchName> raised_by_;  ///< rank, slot
  std::vector<BatchName> waited_for_;  ///< by the batch that runs
};

}  // namespace

std::vector<std::string> check_sequence_plans(std::span<const SequencePlan> plans,
                                              std::span<const SequencePart> parts,
                                              std::int32_t ranks_per_node,
                                              std::size_t max_findings) {
  require(!plans.empty(), "check_sequence_plans: plans are empty");
  require(ranks_per_node >= 0, "check_sequence_plans: ranks_per_node = ", ranks_per_node,
          ", expected >= 0");
  return PlanChecker(plans, parts, ranks_per_node, max_findings).check();
}

}  // namespace waybill::test
