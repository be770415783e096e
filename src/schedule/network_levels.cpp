#include "network_levels.h"

#include <algorithm>

#include "core/to_size.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int32_t unknown = -1;

/// Who raises a slot.
struct Raiser {
  std::int32_t rank = -1;  ///< -1: nobody
  std::int32_t idx = 0;    ///< batch or step of that rank
  bool is_step = false;
};

class Levels {
 public:
  explicit Levels(std::span<const SequencePlan* const> plans)
      : plans_(plans),
        batches_(plans.size()),
        steps_(plans.size()),
        pads_(plans.size()),
        ready_(plans.size()) {
    for (std::size_t r = 0; r < plans.size(); ++r) {
      pads_[r].resize(plans[r]->num_slots * plans.size());
      ready_[r].resize(plans[r]->network.num_ready);
    }
    for (std::size_t r = 0; r < plans.size(); ++r) note_raisers(r);
  }

  /// Any order in which everybody goes on who can finds them all.
  std::vector<std::vector<std::int32_t>> find() {
    for (bool moves = true; moves;) {
      moves = false;
      for (std::size_t r = 0; r < plans_.size(); ++r) {
        while (next_batch(r)) moves = true;
        while (next_step(r)) moves = true;
      }
    }
    for (std::size_t r = 0; r < plans_.size(); ++r) {
      if (batches_[r].size() < plans_[r]->batches.size() ||
          steps_[r].size() < plans_[r]->network.steps.size()) {
        throw InternalError(concat("network_levels: rank ", r, " waits for itself"));
      }
    }
    return std::move(steps_);
  }

 private:
  void note_raisers(std::size_t r) {
    const SequencePlan& plan = *plans_[r];
    const auto note = [&](const BatchSlot& slot, std::size_t idx, bool is_step) {
      auto& slots = slot.rank == plan.world_size ? ready_[r] : pads_[slot.rank];
      slots.at(slot.slot) = {static_cast<std::int32_t>(r), static_cast<std::int32_t>(idx), is_step};
    };
    for (std::size_t b = 0; b < plan.batches.size(); ++b) {
      const WorkBatch& batch = plan.batches[b];
      for (std::int32_t s = 0; s < batch.num_signals; ++s)
        note(plan.signals[batch.first_signal + s], b, false);
    }
    for (std::size_t i = 0; i < plan.network.steps.size(); ++i) {
      const NetworkStep& step = plan.network.steps[i];
      for (std::int32_t s = 0; s < step.num_signals; ++s)
        note(plan.network.signals[step.first_signal + s], i, true);
    }
  }

  /// The level at which a wait ends; unknown: so far.
  [[nodiscard]] std::int32_t end_of(std::size_t r, const BatchSlot& slot) const {
    const auto& slots = slot.rank == plans_[r]->world_size ? ready_[r] : pads_[r];
    const Raiser& raiser = slots.at(slot.slot);
    if (raiser.rank < 0) {
      throw InternalError(concat("network_levels: nobody raises slot ", slot.slot, " of rank ", r));
    }
    const auto& known = (raiser.is_step ? steps_ : batches_)[raiser.rank];
    if (to_size(raiser.idx) >= known.size()) return unknown;
    return known[raiser.idx] + (raiser.is_step ? 1 : 0);
  }

  /// The highest of `level` and the ends of the waits; unknown: so far.
  [[nodiscard]] std::int32_t end_of(std::size_t r, std::span<const BatchSlot> waits,
                                    std::int32_t level) const {
    for (const BatchSlot& slot : waits) {
      const std::int32_t end = end_of(r, slot);
      if (end == unknown) return unknown;
      level = std::max(level, end);
    }
    return level;
  }

  bool next_batch(std::size_t r) {
    const SequencePlan& plan = *plans_[r];
    if (batches_[r].size() == plan.batches.size()) return false;
    const WorkBatch& batch = plan.batches[batches_[r].size()];
    const auto waits = std::span(plan.waits).subspan(batch.first_wait, batch.num_waits);
    const std::int32_t level = end_of(r, waits, batches_[r].empty() ? 0 : batches_[r].back());
    if (level == unknown) return false;
    batches_[r].push_back(level);
    return true;
  }

  bool next_step(std::size_t r) {
    const NetworkProgram& network = plans_[r]->network;
    if (steps_[r].size() == network.steps.size()) return false;
    const NetworkStep& step = network.steps[steps_[r].size()];
    const auto waits = std::span(network.waits).subspan(step.first_wait, step.num_waits);
    const std::int32_t level = end_of(r, waits, 0);
    if (level == unknown) return false;
    steps_[r].push_back(level);
    return true;
  }

  std::span<const SequencePlan* const> plans_;
  std::vector<std::vector<std::int32_t>> batches_;  ///< [W] levels of the first ones
  std::vector<std::vector<std::int32_t>> steps_;
  std::vector<std::vector<Raiser>> pads_;   ///< [W][slots]
  std::vector<std::vector<Raiser>> ready_;  ///< [W][num_ready]
};

}  // namespace

std::vector<std::vector<std::int32_t>> network_levels(std::span<const SequencePlan* const> plans) {
  return Levels(plans).find();
}

}  // namespace waybill::detail
