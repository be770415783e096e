#include "runtime/fingerprint.h"

#include <atomic>
#include <iterator>
#include <sstream>
#include <utility>

#include "transport/transport.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

constexpr std::uint64_t high_48(std::uint64_t hash) { return hash & ~fingerprint_tag_mask; }

// Word 0, above the tag: operation, flags, origin.
constexpr int call_shift = fingerprint_tag_bits;
constexpr int flags_shift = call_shift + 8;
constexpr int origin_shift = flags_shift + 8;

CollectiveCall call_of(std::uint64_t word) {
  return static_cast<CollectiveCall>(word >> call_shift & 0xFF);
}
std::uint8_t flags_of(std::uint64_t word) {
  return static_cast<std::uint8_t>(word >> flags_shift & 0xFF);
}
std::uint32_t origin_of(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> origin_shift);
}

/// In the order of CollectiveCall; the first stands for values that it does not have.
constexpr const char* call_names[] = {"an unknown call",
                                      "dispatch",
                                      "kv_gradient",
                                      "dispatch",
                                      "dispatch with the layout of an earlier one",
                                      "combine",
                                      "a call after a graph with an odd number of calls",
                                      "fetch_weights",
                                      "add_gradients",
                                      "exchange_versions"};

const char* name_of(CollectiveCall call) {
  const auto idx = static_cast<std::size_t>(call);
  return call_names[idx < std::size(call_names) ? idx : 0];
}

constexpr std::pair<CallFlag, const char*> flag_names[] = {
    {CallFlag::weights, "weights"},
    {CallFlag::scatter_indices, "full_scatter_indices"},
    {CallFlag::weighted, "weighted"},
    {CallFlag::local_combine, "local_combine"},
    {CallFlag::needs_gradients, "needs_gradients"},
    {CallFlag::weights_need_gradients, "weights_need_gradients"},
    {CallFlag::backward, "backward"}};

std::string name_of_present(std::uint64_t word) {
  const std::uint64_t number = word >> fingerprint_tag_bits;
  return number == 0 ? "none" : concat("that of dispatch ", number);
}

/// The first flag that differs.
std::string describe_flags(std::uint8_t mine, Rank me, std::uint8_t theirs, Rank peer) {
  for (const auto& [flag, name] : flag_names) {
    const auto bit = static_cast<std::uint8_t>(flag);
    if (((mine ^ theirs) & bit) == 0) continue;
    const bool here = (mine & bit) != 0;
    return concat(name, " = ", here ? "true" : "false", " on rank ", me, ", ",
                  here ? "false" : "true", " on rank ", peer);
  }
  return concat("flags ", int{mine}, " on rank ", me, ", ", int{theirs}, " on rank ", peer);
}

std::string describe_hash(const char* what, std::uint64_t mine, Rank me, std::uint64_t theirs,
                          Rank peer) {
  std::ostringstream text;
  text << what << " differs: hash " << std::hex << (mine >> fingerprint_tag_bits) << std::dec
       << " on rank " << me << ", " << std::hex << (theirs >> fingerprint_tag_bits) << std::dec
       << " on rank " << peer;
  return text.str();
}

std::string describe_first(Rank me, const FingerprintWords& mine, Rank peer,
                           const FingerprintWords& theirs) {
  if (call_of(mine[0]) != call_of(theirs[0])) {
    return concat("rank ", me, " calls ", name_of(call_of(mine[0])), ", rank ", peer, " ",
                  name_of(call_of(theirs[0])));
  }
  if (flags_of(mine[0]) != flags_of(theirs[0])) {
    return describe_flags(flags_of(mine[0]), me, flags_of(theirs[0]), peer);
  }
  if (origin_of(mine[0]) != origin_of(theirs[0])) {
    return concat("the call belongs to dispatch ", origin_of(mine[0]), " on rank ", me,
                  ", to dispatch ", origin_of(theirs[0]), " on rank ", peer);
  }
  constexpr const char* names[] = {"", "the plan", "the tensors' format (dtype, hidden, parts)",
                                   "an option"};
  constexpr const char* reasons[] = {
      "", ": they planned other lengths, or call their plans in another order", ""};
  for (std::size_t w = 2; w > 0; --w) {  // other formats make another plan
    if (high_48(mine[w]) != high_48(theirs[w])) {
      if (w == 1 && call_of(mine[0]) == CollectiveCall::expert_dispatch) {
        return concat("present is ", name_of_present(mine[1]), " on rank ", me, ", ",
                      name_of_present(theirs[1]), " on rank ", peer);
      }
      return concat(describe_hash(names[w], mine[w], me, theirs[w], peer), reasons[w]);
    }
  }
  return describe_hash(names[3], mine[3], me, theirs[3], peer);
}

}  // namespace

