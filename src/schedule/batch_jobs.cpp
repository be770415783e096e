#include "batch_jobs.h"

#include <algorithm>
#include <queue>

#include "core/batch_bytes.h"

namespace waybill::detail {

JobOrder order_jobs(std::int32_t world_size, std::span<const BatchJob> jobs,
                    std::span<const std::pair<std::int32_t, std::int32_t>> edges) {
  const std::size_t count = jobs.size();
  JobOrder result;
  result.ready.assign(count, 0);
  result.start.assign(count, 0);
  result.finish.assign(count, 0);
  std::vector<std::int32_t> waits(count);
  std::vector<std::int32_t> first(count + 1);
  std::vector<std::int32_t> next(edges.size());
  for (const auto& [from, to] : edges) {
    ++first[from + 1];
    ++waits[to];
  }
  for (std::size_t j = 0; j < count; ++j) first[j + 1] += first[j];
  std::vector<std::int32_t> fill(first.begin(), first.end());
  for (const auto& [from, to] : edges) next[fill[from]++] = to;

  using Entry = std::pair<std::int64_t, std::int32_t>;  // ready, job
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
  for (std::size_t j = 0; j < count; ++j) {
    if (waits[j] == 0) queue.emplace(0, static_cast<std::int32_t>(j));
  }
  std::vector<std::int64_t> busy(world_size);
  while (!queue.empty()) {
    const auto [ready, job] = queue.top();
    queue.pop();
    const BatchJob& current = jobs[job];
    std::int64_t& end = busy[current.rank];
    result.order.push_back(job);
    result.start[job] = std::max(ready, end);
    end = result.start[job] + std::max<std::int64_t>(1, current.num_bytes);
    result.finish[job] = end;
    for (std::int32_t e = first[job]; e < first[job + 1]; ++e) {
      const std::int32_t to = next[e];
      result.ready[to] = std::max(result.ready[to], end);
      if (--waits[to] == 0) queue.emplace(result.ready[to], to);
    }
  }
  return result;
}

std::int64_t row_bytes_of(const SequencePart& part) {
  std::int64_t bytes = 0;
  for (const TensorFormat& format : part.tensors) bytes += format.row_bytes();
  return bytes;
}

std::int64_t batch_size(std::int64_t total_bytes, std::int64_t batch_bytes) {
  return batch_bytes > 0 ? batch_bytes : detail::usual_batch_bytes(total_bytes);
}

std::int32_t HopBatches::behind(std::int32_t batch, std::int32_t rank) {
  for (const std::int32_t other : behind_[batch]) {
    if (jobs[other].rank == rank) return other;
  }
  const auto made = static_cast<std::int32_t>(jobs.size());
  jobs.push_back({rank, 0});
  after.push_back(batch);
  behind_.emplace_back();
  behind_[batch].push_back(made);
  return made;
}

void HopBatches::start_own(std::span<const SequencePart> parts, std::span<const PartRoutes> routes,
                           std::int64_t batch_bytes,
                           const std::vector<std::vector<std::uint8_t>>& grouped) {
  const std::size_t world = parts.front().metadata->world_size;
  std::vector<std::int64_t> total(world);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const std::int64_t row_bytes = row_bytes_of(parts[p]);
    for (std::size_t h = 0; h < routes[p].hops.size(); ++h) {
      const RelayHop& hop = routes[p].hops[h];
      if (grouped[p][h] != 0) total[hop.src_rank] += hop.num_rows * row_bytes;
    }
  }
  std::vector<std::int32_t> open(world, -1);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const std::int64_t row_bytes = row_bytes_of(parts[p]);
    of.emplace_back(routes[p].hops.size(), -1);
    for (std::size_t h = 0; h < routes[p].hops.size(); ++h) {
      const RelayHop& hop = routes[p].hops[h];
      std::int32_t batch = -1;
      if (hop.after >= 0) {
        batch = behind(of[p][hop.after], hop.src_rank);
      } else if (grouped[p][h] != 0) {
        std::int32_t& mine = open[hop.src_rank];
        const std::int64_t most = batch_size(total[hop.src_rank], batch_bytes);
        if (mine < 0 || jobs[mine].num_bytes >= most) {
          mine = static_cast<std::int32_t>(jobs.size());
          jobs.push_back({hop.src_rank, 0});
          after.push_back(-1);
          behind_.emplace_back();
        }
        batch = mine;
      }
      of[p][h] = batch;
      if (batch >= 0) jobs[batch].num_bytes += hop.num_rows * row_bytes;
    }
  }
}

}  // namespace waybill::detail
