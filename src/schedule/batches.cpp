#include <queue>

#include "compile.h"
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

void begin_batch(SequencePlan& plan, BatchKind kind) {
  plan.batches.push_back(
      {.kind = kind,
       .first_segment = static_cast<std::int32_t>(plan.segments.size()),
       .first_wait = static_cast<std::int32_t>(plan.waits.size()),
       .first_signal = static_cast<std::int32_t>(plan.signals.size()),
       .num_addresses = -static_cast<std::int32_t>(plan.segment_addresses.size()),
       .first_chunk = plan.num_chunks});
}

void add_segment(SequencePlan& plan, std::int32_t tensor, std::int64_t row, std::int64_t rows,
                 std::span<const std::uint64_t> addresses) {
  if (plan.cuts[tensor].row_bytes == 0 || rows == 0) return;
  const auto first_chunk = static_cast<std::int32_t>(plan.num_chunks);
  RowSegment& segment = append_segment(plan, tensor, row, rows, addresses);
  segment.bucket = static_cast<std::int32_t>(plan.batches.size()) - 1;
  segment.first_chunk = first_chunk;
}

bool is_batch_empty(const SequencePlan& plan) {
  const WorkBatch& batch = plan.batches.back();
  return std::ssize(plan.segments) == batch.first_segment &&
         std::ssize(plan.signals) == batch.first_signal;
}

void end_batch(SequencePlan& plan) {
  if (is_batch_empty(plan)) {
    plan.batches.pop_back();
    return;
  }
  WorkBatch& batch = plan.batches.back();
  batch.num_segments = static_cast<std::int32_t>(plan.segments.size()) - batch.first_segment;
  batch.num_waits = static_cast<std::int32_t>(plan.waits.size()) - batch.first_wait;
  batch.num_signals = static_cast<std::int32_t>(plan.signals.size()) - batch.first_signal;
  batch.num_addresses += static_cast<std::int32_t>(plan.segment_addresses.size());
  batch.num_chunks = plan.num_chunks - batch.first_chunk;
}

}  // namespace waybill::detail
