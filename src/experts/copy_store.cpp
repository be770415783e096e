#include "waybill/experts/copy_store.h"

#include <utility>

#include "core/hash.h"
#include "core/number.h"
#include "experts/expert_executor.h"
#include "moe/gradient_sum.h"
#include "runtime/abort_state.h"
#include "transport/transport.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

constexpr const char* in_copy_store = "CopyStore";
constexpr std::int64_t copies_alignment_bytes = 16;

/// Makes the executor's part, where the world has one.
std::unique_ptr<CopyStoreExecutor> make_executor(const World& world, std::int64_t size_bytes,
                                                 std::int32_t spare_experts) {
  require(size_bytes >= 0, in_copy_store, ": size_bytes = ", size_bytes, ", expected >= 0");
  require(spare_experts >= 0, in_copy_store, ": spare_experts = ", spare_experts,
          ", expected >= 0");
  auto* const factory = dynamic_cast<ExpertExecutorFactory*>(&world.executor());
  if (factory == nullptr) {
    throw Unsupported(concat(in_copy_store, ": ranks in host memory, expected GPUs: CopyExchange ",
                             "is that of CPU ranks"));
  }
  const std::string name = concat(" of copies ", world.next_object());
  return factory->make_copy_store(size_bytes, spare_experts, name);
}

}  // namespace

struct CopyStore::State {
  State(const World& of, std::int64_t size_bytes, std::int32_t spare_experts)
      : world(of),
        spare(spare_experts),
        size(size_bytes),
        executor(make_executor(of, size_bytes, spare_experts)) {}

  void check(const char* who, const CopyStoreCall& call, bool sums) const;
  void check_parts(const char* who, const CopyStoreCall& call, bool sums) const;
  void run(const char* who, const CopyStoreCall& call, const Stream& stream, bool sums);

  World world;
  std::int32_t spare;
  std::int64_t size;
  std::unique_ptr<CopyStoreExecutor> executor;
  detail::AbortState abort_state{"store of copies", &world.transport()};
};

/// Tensors of copies lie in the store, and are summed.
void CopyStore::State::check_parts(const char* who, const CopyStoreCall& call, bool sums) const {
  const std::byte* const store = executor->store().local;
  for (std::size_t i = 0; i < call.parts.size(); ++i) {
    const auto [elements, dtype] = call.parts[i];
    require(elements >= 0, who, ": a part has ", elements, " elements, expected >= 0");
    require(detail::is_summed(dtype), who, ": a part is ", dtype,
            ", expected float32, float16, bfloat16 or float64");
    const std::int64_t bytes = call.spare_experts * elements *
                               dtype_bytes(sums ? detail::gradient_sum_dtype(dtype) : dtype);
    const std::int64_t at = call.copies[i] - store;
    require(bytes == 0 || (at >= 0 && at + bytes <= size), who, ": copies[", i,
            "] is not in the store, expected ", bytes, " of its bytes");
    require(bytes == 0 || at % copies_alignment_bytes == 0, who, ": copies[", i, "] is at byte ",
            at, " of the store, expected a multiple of ", copies_alignment_bytes);
  }
}

void CopyStore::State::check(const char* who, const CopyStoreCall& call, bool sums) const {
  const std::int32_t ranks = world.world_size();
  require(call.num_experts >= 1 && call.num_experts % ranks == 0, who,
          ": num_experts = ", call.num_experts, ", expected a multiple of ", ranks, " ranks");
  require(0 <= call.spare_experts && call.spare_experts <= spare, who,
          ": spare_experts = ", call.spare_experts, ", expected 0..", spare,
          ", those of the store");
  require(call.slots != nullptr, who, ": slots is null");
  const std::int64_t parts = std::ssize(call.parts);
  const std::int64_t homes = call.num_experts / ranks;
  require(parts <= max_copy_store_parts && homes * parts <= max_copy_store_tensors, who, ": ",
          parts, " parts of each of ", homes, " home experts, expected at most ",
          max_copy_store_parts, " parts and ", max_copy_store_tensors, " tensors");
  require(std::ssize(call.home) == homes * parts, who, ": home has ", call.home.size(),
          " tensors, expected ", parts, " for each of ", homes, " experts");
  require(std::ssize(call.copies) == parts, who, ": copies has ", call.copies.size(),
          " tensors, expected ", parts);
  check_parts(who, call, sums);
  for (std::int64_t i = 0; i < std::ssize(call.home); ++i) {
    require(call.home[i] != nullptr || call.parts[i % parts].elements == 0, who, ": home[", i,
            "] on rank ", to_int(world.rank()), " is null");
  }
}

void CopyStore::State::run(const char* who, const CopyStoreCall& call, const Stream& stream,
                           bool sums) {
  abort_state.check(who);
  check(who, call, sums);
  Hash formats;
  for (std::size_t i = 0; i < call.parts.size(); ++i) {
    formats.add(call.parts[i].elements).add(static_cast<std::int32_t>(call.parts[i].dtype));
    formats.add(static_cast<std::int64_t>(call.copies[i] - executor->store().local));
  }
  const CallFingerprint fingerprint{
      .call = sums ? CollectiveCall::expert_gradients : CollectiveCall::expert_weights,
      .plan = Hash().add(call.num_experts).add(call.spare_experts).value(),
      .formats = formats.value(),
      .options = Hash()
                     .add(static_cast<std::int64_t>(call.owner))
                     .add(static_cast<std::int32_t>(call.fresh))
                     .add(static_cast<std::int32_t>(call.quotas != nullptr))
                     .value()};
  abort_state.guard([&] {
    sums ? executor->add_gradients(call, fingerprint, stream)
         : executor->fetch_weights(call, fingerprint, stream);
  });
}

CopyStore::CopyStore(const World& world, std::int64_t size_bytes, std::int32_t spare_experts)
    : state_(std::make_unique<State>(world, size_bytes, spare_experts)) {}
CopyStore::CopyStore(CopyStore&& other) noexcept = default;
CopyStore& CopyStore::operator=(CopyStore&& other) noexcept = default;
CopyStore::~CopyStore() = default;

std::byte* CopyStore::data() const { return state_->executor->store().local; }
std::int64_t CopyStore::size_bytes() const { return state_->size; }
std::shared_ptr<void> CopyStore::memory() const {
  const SymmetricBuffer& store = state_->executor->store();
  return store.memory.empty() ? nullptr : store.memory[to_int(state_->world.rank())];
}

void CopyStore::fetch_weights(const CopyStoreCall& call, const Stream& stream) {
  state_->run("fetch_weights", call, stream, false);
}

void CopyStore::add_gradients(const CopyStoreCall& call, const Stream& stream) {
  state_->run("add_gradients", call, stream, true);
}

void CopyStore::finalize() {
  State& state = *state_;
  if (state.executor->store().local == nullptr) return;
  state.abort_state.check("finalize");
  state.abort_state.guard([&] { state.executor->release(); });
  state.abort_state.end("was finalized");
}

}  // namespace waybill
