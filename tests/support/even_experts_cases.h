#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/core/random.h"
#include "waybill/planner/expert_balance.h"

namespace waybill::test {

/// One microbatch for planners of copies.
struct EvenExpertsCase {
  std::string name;
  std::int32_t num_ranks = 1;
  std::int32_t num_experts = 1;
  std::vector<std::int64_t> rows;     ///< [R, E]
  std::vector<std::int32_t> present;  ///< [R, spare], or empty
  EvenExpertsOptions options = {};    ///< without `present`, which would point into this

  [[nodiscard]] EvenExpertsOptions with_present() const {
    EvenExpertsOptions all = options;
    all.present = present;
    return all;
  }
};

/// Rows [R, E] of a router that likes expert e by weights[e].
inline std::vector<std::int64_t> rows_of(const std::vector<double>& weights, std::int32_t num_ranks,
                                         std::int64_t rows_per_expert, Random& random) {
  double sum = 0;
  for (const double weight : weights) sum += weight;
  std::vector<std::int64_t> rows;
  for (std::int32_t r = 0; r < num_ranks; ++r) {
    for (const double weight : weights) {
      const double mean = weight / sum * static_cast<double>(rows_per_expert) *
                          static_cast<double>(weights.size()) / num_ranks;
      const auto whole = static_cast<std::int64_t>(mean);
      rows.push_back(whole + random.below(whole / 8 + 2));
    }
  }
  return rows;
}

/// Weights of each expert: about lognormal, Zipf, one hot rank, or all on a few.
inline std::vector<double> weights_of(const std::string& family, std::int32_t num_experts,
                                      std::int32_t homes, Random& random) {
  std::vector<double> weights(num_experts);
  const auto uniform = [&] { return static_cast<double>(random.below(1 << 20)) / (1 << 20); };
  const std::vector<std::int32_t> order = random.permutation(num_experts, num_experts);
  for (std::int32_t e = 0; e < num_experts; ++e) {
    double normal = -6;
    for (int i = 0; i < 12; ++i) normal += uniform();
    const double zipf = 1.0 / (order[e] + 1.0);
    weights[e] = family == "flat"        ? std::exp(0.1 * normal)
                 : family == "lognormal" ? std::exp(0.5 * normal)
                 : family == "skewed"    ? std::exp(1.2 * normal)
                 : family == "zipf"      ? zipf
                 : family == "hot rank"  ? (e / homes == 0 ? 3.0 : 1.0)
                 : family == "hot zipf"  ? (e / homes == 0 ? 3.0 * homes / (e + 1.0) : 1.0)
                                         : (e < 3 ? 1.0 : 0.0);  // few
  }
  return weights;
}

/// Sizes and options with edges, random rows, and families of routers.
inline std::vector<EvenExpertsCase> even_experts_cases(std::int64_t num_seeds) {
  std::vector<EvenExpertsCase> cases;
  const auto add = [&](EvenExpertsCase one) { cases.push_back(std::move(one)); };
  const auto zeros = [](std::int32_t cells) { return std::vector<std::int64_t>(cells, 0); };
  add({"one rank", 1, 4, {5, 0, 7, 2}, {}, {.spare_experts = 2}});
  add({"one expert", 1, 1, {5}, {}, {.spare_experts = 1}});
  add({"no rows", 4, 8, zeros(32), {}, {.spare_experts = 2}});
  std::vector<std::int64_t> one_hot = zeros(64 * 256);
  for (std::int32_t r = 0; r < 64; ++r) one_hot[r * 256 + 77] = 1000 + r;
  for (const std::int32_t spare : {0, 1, 2, 4}) {
    add({concat("all to one, spare ", spare), 64, 256, one_hot, {}, {.spare_experts = spare}});
  }
  std::vector<std::int64_t> one_source = zeros(8 * 32);
  for (std::int32_t e = 0; e < 32; ++e) one_source[3 * 32 + e] = e * e;
  add({"one source", 8, 32, one_source, {}, {.spare_experts = 2}});
  const std::pair<std::int32_t, std::int32_t> shapes[] = {
      {2, 6}, {8, 64}, {8, 256}, {16, 48}, {32, 256}, {33, 66}, {64, 256}, {64, 128}, {128, 512}};
  for (const auto& [ranks, experts] : shapes) {
    for (const char* family :
         {"flat", "lognormal", "skewed", "zipf", "hot rank", "hot zipf", "few"}) {
      for (std::int64_t seed = 0; seed < num_seeds; ++seed) {
        Random random(static_cast<std::uint64_t>(seed * 7919 + ranks * 131 + experts));
        const std::int32_t homes = experts / ranks;
        const std::vector<std::int64_t> rows =
            rows_of(weights_of(family, experts, homes, random), ranks, 40 + 500 * seed, random);
        EvenExpertsOptions options{.spare_experts = static_cast<std::int32_t>(seed % 3)};
        if (seed == 0) options.spare_experts = std::min(homes, 4);
        if (seed % 4 == 1) options.limit = 1.02;
        if (seed % 5 == 2) options.min_rows = 16;
        if (seed % 5 == 3) options.alignment = 8;
        if (seed % 7 == 4) options.min_rows = 50, options.alignment = 16, options.limit = 1.005;
        EvenExpertsCase one{concat(family, ' ', experts, " experts ", ranks, " ranks seed ", seed),
                            ranks,
                            experts,
                            rows,
                            {},
                            options};
        add(one);
        if (options.spare_experts == 0) continue;
        // A router that drifts, with the copies of before.
        const EvenExperts before = even_experts(rows, ranks, experts, options);
        for (std::int64_t& n : one.rows) n += random.below(n / 5 + 2);
        for (std::int32_t r = 0; r < ranks; ++r) {
          for (std::int32_t s = 0; s < options.spare_experts; ++s)
            one.present.push_back(before.slots[r * before.slots_per_rank + homes + s]);
        }
        one.name += ", present";
        add(one);
      }
    }
  }
  return cases;
}

/// The cases at the edges, which come first, and each `step`-th of the others.
inline std::vector<EvenExpertsCase> some_even_experts_cases(std::int64_t num_seeds,
                                                            std::size_t step) {
  constexpr std::size_t num_edges = 8;
  std::vector<EvenExpertsCase> cases = even_experts_cases(num_seeds), some;
  for (std::size_t i = 0; i < cases.size(); ++i)
    if (i < num_edges || (i - num_edges) % step == 0) some.push_back(std::move(cases[i]));
  return some;
}

}  // namespace waybill::test
