// Every kind of planted damage is found, by its kind and at its place, on many random plans.

#include "validate_damage.h"

#include <gtest/gtest.h>

#include <set>

namespace waybill::test {
namespace {

constexpr int plans_each = 60;

std::vector<Damage> all_damages() {
  std::vector<Damage> all;
  for (const auto& list : {plan_damages(), sparse_damages(), kv_damages(), dense_damages()}) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

Patient draw_patient(Random& random) {
  DrawnPlanOptions options{.max_world_size = 12};
  options.empty_shards = random.below(2) == 0;
  Patient patient;
  patient.plan = draw_plan(random, options);
  patient.routing = compute_qkv_routing(patient.plan);
  patient.dense = to_dense(patient.routing);
  patient.options.max_findings = 100000;
  return patient;
}

std::string text(const std::vector<Finding>& findings) {
  std::string lines;
  for (std::size_t i = 0; i < findings.size() && i < 20; ++i) {
    lines += "  " + to_string(findings[i]) + "\n";
  }
  return lines;
}

class ValidateDamage : public ::testing::TestWithParam<Damage> {};

TEST_P(ValidateDamage, IsFoundAtItsPlace) {
  const Damage& damage = GetParam();
  int planted = 0;
  for (std::uint64_t seed = 0; seed < 10 * plans_each && planted < plans_each; ++seed) {
    Random random(seed);
    Patient patient = draw_patient(random);
    ASSERT_EQ(text(examine(patient, damage.form)), "") << "before the damage, seed " << seed;
    const std::optional<Symptom> symptom = damage.plant(patient, random);
    if (!symptom) continue;
    ++planted;
    const std::vector<Finding> findings = examine(patient, damage.form);
    const bool found = std::any_of(findings.begin(), findings.end(), [&](const Finding& finding) {
      return shows(finding, *symptom);
    });
    ASSERT_TRUE(found) << damage.name << ", seed " << seed << ": expected "
                       << to_string(symptom->kinds[0]) << " in " << symptom->table << "."
                       << symptom->field << ", rank " << symptom->rank << ", shard "
                       << symptom->shard << ", copy " << symptom->copy << "; found\n"
                       << text(findings);
  }
  EXPECT_GE(planted, plans_each / 3) << "too few plans have a place for this damage";
}

INSTANTIATE_TEST_SUITE_P(All, ValidateDamage, ::testing::ValuesIn(all_damages()),
                         [](const auto& test) { return test.param.name; });

TEST(Validate, EveryKindOfFindingIsProduced) {
  std::set<FindingKind> produced;
  for (const Damage& damage : all_damages()) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      Random random(seed);
      Patient patient = draw_patient(random);
      if (!damage.plant(patient, random)) continue;
      for (const Finding& finding : examine(patient, damage.form)) produced.insert(finding.kind);
    }
  }
  constexpr auto last = static_cast<int>(FindingKind::normalization);
  for (int kind = 0; kind <= last; ++kind) {
    EXPECT_TRUE(produced.contains(static_cast<FindingKind>(kind)))
        << to_string(static_cast<FindingKind>(kind));
  }
}

TEST(Validate, StopsAtMaxFindings) {
  Random random(3);
  Patient patient = draw_patient(random);
  while (patient.plan.num_shards() < 10) patient = draw_patient(random);
  for (auto& offset : patient.routing.fwd_kv.dst_offset) offset += 5;
  for (const std::int64_t limit : {1, 2, 7}) {
    patient.options.max_findings = limit;
    EXPECT_EQ(std::ssize(examine(patient, Form::sparse)), limit);
  }
  patient.options.max_findings = 0;
  EXPECT_EQ(std::ssize(examine(patient, Form::sparse)), 1);
}

}  // namespace
}  // namespace waybill::test