FingerprintWords pack_fingerprint(const CallFingerprint& fingerprint) {
  const auto call = static_cast<std::uint64_t>(fingerprint.call);
  return {call << call_shift | std::uint64_t{fingerprint.flags} << flags_shift |
              std::uint64_t{fingerprint.origin} << origin_shift,
          high_48(fingerprint.plan), high_48(fingerprint.formats), high_48(fingerprint.options)};
}

bool same_call(const FingerprintWords& mine, const FingerprintWords& theirs) {
  for (std::size_t w = 0; w < fingerprint_words; ++w) {
    if (high_48(mine[w]) != high_48(theirs[w])) return false;
  }
  return true;
}

std::string describe_disagreement(std::string_view operation, std::uint64_t epoch, Rank me,
                                  const FingerprintWords& mine, Rank peer,
                                  const FingerprintWords& theirs) {
  return concat(operation, ": ranks disagree in call ", epoch, ": ",
                describe_first(me, mine, peer, theirs), "; expected the same on all ranks");
}

namespace detail {

FingerprintExchange::FingerprintExchange(Transport& transport, const SignalPad& pad,
                                         std::int64_t num_signals, std::string_view operation,
                                         std::uint64_t epoch, const CallFingerprint& fingerprint)
    : transport_(transport),
      pad_(pad),
      num_signals_(num_signals),
      operation_(operation),
      epoch_(epoch),
      mine_(pack_fingerprint(fingerprint)) {}

std::int64_t FingerprintExchange::slot_of(Rank rank) const {
  const std::int32_t world = transport_.topology().world_size;
  return fingerprint_slot(num_signals_, world, epoch_, to_int(rank));
}

void FingerprintExchange::send() const {
  const std::int32_t world = transport_.topology().world_size;
  const std::int32_t me = to_int(transport_.rank());
  for (std::int32_t k = 1; k < world; ++k) {
    std::int64_t idx = slot_of(transport_.rank());
    for (const std::uint64_t word : mine_) {
      transport_.signal(Rank{(me + k) % world}, {&pad_, idx++}, tagged_word(word, epoch_));
    }
  }
}

bool FingerprintExchange::compare_if_sent(Rank peer) const {
  FingerprintWords theirs{};
  std::int64_t idx = slot_of(peer);
  for (std::uint64_t& word : theirs) {
    word = std::atomic_ref(pad_.local[idx++]).load(std::memory_order_acquire);
    if (!is_of_call(word, epoch_)) return false;
  }
  if (same_call(mine_, theirs)) return true;
  throw Disagreement(
      describe_disagreement(operation_, epoch_, transport_.rank(), mine_, peer, theirs));
}

void FingerprintExchange::wait_for(std::int64_t idx, Rank peer) const {
  try {
    (void)transport_.wait({&pad_, idx}, epoch_, peer, operation_);
  } catch (const Timeout&) {
    compare_all(peer);
    throw;
  }
}

void FingerprintExchange::enter(std::int64_t first_slot) const {
  const std::int32_t world = transport_.topology().world_size;
  const std::int32_t me = to_int(transport_.rank());
  send();
  for (std::int32_t k = 1; k < world; ++k) {
    transport_.signal(Rank{(me + k) % world}, {&pad_, first_slot + me}, epoch_);
  }
  for (std::int32_t k = 1; k < world; ++k) {
    const Rank peer{(me + k) % world};
    wait_for(first_slot + to_int(peer), peer);
    compare(peer);
  }
}

void FingerprintExchange::compare(Rank peer) const {
  if (compare_if_sent(peer)) return;
  throw InternalError(concat(operation_, ": rank ", peer, " came to call ", epoch_,
                             " without saying which call it makes"));
}

void FingerprintExchange::compare_all(Rank first) const {
  const std::int32_t world = transport_.topology().world_size;
  for (std::int32_t k = 0; k < world; ++k) {
    const Rank peer{(to_int(first) + k) % world};
    if (peer != transport_.rank()) (void)compare_if_sent(peer);
  }
}

}  // namespace detail
}  // namespace waybill
