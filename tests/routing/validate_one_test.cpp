#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "waybill/routing/generators.h"
#include "waybill/routing/validate.h"

namespace waybill {
namespace {

E2eMetadata random_metadata(std::uint64_t seed) {
  return create_qkv_dispatch(4, 256, 5, 4, seed).metadata;
}

bool has_kind(const std::vector<Finding>& findings, FindingKind kind) {
  return std::ranges::any_of(findings, [&](const Finding& f) { return f.kind == kind; });
}

TEST(ValidateOne, AllFourTablesAreRightAlone) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const E2eMetadata all = random_metadata(seed);
    for (const Metadata* table : {&all.fwd_q, &all.rev_q, &all.fwd_kv, &all.rev_kv}) {
      EXPECT_TRUE(validate(*table).empty()) << seed << validate(*table).front();
      EXPECT_TRUE(validate(table->normalize_dtype()).empty()) << seed;
    }
  }
}

TEST(ValidateOne, DamageOfAReverseTableWithPlanesIsFound) {
  struct Damage {
    FindingKind kind;
    std::function<void(Metadata&)> plant;
  };
  const Damage damages[] = {
      {FindingKind::coverage, [](Metadata& m) { m.dst_offset.i64()[0] += 1; }},
      {FindingKind::count, [](Metadata& m) { m.num_recv_tokens.i64()[1] += 1; }},
      {FindingKind::coverage, [](Metadata& m) { m.recv_seq_lens->i64()[0] += 1; }},
      {FindingKind::rank_range, [](Metadata& m) { m.dst_rank.i64()[0] = 4; }},
      {FindingKind::mask, [](Metadata& m) { m.recv_seq_lens.reset(); }},
      {FindingKind::negative, [](Metadata& m) { m.recv_seq_lens->i64()[0] = -1; }},
      {FindingKind::coverage,
       [](Metadata& m) { m.seq_recv_mask = IndexArray::full(m.seq_recv_mask->shape(), 1); }},
      {FindingKind::mask,
       [](Metadata& m) { m.seq_recv_mask = IndexArray(m.seq_recv_mask->shape()); }},
  };
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    for (const Damage& damage : damages) {
      Metadata table = random_metadata(seed).rev_kv;
      damage.plant(table);
      EXPECT_TRUE(has_kind(validate(table), damage.kind)) << seed << to_string(damage.kind);
    }
  }
}

TEST(ValidateOne, DamageOfAForwardTableIsFound) {
  Metadata table = random_metadata(1).fwd_q;
  table.dst_offset.i64()[0] += 1;
  EXPECT_TRUE(has_kind(validate(table), FindingKind::coverage));
  EXPECT_TRUE(
      has_kind(validate(random_metadata(1).fwd_q, {.q_capacity = 1}), FindingKind::capacity));
  EXPECT_TRUE(has_kind(validate(random_metadata(1).fwd_q.get_slice(Rank{0})), FindingKind::shape));
}

}  // namespace
}  // namespace waybill
