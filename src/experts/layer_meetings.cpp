#include "layer_meetings.h"

#include <algorithm>
#include <utility>

#include "waybill/core/error.h"

namespace waybill::detail {

namespace {

// An answer: the number of the combine above, and the answers for it and the ones before, as the
// host of a GPU may be combines ahead of the one that asks.
constexpr int number_shift = 32;
constexpr std::uint64_t most_ahead = 31;

}  // namespace

LayerMeetings::LayerMeetings(Transport& transport, const EPConfig& config)
    : transport_(transport), config_(config) {
  signals_ = transport.allocate_signals(std::int64_t{3} * config.world_size, "meetings of experts");
}

LayerMeetings::~LayerMeetings() { transport_.defer_release(std::move(signals_.memory)); }

void LayerMeetings::barrier(ExpertExecutor& executor, Stream stream, bool intra_node_only) {
  ExpertBarrier call{.signals = &signals_, .stream = stream};
  if (intra_node_only || config_.is_intra_node()) {
    call.count = config_.local_world_size;
    call.first = config_.rank / call.count * call.count;
    call.epoch = ++node_barriers_;
  } else {
    call.first_slot = config_.world_size;
    call.count = config_.world_size;
    call.epoch = ++world_barriers_;
  }
  executor.barrier(call);
}

bool LayerMeetings::needs_gradients(std::span<const std::int32_t> counts, std::uint64_t number,
                                    bool mine, bool asks) {
  if (std::ranges::find(counts, 0) == counts.end()) return mine;
  const auto with_rows = std::ranges::find_if(counts, [](std::int32_t rows) { return rows > 0; });
  const bool nobody = with_rows == counts.end();
  const auto teller = nobody ? 0 : static_cast<std::int32_t>(with_rows - counts.begin());
  if (!reaches_all()) {
    const bool answer = exchange(config_.rank == teller && mine);
    return counts[config_.rank] > 0 ? mine : asks && answer;
  }
  if (config_.rank == teller) {
    answer(counts, number, mine);
    return mine;
  }
  if (counts[config_.rank] > 0) return mine;
  return asks && ask(teller, number);
}

void LayerMeetings::answer(std::span<const std::int32_t> counts, std::uint64_t number, bool mine) {
  const std::uint64_t since = number - answered_;
  answers_ = since > most_ahead ? 0 : answers_ << since;
  answers_ = (answers_ & ~1U) | (mine ? 1U : 0U);  // the same number again: it was refused
  answered_ = number;
  const SignalSlot slot{&signals_, std::int64_t{2} * config_.world_size + config_.rank};
  for (std::int32_t r = 0; r < config_.world_size; ++r) {
    if (r == config_.rank || counts[r] > 0) continue;
    transport_.signal(Rank{r}, slot, number << number_shift | answers_);
  }
}

bool LayerMeetings::ask(std::int32_t teller, std::uint64_t number) {
  const SignalSlot slot{&signals_, std::int64_t{2} * config_.world_size + teller};
  const std::uint64_t seen = transport_.wait(slot, number << number_shift, Rank{teller}, "combine");
  const std::uint64_t ahead = (seen >> number_shift) - number;
  if (ahead > most_ahead) {
    throw Unsupported(
        concat("combine: rank ", teller, " is ", ahead, " combines ahead, expected at most ",
               most_ahead, ", as this one received no rows and asks whether they need gradients"));
  }
  return (seen >> ahead & 1U) != 0;
}

/// Whether a signal gets to every rank; the same on all of them.
bool LayerMeetings::reaches_all() const {
  return std::ranges::none_of(signals_.memory, [](const auto& part) { return part == nullptr; });
}

/// Whether any rank says so: an exchange of the host between all.
bool LayerMeetings::exchange(bool mine) {
  const Setting says[] = {{"needs_gradients", mine ? "true" : "false"}};
  try {
    transport_.require_same("combine", says);
    return mine;
  } catch (const InvalidArgument&) {  // they differ
    return true;
  }
}

void LayerMeetings::release() {
  if (signals_.local != nullptr) transport_.release(signals_);
}

}  // namespace waybill::detail
