#include "runtime/fingerprint_exchange.h"

#include <atomic>

#include "waybill/core/error.h"

namespace waybill::detail {

FingerprintExchange::FingerprintExchange(Transport& transport, const SignalPad& pad,
                                         std::int64_t num_signals, const ComparedCall& call)
    : transport_(transport),
      pad_(pad),
      num_signals_(num_signals),
      call_(call),
      mine_(pack_fingerprint(call.fingerprint)) {}

std::int64_t FingerprintExchange::slot_of(Rank rank) const {
  const std::int32_t world = transport_.topology().world_size;
  return fingerprint_slot(num_signals_, world, call_.epoch, to_int(rank));
}

void FingerprintExchange::send() const {
  const std::int32_t world = transport_.topology().world_size;
  const std::int32_t me = to_int(transport_.rank());
  for (std::int32_t k = 1; k < world; ++k) {
    std::int64_t idx = slot_of(transport_.rank());
    for (const std::uint64_t word : mine_) {
      transport_.signal(Rank{(me + k) % world}, {&pad_, idx++}, tagged_word(word, call_.epoch));
    }
  }
}

bool FingerprintExchange::compare_if_sent(Rank peer) const {
  FingerprintWords theirs{};
  std::int64_t idx = slot_of(peer);
  for (std::uint64_t& word : theirs) {
    word = std::atomic_ref(pad_.local[idx++]).load(std::memory_order_acquire);
    if (!is_of_call(word, call_.epoch)) return false;
  }
  if (same_call(mine_, theirs)) return true;
  throw Disagreement(
      describe_disagreement(call_.operation, call_.epoch, transport_.rank(), mine_, peer, theirs));
}

void FingerprintExchange::compare(Rank peer) const {
  if (compare_if_sent(peer)) return;
  throw InternalError(concat(call_.operation, ": rank ", peer, " came to call ", call_.epoch,
                             " without saying which call it makes"));
}

void FingerprintExchange::compare_all(Rank first) const {
  const std::int32_t world = transport_.topology().world_size;
  for (std::int32_t k = 0; k < world; ++k) {
    const Rank peer{(to_int(first) + k) % world};
    if (peer != transport_.rank()) (void)compare_if_sent(peer);
  }
}

}  // namespace waybill::detail
