#include "stall_detector.h"

#include <atomic>
#include <string>

#include "waybill/core/error.h"
#include "waybill/core/wait.h"

namespace waybill::detail {
namespace {

// A note: the epoch above, then a count, as notes only grow, and the rank waited for + 1; 0: none.
constexpr int epoch_shift = 32;
constexpr int count_shift = 21;
constexpr std::uint64_t rank_mask = (std::uint64_t{1} << count_shift) - 1;
constexpr std::uint64_t count_mask = (std::uint64_t{1} << (epoch_shift - count_shift)) - 1;

std::uint64_t read(const SignalPad& pad, std::int64_t idx) {
  // Pairs with the release of the signal: the rows before it are visible.
  return std::atomic_ref(pad.local[idx]).load(std::memory_order_acquire);
}

}  // namespace

void StallDetector::note(std::int32_t peer) {
  if (num_notes_ == count_mask) return;
  const std::uint64_t value = call_.epoch << epoch_shift | ++num_notes_ << count_shift |
                              static_cast<std::uint64_t>(peer + 1);
  const std::int32_t me = to_int(transport_.rank());
  for (std::int32_t r = 0; r < transport_.topology().world_size; ++r)
    transport_.signal(Rank{r}, {call_.slots, me}, value);
}

std::int32_t StallDetector::silent_rank(std::int32_t peer) const {
  for (std::int32_t steps = 0; steps < transport_.topology().world_size; ++steps) {
    // Perhaps of the call before: it stands until that wait is over.
    const std::uint64_t note = read(*call_.slots, peer);
    const auto next = static_cast<std::int32_t>(note & rank_mask) - 1;
    if (next < 0 || next == to_int(transport_.rank())) break;
    peer = next;
  }
  return peer;
}

void StallDetector::wait(const SignalPad& pad, std::int64_t idx, Rank peer) {
  std::uint64_t seen = read(pad, idx);
  if (seen >= call_.epoch) return;
  PollingWait wait(transport_.timeout_s(), {.check =
                                                [&] {
                                                  exchange_.compare_all(peer);
                                                  transport_.check_peers(call_.operation, peer);
                                                },
                                            .gives_turn = true,
                                            .num_waiters = transport_.topology().world_size});
  bool noted = false;
  while ((seen = read(pad, idx)) < call_.epoch) {
    if (!wait.pause()) {
      exchange_.compare_all(peer);
      const Rank silent{silent_rank(to_int(peer))};
      const Topology& topology = transport_.topology();
      transport_.note_timeout();
      throw Timeout({.operation = std::string(call_.operation),
                     .rank = to_int(transport_.rank()),
                     .peer = to_int(silent),
                     .wanted = call_.epoch,
                     .seen = seen,
                     .seconds = wait.waited_s(),
                     .peer_node = to_int(topology.node(silent)),
                     .peer_local = to_int(topology.local_rank(silent))});
    }
    if (!noted && wait.waited_s() > transport_.timeout_s() / 2) {
      note(to_int(peer));
      noted = true;
    }
  }
  if (noted) note(-1);
}

}  // namespace waybill::detail
