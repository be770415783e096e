#include <algorithm>
#include <cstring>
#include <utility>

#include "core/hash.h"
#include "core/number.h"
#include "experts/expert_executor.h"
#include "moe/gradient_sum.h"
#include "runtime/abort_state.h"
#include "runtime/fingerprint.h"
#include "transport/transport.h"
#include "waybill/core/error.h"
#include "waybill/experts/copy_store.h"

namespace waybill {
namespace {

/// Bytes of a piece: two of them, and what is copied in and out, stay in a core's cache.
constexpr std::int64_t piece_bytes = std::int64_t{256} << 10;
constexpr std::int64_t num_pieces = 2;  ///< a rank has two, each for one writer at a time

/// Signals: rank r raises slot kind * W + r.
enum class CopySignal : std::uint8_t {
  entered,  ///< to the number of the call
  arrived,  ///< to the number of pieces that it has sent to this rank so far
  granted,  ///< to the number of pieces that this rank may have sent to it
};
constexpr std::int64_t num_copy_signals = 3;

/// Bytes of a part of an expert on its way: of its weights, or of gradients that are summed.
std::int64_t bytes_of(const ExpertPart& part, bool sums) {
  return part.elements * dtype_bytes(sums ? detail::gradient_sum_dtype(part.dtype) : part.dtype);
}

void check_call(const char* who, const World& world, const ExpertCopyCall& call, bool sums) {
  call.slots.check(who);
  require(call.slots.num_ranks == world.world_size(), who, ": slots are of ", call.slots.num_ranks,
          " ranks, expected ", world.world_size(), ", as the world has");
  for (const ExpertPart& part : call.parts) {
    require(part.elements >= 0, who, ": a part has ", part.elements, " elements, expected >= 0");
    require(!sums || detail::is_summed(part.dtype), who, ": a part is ", part.dtype,
            ", expected float32, float16, bfloat16 or float64");
  }
  const std::int64_t parts = std::ssize(call.parts);
  const auto check = [&](const char* name, std::span<std::byte* const> tensors,
                         std::int64_t experts) {
    require(std::ssize(tensors) == experts * parts, who, ": ", name, " has ", tensors.size(),
            " tensors, expected ", parts, " for each of ", experts, " experts");
  };
  check("home", call.home, call.slots.experts_per_rank());
  check("copies", call.copies, call.slots.num_spare());
}

/// A tensor of the expert in slot `at` of this rank.
std::byte* tensor_of(const ExpertCopyCall& call, std::int32_t at, std::int64_t part) {
  const std::int32_t home = call.slots.experts_per_rank();
  const std::int64_t parts = std::ssize(call.parts);
  return at < home ? call.home[at * parts + part] : call.copies[(at - home) * parts + part];
}

}  // namespace

struct CopyExchange::State {
  explicit State(const World& of);
  ~State() {
    transport.defer_release(std::move(landing.memory));
    transport.defer_release(std::move(versions.memory));
    transport.defer_release(std::move(signals.memory));
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  [[nodiscard]] SignalSlot slot(CopySignal kind, std::int32_t rank) const {
    return {&signals, static_cast<std::int64_t>(kind) * world.world_size() + rank};
  }
  void enter(const char* operation, const CallFingerprint& fingerprint);
  void send(const char* operation, std::int32_t peer, const std::byte* data, std::int64_t bytes);
  template <class Take>
  void receive(const char* operation, std::int32_t peer, std::int64_t bytes, Take&& take);
  void run(const char* who, const ExpertCopyCall& call, bool sums);
  void fetch_weights(const char* who, const ExpertCopyCall& call);
  void add_gradients(const char* who, const ExpertCopyCall& call);

  World world;
  Transport& transport;
  std::int32_t me;
  SymmetricBuffer landing;   ///< [num_pieces, piece_bytes]
  SymmetricBuffer versions;  ///< [2, W] int64, by parity of the call
  SignalPad signals;
  std::uint64_t epoch = 0;           ///< number of the last call
  std::vector<std::uint64_t> sent;   ///< [W] pieces to each rank so far
  std::vector<std::uint64_t> taken;  ///< [W] pieces from each rank so far
  detail::AbortState abort_state{"exchange of copies", &world.transport()};
};

CopyExchange::State::State(const World& of)
    : world(of),
      transport(of.transport()),
      me(to_int(of.rank())),
      sent(of.world_size()),
      taken(of.world_size()) {
  if (dynamic_cast<ExpertExecutorFactory*>(&of.executor()) != nullptr) {
    throw Unsupported("CopyExchange: a world of GPUs, expected ranks in host memory");
  }
  const std::string name = concat(" of copies ", of.next_object());
  const std::int32_t ranks = of.world_size();
  landing = transport.allocate(num_pieces * piece_bytes, "pieces" + name);
  versions = transport.allocate(std::int64_t{2} * ranks * std::int64_t{sizeof(std::int64_t)},
                                "versions" + name);
  signals = transport.allocate_signals(with_fingerprints(num_copy_signals * ranks, ranks),
                                       "signals" + name);
}

/// Waits until all ranks have come to this call, and mean the same.
void CopyExchange::State::enter(const char* operation, const CallFingerprint& fingerprint) {
  ++epoch;
  const detail::FingerprintExchange exchange(
      transport, signals, num_copy_signals * world.world_size(), operation, epoch, fingerprint);
  exchange.enter(slot(CopySignal::entered, 0).idx);
}

/// Sends a tensor in pieces, each when the other rank has room for it.
void CopyExchange::State::send(const char* operation, std::int32_t peer, const std::byte* data,
                               std::int64_t bytes) {
  for (std::int64_t begin = 0; begin < bytes; begin += piece_bytes) {
    const std::uint64_t number = ++sent[peer];
    (void)transport.wait(slot(CopySignal::granted, peer), number, Rank{peer}, operation);
    const auto place = static_cast<std::int64_t>(number % num_pieces) * piece_bytes;
    transport.put_signal(landing,
                         {Rank{peer}, place, data + begin, std::min(piece_bytes, bytes - begin)},
                         slot(CopySignal::arrived, me), number);
  }
}

/// Takes a tensor in pieces. No other rank is granted room meanwhile.
/// @param take called with each piece: (first byte of the tensor, bytes, number of bytes)
template <class Take>
void CopyExchange::State::receive(const char* operation, std::int32_t peer, std::int64_t bytes,
                                  Take&& take) {
  const std::uint64_t before = taken[peer];
  const std::uint64_t last = before + (bytes + piece_bytes - 1) / piece_bytes;
  const auto grant = [&](std::uint64_t number) {
    transport.signal(Rank{peer}, slot(CopySignal::granted, me), std::min(number, last));
  };
  if (bytes > 0) grant(before + num_pieces);
  for (std::int64_t begin = 0; begin < bytes; begin += piece_bytes) {
    const std::uint64_t number = ++taken[peer];
    (void)transport.wait(slot(CopySignal::arrived, peer), number, Rank{peer}, operation);
    const auto place = static_cast<std::int64_t>(number % num_pieces) * piece_bytes;
    take(begin, landing.local + place, std::min(piece_bytes, bytes - begin));
    grant(number + num_pieces);
  }
}

void CopyExchange::State::fetch_weights(const char* who, const ExpertCopyCall& call) {
  for (const ExpertTransfer& one :
       plan_weight_transfers(call.slots, world.topology().ranks_per_node)) {
    for (std::int64_t part = 0; part < std::ssize(call.parts); ++part) {
      const std::int64_t bytes = bytes_of(call.parts[part], false);
      if (one.source == me) {
        send(who, one.target, tensor_of(call, one.source_slot, part), bytes);
      } else if (one.target == me) {
        std::byte* const to = tensor_of(call, one.target_slot, part);
        receive(who, one.source, bytes,
                [&](std::int64_t begin, const std::byte* piece, std::int64_t count) {
                  std::memcpy(to + begin, piece, count);
                });
      }
    }
  }
}

void CopyExchange::State::add_gradients(const char* who, const ExpertCopyCall& call) {
  const std::vector<ExpertTransfer> transfers = plan_gradient_transfers(call.slots);
  std::vector<detail::GradientSum> sums(call.parts.size());
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    const ExpertTransfer& one = transfers[i];
    if (one.source != me && one.target != me) continue;
    const bool is_first = i == 0 || transfers[i - 1].expert != one.expert;
    const bool is_last = i + 1 == transfers.size() || transfers[i + 1].expert != one.expert;
    for (std::int64_t part = 0; part < std::ssize(call.parts); ++part) {
      const auto [elements, dtype] = call.parts[part];
      const std::int64_t bytes = bytes_of(call.parts[part], true);
      if (one.source == me) {
        send(who, one.target, tensor_of(call, one.source_slot, part), bytes);
        continue;
      }
      std::byte* const home = tensor_of(call, one.target_slot, part);
      const std::int64_t element_bytes = dtype_bytes(detail::gradient_sum_dtype(dtype));
      if (is_first) sums[part].begin(home, elements, dtype);
      receive(who, one.source, bytes,
              [&](std::int64_t begin, const std::byte* piece, std::int64_t count) {
                sums[part].add(piece, begin / element_bytes, count / element_bytes);
              });
      if (is_last) sums[part].write(home);
    }
  }
}

namespace {

/// Checks that tensors of this rank that are read or written are not null.
void check_tensors(const char* who, const ExpertCopyCall& call, std::int32_t me) {
  const std::int32_t per_rank = call.slots.slots_per_rank();
  const std::int32_t home = call.slots.experts_per_rank();
  const auto spare_of = [&](std::int32_t rank) {
    return call.slots.experts.subspan(std::int64_t{rank} * per_rank + home, per_rank - home);
  };
  const auto has_copies = [&](std::int32_t expert) {
    for (std::int32_t r = 0; r < call.slots.num_ranks; ++r) {
      if (std::ranges::find(spare_of(r), expert) != spare_of(r).end()) return true;
    }
    return false;
  };
  for (std::int32_t at = 0; at < per_rank; ++at) {
    const std::int32_t expert = call.slots.experts[std::int64_t{me} * per_rank + at];
    if (expert < 0 || (at < home && !has_copies(expert))) continue;
    for (std::int64_t part = 0; part < std::ssize(call.parts); ++part) {
      require(tensor_of(call, at, part) != nullptr || call.parts[part].elements == 0, who,
              ": part ", part, " of ", at < home ? "home expert " : "the copy of expert ", expert,
              " on rank ", me, " is null");
    }
  }
}

CallFingerprint fingerprint_of(const ExpertCopyCall& call, bool sums) {
  Hash formats;
  for (const ExpertPart& part : call.parts) {
    formats.add(part.elements).add(static_cast<std::int32_t>(part.dtype));
  }
  return {.call = sums ? CollectiveCall::expert_gradients : CollectiveCall::expert_weights,
          .plan = Hash().add(call.slots.num_experts).add(call.slots.experts).value(),
          .formats = formats.value(),
          .options = Hash().add(call.owner).value()};
}

}  // namespace

CopyExchange::CopyExchange(const World& world) : state_(std::make_unique<State>(world)) {}
CopyExchange::CopyExchange(CopyExchange&& other) noexcept = default;
CopyExchange& CopyExchange::operator=(CopyExchange&& other) noexcept = default;
CopyExchange::~CopyExchange() = default;

void CopyExchange::State::run(const char* who, const ExpertCopyCall& call, bool sums) {
  abort_state.check(who);
  check_call(who, world, call, sums);
  check_tensors(who, call, me);
  abort_state.guard([&] {
    enter(who, fingerprint_of(call, sums));
    sums ? add_gradients(who, call) : fetch_weights(who, call);
  });
}

void CopyExchange::fetch_weights(const ExpertCopyCall& call) {
  state_->run("fetch_weights", call, false);
}

void CopyExchange::add_gradients(const ExpertCopyCall& call) {
  state_->run("add_gradients", call, true);
}

std::vector<std::int64_t> CopyExchange::exchange_versions(std::int64_t mine, std::uint64_t owner) {
  constexpr const char* who = "exchange_versions";
  State& state = *state_;
  state.abort_state.check(who);
  const std::int32_t ranks = state.world.world_size();
  std::vector<std::int64_t> result(ranks);
  const auto of_rank = [&](std::int32_t rank) {
    const auto first = static_cast<std::int64_t>((state.epoch + 1) % 2) * ranks;
    return (first + rank) * std::int64_t{sizeof(mine)};
  };
  state.abort_state.guard([&] {
    const std::int64_t first = of_rank(0);
    for (std::int32_t r = 0; r < ranks; ++r) {
      state.transport.put(state.versions,
                          {Rank{r}, of_rank(state.me), reinterpret_cast<const std::byte*>(&mine),
                           std::int64_t{sizeof(mine)}});
    }
    state.enter(who,
                {.call = CollectiveCall::expert_versions, .options = Hash().add(owner).value()});
    std::memcpy(result.data(), state.versions.local + first, ranks * sizeof(mine));
  });
  return result;
}

void CopyExchange::finalize() {
  State& state = *state_;
  if (state.landing.local == nullptr) return;
  state.abort_state.check("finalize");
  state.abort_state.guard([&] {
    state.transport.release(state.landing);
    state.transport.release(state.versions);
    state.transport.release(state.signals);
  });
  state.abort_state.end("was finalized");
}

}  // namespace waybill
