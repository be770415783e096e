#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "schedule/sequence_plan.h"
#include "support/sequence_disagreements.h"

namespace waybill {
namespace {

using test::DisagreeingRank;
using test::DocumentFormats;
using test::DocumentRoutings;
using test::to_size;

constexpr std::int32_t world_size = 4;

SequencePlan compiled(const std::vector<SequencePart>& parts, const CompileOptions& options = {},
                      std::int32_t rank = 0) {
  return compile_dispatch(parts, Rank{rank}, options);
}

TEST(PlanFingerprint, is_the_same_on_all_ranks) {
  const DocumentRoutings documents(world_size);
  const auto parts = DisagreeingRank::forward_of(documents.usual, {}, &documents.relay);
  const auto back = DisagreeingRank::kv_of(documents.usual);
  for (const std::int32_t ranks_per_node : {0, 2}) {
    for (const RelayUse relay : {RelayUse::never, RelayUse::always}) {
      for (const bool pairs : {false, true}) {
        const CompileOptions options{.plan = {.relay = relay},
                                     .ranks_per_node = ranks_per_node,
                                     .split_network = pairs,
                                     .two_sided_network = pairs};
        std::set<std::uint64_t> hashes;
        std::set<std::uint64_t> formats;
        std::set<std::uint64_t> gradients;
        for (std::int32_t r = 0; r < world_size; ++r) {
          hashes.insert(compiled(parts, options, r).fingerprint);
          formats.insert(compiled(parts, options, r).formats);
          gradients.insert(compile_kv_gradient(back, Rank{r}, options).fingerprint);
        }
        EXPECT_EQ(hashes.size(), 1U);
        EXPECT_EQ(formats.size(), 1U);
        EXPECT_EQ(gradients.size(), 1U);
      }
    }
  }
}

TEST(PlanFingerprint, tells_plans_apart) {
  const DocumentRoutings documents(world_size);
  const auto usual = DisagreeingRank::forward_of(documents.usual);
  const auto relayed = DisagreeingRank::forward_of(documents.usual, {}, &documents.relay);
  const CompileOptions eager{.plan = {.relay = RelayUse::always}};
  const CompileOptions nodes{.ranks_per_node = 2};
  const CompileOptions batches{.plan = {.batch_bytes = 512}, .ranks_per_node = 2};
  const std::set<std::uint64_t> hashes{
      compiled(usual).fingerprint,
      compiled(DisagreeingRank::forward_of(documents.by_one_token)).fingerprint,
      compiled(DisagreeingRank::forward_of(documents.same_sizes)).fingerprint,
      compiled(DisagreeingRank::kv_of(documents.usual)).fingerprint,
      compile_kv_gradient(DisagreeingRank::kv_of(documents.usual), Rank{0}).fingerprint,
      compiled(relayed, eager).fingerprint,
      compiled(usual, nodes).fingerprint,
      compiled(usual, batches).fingerprint};
  EXPECT_EQ(hashes.size(), 8U);
}

TEST(PlanFingerprint, tells_every_number_of_the_tables_apart) {
  const DocumentRoutings documents(world_size);
  const SparseMetadata& usual = documents.usual.fwd_kv;
  std::set<std::uint64_t> hashes;
  const auto add = [&](const SparseMetadata& metadata) {
    const std::vector<SequencePart> parts{{&metadata, DocumentFormats().kv}};
    hashes.insert(compiled(parts).fingerprint);
  };
  add(usual);
  std::size_t count = 1;
  for (std::int64_t j = 0; j < usual.num_entries(); ++j, ++count) {
    SparseMetadata other = usual;
    other.seq_len[j] += 1;
    add(other);
  }
  for (std::int64_t c = 0; c < usual.num_destinations(); ++c, count += 2) {
    SparseMetadata other = usual;
    other.dst_offset[c] += 1;
    add(other);
    other.dst_offset[c] -= 1;
    other.dst_rank[c] = (other.dst_rank[c] + 1) % world_size;
    add(other);
  }
  EXPECT_EQ(hashes.size(), count);
}

TEST(PlanFingerprint, leaves_out_what_ranks_choose_and_how_tables_are_written) {
  const DocumentRoutings documents(world_size);
  const auto usual = DisagreeingRank::forward_of(documents.usual);
  const std::uint64_t hash = compiled(usual).fingerprint;
  EXPECT_EQ(compiled(usual, {.plan = {.chunk_bytes = 64}}).fingerprint, hash);
  EXPECT_EQ(compiled(usual, {.chunks = false, .separate_local_copies = true}).fingerprint, hash);
  EXPECT_EQ(compiled(usual, {.num_sms = 3}).fingerprint, hash);
  // A schedule that is not used.
  const auto relayed = DisagreeingRank::forward_of(documents.usual, {}, &documents.relay);
  EXPECT_EQ(compiled(relayed, {.plan = {.relay = RelayUse::never}}).fingerprint, hash);
  QkvRouting written = documents.usual;
  if (written.fwd_q.copy_offsets.empty()) {
    written.fwd_q.copy_offsets.resize(written.fwd_q.num_entries() + 1);
    std::iota(written.fwd_q.copy_offsets.begin(), written.fwd_q.copy_offsets.end(), 0);
  } else {
    written.fwd_q.copy_offsets.clear();
  }
  EXPECT_EQ(compiled(DisagreeingRank::forward_of(written)).fingerprint, hash);
}

TEST(PlanFingerprint, formats_are_of_parts_and_their_tensors) {
  const DocumentRoutings documents(world_size);
  const TensorFormat half{DType::bfloat16, 32};
  std::set<std::uint64_t> hashes;
  const std::vector<DocumentFormats> all{
      {},
      {.q = {DType::float16, 64}, .kv = {half, half}},
      {.q = {DType::bfloat16, 32}, .kv = {half, half}},
      {.q = {DType::bfloat16, 64}, .kv = {{DType::bfloat16, 64}}},
  };
  for (const DocumentFormats& formats : all)
    hashes.insert(compiled(DisagreeingRank::forward_of(documents.usual, formats)).formats);
  const SparseMetadata& kv = documents.usual.fwd_kv;
  const std::vector<SequencePart> together{{&kv, {half, half}}};
  const std::vector<SequencePart> apart{{&kv, {half}}, {&kv, {half}}};
  hashes.insert(compiled(together).formats);
  hashes.insert(compiled(apart).formats);
  EXPECT_EQ(hashes.size(), all.size() + 2);
}

}  // namespace
}  // namespace waybill
