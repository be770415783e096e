#include "arrivals.h"

#include <algorithm>
#include <array>

namespace waybill::validation {
namespace {

/// Order of arrivals: by row; without rows first.
struct Key {
  const SendTable& table;
  std::uint64_t operator()(const Arrival& a) const {
    return static_cast<std::uint64_t>(a.row) * 2 + (table.entries[a.entry].len > 0 ? 1 : 0);
  }
};

void insertion_sort(std::span<Arrival> list, const Key& key) {
  for (std::size_t i = 1; i < list.size(); ++i) {
    const Arrival moving = list[i];
    std::size_t place = i;
    for (; place > 0 && key(list[place - 1]) > key(moving); --place) list[place] = list[place - 1];
    list[place] = moving;
  }
}

/// Stable, least significant byte first; digits that are the same everywhere are skipped.
void radix_sort(std::span<Arrival> list, const Key& key, std::vector<Arrival>& scratch) {
  std::uint64_t differing = 0;
  for (const Arrival& a : list) differing |= key(a) ^ key(list[0]);
  scratch.resize(list.size());
  for (int shift = 0; shift < 64 && (differing >> shift) != 0; shift += 8) {
    if (((differing >> shift) & 255) == 0) continue;
    std::array<std::size_t, 257> next{};
    for (const Arrival& a : list) ++next[((key(a) >> shift) & 255) + 1];
    for (std::size_t digit = 1; digit < next.size(); ++digit) next[digit] += next[digit - 1];
    for (const Arrival& a : list) scratch[next[(key(a) >> shift) & 255]++] = a;
    std::copy(scratch.begin(), scratch.end(), list.begin());
  }
}

}  // namespace

Arrivals sort_arrivals(const SendTable& table) {
  const std::int64_t world = table.world_size;
  Arrivals result;
  result.offsets.assign(world + 1, 0);
  result.rows.assign(world, 0);
  result.list.resize(table.num_destinations());
  for (const std::int32_t dst : table.dst_rank) ++result.offsets[dst + 1];
  for (std::int64_t r = 0; r < world; ++r) result.offsets[r + 1] += result.offsets[r];
  result.tiled.assign(world, 1);
  std::vector<std::int64_t> next(result.offsets.begin(), result.offsets.end() - 1);
  for (std::int64_t entry = 0; entry < table.num_entries(); ++entry) {
    const std::int64_t first = table.destination_begin(entry);
    const std::int64_t last = table.destination_begin(entry + 1);
    const std::int64_t len = table.entries[entry].len;
    for (std::int64_t c = first; c < last; ++c) {
      const std::size_t r = table.dst_rank[c];
      if (table.dst_row[c] != result.rows[r]) result.tiled[r] = 0;
      result.list[next[r]++] = {.row = table.dst_row[c],
                                .entry = static_cast<std::int32_t>(entry),
                                .slot = static_cast<std::int32_t>(table.slot(entry, c))};
      result.rows[r] += len;
    }
  }
  const Key key{table};
  std::vector<Arrival> scratch;
  for (std::int64_t r = 0; r < world; ++r) {
    if (result.tiled[r] != 0) continue;  // without gaps in the global order, hence in order
    const std::span<Arrival> list(result.list.data() + result.offsets[r],
                                  result.list.data() + result.offsets[r + 1]);
    const auto falls = [&](const Arrival& a, const Arrival& b) { return key(a) > key(b); };
    if (std::adjacent_find(list.begin(), list.end(), falls) == list.end()) continue;
    constexpr std::size_t few = 24;  // counting 256 digits costs more than moving these
    if (list.size() <= few) {
      insertion_sort(list, key);
    } else {
      radix_sort(list, key, scratch);
    }
  }
  return result;
}

}  // namespace waybill::validation
