#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "rule.h"

// How copies of experts cross nodes whose memory is not mapped. The host of each rank knows all
// transfers. An expert is a stream of bytes, its parts one after the other. A round moves the same
// range of the streams of all experts that cross. Weights leave from a stage at their home, and
// gradients land in one: it has a place for each expert that a home sends, or for each copy whose
// gradient comes to it. tests/experts runs this without a GPU.

namespace waybill::cuda {

/// A part of an expert, of weights or of gradients, in its stream.
struct StreamPart {
  std::int64_t begin = 0;      ///< first byte in the stream, as next_in_stream() says
  std::int64_t bytes = 0;      ///< those of an expert
  std::int64_t copies_at = 0;  ///< bytes from the window's first to [spare, bytes]
};

/// Two halves, which rounds use in turn: what a round brings is read while the next one comes.
struct CopyStage {
  std::int64_t first = 0;  ///< byte of the window
  std::int64_t half_bytes = 0;
};

/// Bytes of a home expert's part on their way to the stage.
struct StagedRange {
  std::int32_t home = 0;  ///< among the rank's home experts
  std::int32_t part = 0;
  std::int64_t offset = 0;  ///< byte of the part
  std::int64_t bytes = 0;
  std::int64_t to = 0;  ///< byte of the window
};

/// Bytes on their way from a rank's window to that of a rank on another node.
struct WindowMove {
  std::int32_t source = 0;
  std::int32_t target = 0;
  std::int64_t from = 0;
  std::int64_t to = 0;
  std::int64_t bytes = 0;
};

class CopyRounds {
 public:
  /// @param sums gradients go home; else weights go to the first copy on each other node
  CopyRounds(const CopyTable& table, std::vector<StreamPart> parts, bool sums,
             const CopyStage& stage)
      : homes_(table.homes),
        spare_(table.spare),
        parts_(std::move(parts)),
        sums_(sums),
        stage_(stage) {
    const std::int32_t most = place_copies(table);
    if (most == 0 || parts_.empty()) return;
    range_bytes_ = stage.half_bytes / most / stream_alignment * stream_alignment;
    const std::int64_t total = parts_.back().begin + parts_.back().bytes;
    if (range_bytes_ > 0) num_rounds_ = (total + range_bytes_ - 1) / range_bytes_;
  }

  [[nodiscard]] std::int64_t num_rounds() const { return num_rounds_; }
  /// Bytes of a place in the stage, 0: nothing crosses, or the stage is too small.
  [[nodiscard]] std::int64_t range_bytes() const { return range_bytes_; }
  [[nodiscard]] bool any() const { return !crossing_.empty(); }
  /// The half of the stage that a round uses.
  [[nodiscard]] std::int64_t half(std::int64_t round) const {
    return stage_.first + round % 2 * stage_.half_bytes;
  }

  /// Weights that a rank brings to its stage before a round.
  [[nodiscard]] std::vector<StagedRange> staged(std::int32_t rank, std::int64_t round) const {
    std::vector<StagedRange> ranges;
    std::int32_t next = 0;  // places are used in order, by several copies each
    for (const Crossing& one : crossing_) {
      if (sums_ || one.expert / homes_ != rank || one.place != next) continue;
      ++next;
      for (const Piece& piece : pieces(round)) {
        ranges.push_back({one.expert % homes_, piece.part, piece.offset, piece.bytes,
                          in_stage(one, round, piece)});
      }
    }
    return ranges;
  }

  /// The moves that a rank makes or receives in a round. Between two ranks both have the same
  /// order.
  [[nodiscard]] std::vector<WindowMove> moves(std::int32_t rank, std::int64_t round) const {
    std::vector<WindowMove> moves;
    for (const Crossing& one : crossing_) {
      const std::int32_t home = one.expert / homes_;
      const std::int32_t holder = one.copy / spare_;
      if (home != rank && holder != rank) continue;
      for (const Piece& piece : pieces(round)) {
        const StreamPart& part = parts_[piece.part];
        const std::int64_t store = part.copies_at + one.copy % spare_ * part.bytes + piece.offset;
        const std::int64_t stage = in_stage(one, round, piece);
        moves.push_back(sums_ ? WindowMove{holder, home, store, stage, piece.bytes}
                              : WindowMove{home, holder, stage, store, piece.bytes});
      }
    }
    return moves;
  }

 private:
  /// A copy whose expert crosses, and its place in home's stage.
  struct Crossing {
    std::int32_t expert;
    std::int32_t copy;
    std::int32_t place;
  };
  /// A part's bytes in the range of a round.
  struct Piece {
    std::int32_t part;
    std::int64_t offset;
    std::int64_t bytes;
  };

  /// @return the places of the stage that has most
  std::int32_t place_copies(const CopyTable& table) {
    std::vector<std::int32_t> places(table.num_ranks);
    std::vector<std::int32_t> of_expert(std::int64_t{table.num_ranks} * homes_, -1);
    for (std::int32_t copy = 0; copy < table.size(); ++copy) {
      if (!crosses_nodes(table, copy)) continue;
      const std::int32_t expert = table.experts[copy];
      std::int32_t& used = places[expert / homes_];
      if (sums_) {
        crossing_.push_back({expert, copy, used++});
      } else if (first_of_node(table, copy) == copy) {
        if (of_expert[expert] < 0) of_expert[expert] = used++;
        crossing_.push_back({expert, copy, of_expert[expert]});
      }
    }
    return places.empty() ? 0 : *std::ranges::max_element(places);
  }

  [[nodiscard]] std::vector<Piece> pieces(std::int64_t round) const {
    std::vector<Piece> found;
    const std::int64_t first = round * range_bytes_;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const std::int64_t begin = std::max(first, parts_[i].begin);
      const std::int64_t end = std::min(first + range_bytes_, parts_[i].begin + parts_[i].bytes);
      if (begin < end)
        found.push_back({static_cast<std::int32_t>(i), begin - parts_[i].begin, end - begin});
    }
    return found;
  }

  [[nodiscard]] std::int64_t in_stage(const Crossing& one, std::int64_t round,
                                      const Piece& piece) const {
    return half(round) + one.place * range_bytes_ + parts_[piece.part].begin + piece.offset -
           round * range_bytes_;
  }

  std::int32_t homes_;
  std::int32_t spare_;
  std::vector<StreamPart> parts_;
  bool sums_;
  CopyStage stage_;
  std::vector<Crossing> crossing_;  ///< in the order of copies
  std::int64_t range_bytes_ = 0;
  std::int64_t num_rounds_ = 0;
};

}  // namespace waybill::cuda
