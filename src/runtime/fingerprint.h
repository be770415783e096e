#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "waybill/core/topology.h"

namespace waybill {

class Transport;
struct SignalPad;

/// The operation of one collective call.
enum class CollectiveCall : std::uint8_t {
  none,
  dispatch,              ///< SequenceDispatcher::dispatch
  kv_gradient,           ///< SequenceDispatcher::kv_gradient
  expert_dispatch,       ///< with counting
  expert_known_routing,  ///< a dispatch by the layout of an earlier one
  combine,
  realign,           ///< an empty call, before or after a graph with an odd number of calls
  expert_weights,    ///< CopyExchange::fetch_weights
  expert_gradients,  ///< CopyExchange::add_gradients
  expert_versions,   ///< CopyExchange::exchange_versions
};

/// Bits of CallFingerprint::flags.
enum class CallFlag : std::uint8_t {
  weights = 1,                  ///< weights are given
  scatter_indices = 2,          ///< full_scatter_indices are given
  weighted = 4,                 ///< combine multiplies by the weights
  local_combine = 8,            ///< combine sums on the experts' rank first
  needs_gradients = 16,         ///< the caller will run the backward calls
  weights_need_gradients = 32,  ///< those of the weights, too
  backward = 64,                ///< the call is part of a backward pass
};

/// One collective call as a rank means it; ranks compare it where they wait for each other. Choices
/// of a single rank (num_sms, its number of tokens, biases) are not in it.
struct CallFingerprint {
  CollectiveCall call = CollectiveCall::none;
  std::uint8_t flags = 0;    ///< bits of CallFlag
  std::uint32_t origin = 0;  ///< number of the dispatch that the call belongs to; 0: none
  /// Hash of the plan: lines of all ranks, relay, batches. Of a dispatch of experts that counts:
  /// above the tag the number of the dispatch whose copies are `present`; 0: none.
  std::uint64_t plan = 0;
  std::uint64_t formats = 0;  ///< hash of dtype, hidden and parts
  std::uint64_t options = 0;  ///< hash of what else must be the same
};

inline constexpr std::size_t fingerprint_words = 4;
/// The value of a word lies above the tag: the lower bits of the call's number, by which a word
/// says whether it is of this call.
inline constexpr int fingerprint_tag_bits = 16;
inline constexpr std::uint64_t fingerprint_tag_mask =
    (std::uint64_t{1} << fingerprint_tag_bits) - 1;

using FingerprintWords = std::array<std::uint64_t, fingerprint_words>;

/// The words without tags: 48 bits of each hash.
[[nodiscard]] FingerprintWords pack_fingerprint(const CallFingerprint& fingerprint);

/// A word of a call as it is sent.
[[nodiscard]] constexpr std::uint64_t tagged_word(std::uint64_t word, std::uint64_t epoch) {
  return (word & ~fingerprint_tag_mask) | (epoch & fingerprint_tag_mask);
}

/// Whether a word is of this call, or of the one two calls before.
[[nodiscard]] constexpr bool is_of_call(std::uint64_t word, std::uint64_t epoch) {
  return (word & fingerprint_tag_mask) == (epoch & fingerprint_tag_mask);
}

/// Where the words of a rank stand in a pad that has `signals` slots for other things: `parity` of
/// the call's number. They begin at multiples of 32 bytes.
[[nodiscard]] constexpr std::int64_t first_fingerprint_slot(std::int64_t signals) {
  constexpr std::int64_t words = fingerprint_words;
  return (signals + words - 1) / words * words;
}
[[nodiscard]] constexpr std::int64_t fingerprint_slot(std::int64_t signals, std::int32_t world_size,
                                                      std::uint64_t epoch, std::int32_t rank) {
  constexpr std::int64_t words = fingerprint_words;
  return first_fingerprint_slot(signals) +
         (static_cast<std::int64_t>(epoch % 2) * world_size + rank) * words;
}
/// Slots of a pad with room for the words of all ranks.
[[nodiscard]] constexpr std::int64_t with_fingerprints(std::int64_t signals,
                                                       std::int32_t world_size) {
  return fingerprint_slot(signals, world_size, 0, 2 * world_size);
}

/// Whether two ranks mean the same call; tags do not count.
[[nodiscard]] bool same_call(const FingerprintWords& mine, const FingerprintWords& theirs);

/// The text of an error that says where two ranks differ: "dispatch: ranks disagree in call 7: rank
/// 0 calls dispatch, rank 2 kv_gradient", "...: plan differs between rank 0 and rank 2 (0x1f..,
/// 0x2e..), expected the same on all ranks".
[[nodiscard]] std::string describe_disagreement(std::string_view operation, std::uint64_t epoch,
                                                Rank me, const FingerprintWords& mine, Rank peer,
                                                const FingerprintWords& theirs);

namespace detail {

/// Compares one call of ranks in host memory, of a dispatcher or of a layer: each rank sends its
/// words first, and compares before it believes what others brought.
class FingerprintExchange {
 public:
  /// @param pad with_fingerprints(num_signals, W) counters: the words lie after the signals
  /// @param operation in errors
  FingerprintExchange(Transport& transport, const SignalPad& pad, std::int64_t num_signals,
                      std::string_view operation, std::uint64_t epoch,
                      const CallFingerprint& fingerprint);

  /// To all other ranks, before whatever else they are told.
  void send() const;

  /// Waits until slot `idx` of this rank is at the call's number. @throws as Transport::wait;
  /// Disagreement instead of Timeout when a rank has said that it means another call
  void wait_for(std::int64_t idx, Rank peer) const;

  /// Enters the call: sends the words, raises slot `first_slot` + rank at all other ranks, and
  /// waits until all have come and mean the same. @throws as wait_for
  void enter(std::int64_t first_slot) const;

  /// With a rank that has come to this call. @throws Disagreement
  void compare(Rank peer) const;

  /// With all ranks that have sent their words of this call so far, beginning with `first`.
  /// @throws Disagreement
  void compare_all(Rank first) const;

 private:
  /// @return whether the peer has sent its words of this call. @throws Disagreement
  bool compare_if_sent(Rank peer) const;
  [[nodiscard]] std::int64_t slot_of(Rank rank) const;

  Transport& transport_;
  const SignalPad& pad_;
  std::int64_t num_signals_;
  std::string_view operation_;
  std::uint64_t epoch_;
  FingerprintWords mine_;
};

}  // namespace detail
}  // namespace waybill
