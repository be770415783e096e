#include "expert_ids.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "numbers.h"
#include "waybill/core/error.h"
#include "waybill/core/random.h"

namespace waybill::cli {
namespace {

/// Numbers with weights, drawn without putting back: sums of weights in a Fenwick tree.
class WeightedUrn {
 public:
  explicit WeightedUrn(const std::vector<std::int64_t>& weights)
      : weights_(weights), sums_(weights.size() + 1) {
    for (std::int64_t i = 0; i < std::ssize(weights); ++i) add(i, weights[i]);
  }

  /// One of those that are left.
  [[nodiscard]] std::int64_t take(Random& random) {
    std::int64_t target = random.below(total_);
    std::int64_t place = 0;  // all numbers before it weigh at most the target
    for (auto step = static_cast<std::int64_t>(std::bit_floor(weights_.size())); step > 0;
         step /= 2) {
      if (place + step >= std::ssize(sums_) || sums_[place + step] > target) continue;
      place += step;
      target -= sums_[place];
    }
    add(place, -weights_[place]);
    return place;
  }

  void put_back(std::int64_t number) { add(number, weights_[number]); }

 private:
  void add(std::int64_t number, std::int64_t weight) {
    total_ += weight;
    for (std::int64_t i = number + 1; i < std::ssize(sums_); i += i & -i) sums_[i] += weight;
  }

  std::vector<std::int64_t> weights_;
  std::vector<std::int64_t> sums_;  ///< [i]: of the lowbit(i) numbers before i
  std::int64_t total_ = 0;
};

/// One line's ids. @throws IoError
void read_line(std::string_view line, const std::string& where, std::vector<std::int32_t>& ids) {
  constexpr std::string_view blanks = " \t,\r";
  while (true) {
    const std::size_t begin = line.find_first_not_of(blanks);
    if (begin == std::string_view::npos) return;
    const std::size_t end = std::min(line.find_first_of(blanks, begin), line.size());
    const std::string word(line.substr(begin, end - begin));
    const std::optional<std::int64_t> id = parse_number(word);
    if (!id || *id < -1 || *id >= std::int64_t{1} << 31)
      throw IoError(concat(where, "got \"", word, "\", expected the number of an expert, or -1"));
    ids.push_back(static_cast<std::int32_t>(*id));
    line.remove_prefix(end);
  }
}

}  // namespace

TopkIds read_topk_ids(std::string_view text, const std::string& name) {
  TopkIds topk_slots;
  std::int64_t number = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::size_t before = topk_slots.ids.size();
    const std::string where = concat(name, ": line ", ++number, ": ");
    read_line(text.substr(0, end), where, topk_slots.ids);
    text.remove_prefix(std::min(end + 1, text.size()));
    const auto got = static_cast<std::int32_t>(topk_slots.ids.size() - before);
    if (got == 0) continue;
    if (topk_slots.topk == 0) topk_slots.topk = got;
    if (got != topk_slots.topk) {
      throw IoError(concat(where, "got ", got, " ids, expected ", topk_slots.topk,
                           " as in the lines before"));
    }
    if (got > max_topk)
      throw IoError(concat(where, "got ", got, " ids, expected at most ", max_topk));
  }
  if (topk_slots.ids.empty())
    throw IoError(concat(name, ": got no ids, expected one token per line"));
  return topk_slots;
}

TopkIds draw_topk_ids(std::int64_t num_tokens, std::int32_t topk, std::int32_t num_experts,
                      double skew, std::uint64_t seed, const GroupLimit& limit) {
  Random random(seed);
  const std::vector<std::int32_t> order = random.permutation(num_experts, num_experts);
  std::vector<std::int64_t> weights(num_experts);
  for (std::int32_t n = 0; n < num_experts; ++n) {
    const double weight = std::pow(n + 1.0, -skew) * 0x1p32;
    weights[order[n]] = std::max<std::int64_t>(1, std::llround(weight));
  }
  WeightedUrn urn(weights);
  TopkIds topk_slots{topk, {}};
  topk_slots.ids.reserve(num_tokens * topk);
  const std::int64_t of_group = num_experts / limit.num_groups;
  std::vector<std::int64_t> taken;
  std::vector<bool> open(limit.num_groups, true);
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    if (limit.top_groups < limit.num_groups) {
      open.assign(open.size(), false);
      for (const std::int32_t group : random.permutation(limit.num_groups, limit.top_groups))
        open[group] = true;
    }
    taken.clear();
    for (std::int32_t k = 0; k < topk;) {
      taken.push_back(urn.take(random));
      if (!open[taken.back() / of_group]) continue;
      topk_slots.ids.push_back(static_cast<std::int32_t>(taken.back()));
      ++k;
    }
    for (const std::int64_t expert : taken) urn.put_back(expert);
  }
  return topk_slots;
}

std::vector<std::vector<std::int32_t>> ids_of_ranks(const TopkIds& topk_slots, EPConfig& config,
                                                    const std::string& name) {
  const std::int64_t tokens = std::ssize(topk_slots.ids) / topk_slots.topk;
  const std::int64_t world = config.world_size;
  config.topk = topk_slots.topk;
  config.max_tokens = std::max<std::int64_t>(1, (tokens + world - 1) / world);
  std::vector<std::vector<std::int32_t>> ids(world);
  std::int64_t token = 0;
  for (std::int64_t r = 0; r < world; ++r) {
    const std::int64_t end = token + tokens / world + (r < tokens % world ? 1 : 0);
    for (std::int64_t i = token * topk_slots.topk; i < end * topk_slots.topk; ++i) {
      const std::int32_t id = topk_slots.ids[i];
      if (id > config.num_experts) {
        throw IoError(concat(name, ": token ", i / topk_slots.topk, " has expert ", id,
                             ", expected 0..", config.num_experts - 1, ", or -1"));
      }
      ids[r].push_back(id < 0 ? config.num_experts : id);
    }
    token = end;
  }
  return ids;
}

}  // namespace waybill::cli
