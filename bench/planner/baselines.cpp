#include "baselines.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "waybill/planner/static_plans.h"

namespace waybill::bench {
namespace {

double work_of(const DocumentPiece& piece) {
  const auto b = static_cast<double>(piece.begin);
  const auto e = static_cast<double>(piece.end);
  return (e * (e + 1) - b * (b + 1)) / 2;
}

/// Work that the greedy planner moves as one: a whole document, or a head and a tail of equal
/// length that lie symmetrically about the middle of it.
struct Item {
  DocumentPiece head;
  DocumentPiece tail = {};  ///< empty for a whole document
  std::int64_t doc_len = 0;
  bool whole = true;

  [[nodiscard]] double work() const { return work_of(head) + (whole ? 0 : work_of(tail)); }
};

std::vector<Item> lay_out_items(std::span<const std::int64_t> documents,
                                const BaselineOptions& options) {
  std::vector<Item> items;
  std::int32_t rank = 0;
  std::int64_t room = options.tokens_per_rank;
  for (std::size_t d = 0; d < documents.size(); ++d) {
    const auto doc = static_cast<std::int32_t>(d);
    std::int64_t head = 0;
    std::int64_t tail = documents[d];
    while (head < tail) {
      if (room == 0) {
        ++rank;
        room = options.tokens_per_rank;
      }
      const std::int64_t tokens = std::min(tail - head, room);
      if (tokens == documents[d]) {
        items.push_back({.head = {0, tokens, doc, rank, rank}, .doc_len = tokens});
      } else {
        items.push_back({.head = {head, head + tokens / 2, doc, rank, rank},
                         .tail = {tail - (tokens - tokens / 2), tail, doc, rank, rank},
                         .doc_len = documents[d],
                         .whole = false});
      }
      head += tokens / 2;
      tail -= tokens - tokens / 2;
      room -= tokens;
    }
  }
  return items;
}

// Cuts a symmetric pair with `pairs` tokens each out of the inner ends of `item`.
Item cut_pair(Item& item, std::int64_t pairs, std::int32_t dst) {
  if (item.whole) {
    item.whole = false;
    item.tail = item.head;
    const std::int64_t middle = (item.head.begin + item.head.end + 1) / 2;
    item.head.end = middle;
    item.tail.begin = middle;
  }
  Item part = item;
  part.head.begin = item.head.end - pairs;
  item.head.end = part.head.begin;
  part.tail.end = item.tail.begin + pairs;
  item.tail.begin = part.tail.end;
  part.head.q_dst = part.tail.q_dst = dst;
  return part;
}

}  // namespace

QkvPlan greedy_plan(std::span<const std::int64_t> documents, const BaselineOptions& options,
                    double tolerance) {
  constexpr double q_row = 4096;  // elements; KV: K and V
  constexpr double kv_row = 2048;
  std::vector<Item> items = lay_out_items(documents, options);
  std::vector<double> excess(options.world_size);
  for (const Item& item : items) excess[item.head.q_dst] += item.work();
  const double mean = std::accumulate(excess.begin(), excess.end(), 0.0) / options.world_size;
  for (double& e : excess) e -= mean;
  std::vector<std::int32_t> order;
  for (std::int32_t r = 0; r < options.world_size; ++r)
    if (excess[r] < 0) order.push_back(r);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t a, std::int32_t b) { return excess[a] < excess[b]; });
  for (const std::int32_t rank : order) {
    double needed = -excess[rank];
    while (needed > tolerance * mean) {
      std::size_t best = items.size();
      double best_cost = 0;
      for (std::size_t i = 0; i < items.size(); ++i) {
        const double donor = excess[items[i].head.q_dst];
        const double work = items[i].work();
        if (donor <= 0 || work <= 0) continue;
        const double moved = std::min({donor, needed, work});
        const double len = static_cast<double>(items[i].doc_len + 1);
        const double cost = (moved / len * q_row + len * kv_row) / moved;
        if (best < items.size() && cost >= best_cost) continue;
        best = i;
        best_cost = cost;
      }
      if (best == items.size()) break;
      Item& item = items[best];
      const std::int32_t donor = item.head.q_dst;
      double moved = std::min({needed, item.work(), excess[donor]});
      if (moved >= item.work()) {
        item.head.q_dst = item.tail.q_dst = rank;
      } else {
        const auto pairs = std::min(
            static_cast<std::int64_t>(moved / static_cast<double>(item.doc_len + 1)),
            item.whole
                ? item.doc_len / 2
                : std::min(item.head.end - item.head.begin, item.tail.end - item.tail.begin));
        if (pairs <= 0) break;
        const Item part = cut_pair(item, pairs, rank);
        moved = part.work();
        items.push_back(part);
      }
      excess[donor] -= moved;
      excess[rank] += moved;
      needed -= moved;
    }
  }
  std::vector<DocumentPiece> chunks;
  for (const Item& item : items) {
    chunks.push_back(item.head);
    if (!item.whole) chunks.push_back(item.tail);
  }
  return plan_of_pieces(std::move(chunks), std::ssize(documents), options.world_size);
}

QkvPlan longest_first_plan(std::span<const std::int64_t> documents,
                           const BaselineOptions& options) {
  std::vector<std::int32_t> order(documents.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t a, std::int32_t b) { return documents[a] > documents[b]; });
  using Load = std::pair<double, std::int32_t>;
  std::priority_queue<Load, std::vector<Load>, std::greater<>> lightest;
  for (std::int32_t r = 0; r < options.world_size; ++r) lightest.emplace(0, r);
  std::vector<std::int32_t> dst(documents.size());
  for (const std::int32_t d : order) {
    const auto [load, rank] = lightest.top();
    lightest.pop();
    dst[d] = rank;
    const auto len = static_cast<double>(documents[d]);
    lightest.emplace(load + len * (len + 1) / 2, rank);
  }
  std::vector<DocumentPiece> chunks;
  std::int64_t tokens = 0;
  for (std::size_t d = 0; d < documents.size(); ++d) {
    for (std::int64_t begin = 0; begin < documents[d];) {
      const auto home = static_cast<std::int32_t>((tokens + begin) / options.tokens_per_rank);
      const std::int64_t end =
          std::min(documents[d], (home + 1) * options.tokens_per_rank - tokens);
      chunks.push_back({begin, end, static_cast<std::int32_t>(d), home, dst[d]});
      begin = end;
    }
    tokens += documents[d];
  }
  return plan_of_pieces(std::move(chunks), std::ssize(documents), options.world_size);
}

}  // namespace waybill::bench
