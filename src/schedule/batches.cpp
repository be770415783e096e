#include "batches.h"

#include <queue>

#include "core/batch_bytes.h"

namespace waybill::detail {

std::int64_t batch_size(std::int64_t total_bytes, std::int64_t batch_bytes) {
  return batch_bytes > 0 ? batch_bytes : usual_batch_bytes(total_bytes);
}

std::vector<std::int32_t> first_tensors(std::span<const SequencePart> parts) {
  std::vector<std::int32_t> first(1, 0);
  for (const SequencePart& part : parts)
    first.push_back(first.back() + static_cast<std::int32_t>(part.tensors.size()));
  return first;
}

std::vector<std::int32_t> order_jobs(std::int32_t world_size, std::span<BatchJob> jobs,
                                     std::span<const std::pair<std::int32_t, std::int32_t>> edges) {
  std::vector<std::int32_t> waits(jobs.size());
  std::vector<std::int32_t> first(jobs.size() + 1);
  std::vector<std::int32_t> next(edges.size());
  for (const auto& [from, to] : edges) {
    ++first[from + 1];
    ++waits[to];
  }
  for (std::size_t j = 0; j < jobs.size(); ++j) first[j + 1] += first[j];
  std::vector<std::int32_t> fill(first.begin(), first.end());
  for (const auto& [from, to] : edges) next[fill[from]++] = to;

  using Entry = std::pair<std::int64_t, std::int32_t>;  // ready, job
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    if (waits[j] == 0) queue.emplace(0, static_cast<std::int32_t>(j));
  }
  std::vector<std::int32_t> order;
  std::vector<std::int64_t> busy(world_size);
  while (!queue.empty()) {
    const std::int32_t number = queue.top().second;
    queue.pop();
    BatchJob& job = jobs[number];
    std::int64_t& end = busy[job.rank];
    order.push_back(number);
    job.start = std::max(job.ready, end);
    job.finish = end = job.start + std::max<std::int64_t>(1, job.num_bytes);
    for (std::int32_t e = first[number]; e < first[number + 1]; ++e) {
      BatchJob& waiting = jobs[next[e]];
      waiting.ready = std::max(waiting.ready, job.finish);
      if (--waits[next[e]] == 0) queue.emplace(waiting.ready, next[e]);
    }
  }
  return order;
}

HopBatches::HopBatches(std::span<const SequencePart> parts, std::span<const PartRoutes> routes,
                       std::int64_t batch_bytes,
                       const std::function<bool(const PartRoutes&, std::size_t)>& groups_own) {
  const std::size_t world = parts.front().metadata->world_size;
  std::vector<std::int64_t> total(world);
  std::vector<std::vector<std::uint8_t>> grouped(parts.size());
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const std::int64_t row_bytes = row_bytes_of(parts[p]);
    for (std::size_t h = 0; h < routes[p].hops.size(); ++h) {
      const RelayHop& hop = routes[p].hops[h];
      grouped[p].push_back(hop.after < 0 && groups_own(routes[p], h) ? 1 : 0);
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
        batch = following(of[p][hop.after], hop.src_rank);
      } else if (grouped[p][h] != 0) {
        std::int32_t& mine = open[hop.src_rank];
        const std::int64_t max_bytes = batch_size(total[hop.src_rank], batch_bytes);
        if (mine < 0 || jobs[mine].num_bytes >= max_bytes) mine = add(hop.src_rank, -1);
        batch = mine;
      }
      of[p][h] = batch;
      if (batch >= 0) jobs[batch].num_bytes += hop.num_rows * row_bytes;
    }
  }
}

std::int32_t HopBatches::add(std::int32_t rank, std::int32_t before) {
  jobs.push_back({.rank = rank});
  after.push_back(before);
  following_.emplace_back();
  return static_cast<std::int32_t>(jobs.size()) - 1;
}

std::int32_t HopBatches::following(std::int32_t batch, std::int32_t rank) {
  for (const std::int32_t other : following_[batch]) {
    if (jobs[other].rank == rank) return other;
  }
  const std::int32_t made = add(rank, batch);
  following_[batch].push_back(made);
  return made;
}

void BatchWriter::begin(BatchKind kind) {
  batch_ = {.kind = kind,
            .first_segment = static_cast<std::int32_t>(plan_.segments.size()),
            .first_wait = static_cast<std::int32_t>(plan_.waits.size()),
            .first_signal = static_cast<std::int32_t>(plan_.signals.size()),
            .num_addresses = -static_cast<std::int32_t>(plan_.segment_addresses.size()),
            .first_chunk = plan_.num_chunks};
}

void BatchWriter::add(std::int32_t tensor, std::int64_t row, std::int64_t rows,
                      std::span<const std::uint64_t> addresses) {
  if (plan_.cuts[tensor].row_bytes == 0 || rows == 0) return;
  append_segment(plan_,
                 {.row = row,
                  .rows = rows,
                  .tensor = tensor,
                  .bucket = static_cast<std::int32_t>(plan_.batches.size()),
                  .first_chunk = static_cast<std::int32_t>(plan_.num_chunks)},
                 addresses);
}

bool BatchWriter::is_empty() const {
  return std::ssize(plan_.segments) == batch_.first_segment &&
         std::ssize(plan_.signals) == batch_.first_signal;
}

void BatchWriter::end() {
  if (is_empty()) return;
  batch_.num_segments = static_cast<std::int32_t>(plan_.segments.size()) - batch_.first_segment;
  batch_.num_waits = static_cast<std::int32_t>(plan_.waits.size()) - batch_.first_wait;
  batch_.num_signals = static_cast<std::int32_t>(plan_.signals.size()) - batch_.first_signal;
  batch_.num_addresses += static_cast<std::int32_t>(plan_.segment_addresses.size());
  batch_.num_chunks = plan_.num_chunks - batch_.first_chunk;
  plan_.batches.push_back(batch_);
}

}  // namespace waybill::detail
